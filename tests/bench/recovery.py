"""What it costs to lose nothing: how long rollouts stand still when their worker goes, the tokens journals save, and what journals cost.

usage: python -m tests.bench.recovery [--quick] [--json]        at the root of the clone, with a Docker engine; --quick: under four minutes

Take-overs: the processes of a deployment (two gateways, three workers, Valkey, two stand-in generators, Docker sandboxes); one worker
after the other gets SIGKILL, then SIGTERM. The journal's costs and memory: this process against a real Valkey with an append-only file.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench import recovery_kills, recovery_store
from tests.e2e.chaos.takeovers import Takeovers, percentile

MB = 1e6


@dataclass(slots=True)
class Results:
    takeovers: recovery_kills.Found
    appends: list[recovery_store.Appends]
    memory: list[recovery_store.Memory]


async def bench(folder: Path, *, quick: bool) -> Results:
    """The quiet parts come first."""
    appends = await recovery_store.appends(folder / "appends", turns=50 if quick else 200)
    sizes = ((1, 2000), (8, 500)) if quick else ((1, 10_000), (8, 2000))  # (turns, rollouts)
    memory = [await recovery_store.memory(folder / f"memory-{turns}", turns=turns, rollouts=rollouts) for turns, rollouts in sizes]
    (folder / "fleet").mkdir()
    kills, terms = (12, 12) if quick else (44, 24)
    return Results(await recovery_kills.measure(folder / "fleet", kills=kills, terms=terms), appends, memory)


def takeovers_table(found: recovery_kills.Found) -> Table:
    table = Table(title=f"Rollouts taken over, lease_s {recovery_kills.LEASE_S:.0f}")
    for column in (
        "worker",
        "times",
        "rollouts",
        "taken p50 s",
        "taken p99 s",
        "next step p50 s",
        "next step p99 s",
        "restarted",
        "tokens kept",
    ):
        table.add_column(column, justify="right")
    for what, times, seen in (("SIGKILL", found.kills, found.killed), ("SIGTERM", found.terms, found.left)):
        table.add_row(what, str(times), str(seen.resumed + seen.restarted), *seconds(seen), str(seen.restarted), f"{seen.tokens_saved:,}")
    kept = found.killed.tokens_saved + found.left.tokens_saved
    table.caption = f"{found.generated:,} tokens were sampled; restarting instead of resuming would have sampled at least {kept:,} more"
    if found.failures:
        table.caption += "\nattempts ended: " + "; ".join(f"{reason} ({times})" for reason, times in found.failures.items())
    return table


def seconds(found: Takeovers) -> list[str]:
    return [f"{percentile(values, part):.2f}" for values in (found.taken_s, found.stepped_s) for part in (50, 99)]


def appends_table(rows: list[recovery_store.Appends]) -> Table:
    table = Table(
        title=f"A turn in the journal: {rows[0].bytes:,} bytes, {recovery_store.SAMPLED} tokens sampled, {recovery_store.OBSERVED} observed"
    )
    for column in ("rollouts at once", "its two appends p50 ms", "p99 ms", "in Redis ms"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(str(row.at_once), f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}", f"{row.redis_ms:.3f}")
    return table


def memory_table(rows: list[recovery_store.Memory]) -> Table:
    table = Table(title="Memory of Redis, bytes per rollout")
    for column in (
        "rollouts",
        "turns",
        "queued",
        "in flight",
        "ended",
        "acked",
        "forgotten",
        "keys left when acked",
        "all in flight MB",
        "all acked MB",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        moments = (row.queued, row.in_flight, row.ended, row.acked, row.forgotten)
        figures = [f"{used / row.rollouts:,.0f}" for used in moments]
        table.add_row(
            str(row.rollouts), str(row.turns), *figures, str(row.keys_acked), f"{row.in_flight / MB:.1f}", f"{row.acked / MB:.1f}"
        )
    return table


def show(results: Results, took_s: float) -> None:
    console = Console(width=150)
    console.print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores {platform.machine()}, load {os.getloadavg()[0]:.1f}, {took_s:.0f} s"
    )
    for table in (takeovers_table(results.takeovers), appends_table(results.appends), memory_table(results.memory)):
        console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        measured = uvloop.run(bench(Path(temporary), quick=arguments.quick))
    if arguments.json:
        Console(soft_wrap=True).print_json(json.dumps(asdict(measured)))
    else:
        show(measured, time.monotonic() - began)
