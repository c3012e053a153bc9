"""The tables of the sandbox benchmark."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.bench.sandbox_costs import Cpu
from tests.bench.sandbox_results import Aim, Key, Memory, Results, Samples
from tests.bench.sandbox_starts import BARE_START, CLAIM, COLD
from tests.bench.sandbox_variants import AIODOCKER, BARE, DOCKER_PY, OURS

VARIANTS = (OURS, BARE, DOCKER_PY, AIODOCKER)
CALL = "sh -c true"
QUIET_CORES = 0.3
"""Busy while nothing is called; the shims of 200 idle sandboxes are a part of it."""


def show(results: Results) -> None:
    console = Console(width=170)
    for size in sorted({key.sandboxes for key in results.calls}):
        console.print(_calls(results, size))
    console.print(_cpu(results))
    console.print(_starts(results))
    console.print(_memory(results.memory))
    console.print(_aims(list(aims(results))))
    if results.idle_busy_cores > QUIET_CORES:
        console.print(f"NOT A QUIET MACHINE: {results.idle_busy_cores:.2f} cores were busy with other things. Measure again.", style="bold")


def aims(results: Results) -> Iterator[Aim]:
    """Those of the project for which this run has the figures."""
    one, fifty = _row(results, 1, CALL), _row(results, 50, CALL)
    per_thousand = fifty[OURS].per_thousand(results.idle_busy_cores)
    yield Aim("call at 1 sandbox, p50: times the bare agent's", one[OURS].ms(50) / one[BARE].ms(50), 1.3)
    yield Aim("call at 1 sandbox, p50: times faster than docker-py", one[DOCKER_PY].ms(50) / one[OURS].ms(50), 35, at_least=True)
    yield Aim("calls/s at 50 sandboxes: times docker-py's", fifty[OURS].calls_per_s / fifty[DOCKER_PY].calls_per_s, 35, at_least=True)
    yield Aim("client's CPU per 1,000 calls at 50, s", per_thousand.client_s, 0.15)
    yield Aim("whole machine's CPU per 1,000 calls at 50, s", per_thousand.machine_s, 1.5)
    yield Aim("cold start, p50: times the bare agent's", _median(results.starts[COLD]) / _median(results.starts[BARE_START]), 1.0)
    yield Aim("claim from the pool, p50, ms", _median(results.starts[CLAIM]), 10)
    for memory in results.memory:
        yield Aim(f"memory of an idle sandbox, {memory.sandboxes} of them, MB", memory.available_mib, 4.5)
        yield Aim(f"call on one of {memory.sandboxes} idle sandboxes, p50, ms", _median(memory.call_ms), 1.5)


def _row(results: Results, size: int, operation: str) -> dict[str, Samples]:
    return {variant: results.calls[Key(size, operation, variant)] for variant in VARIANTS}


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _calls(results: Results, size: int) -> Table:
    times = [f"{variant} p50 / p99" for variant in VARIANTS]
    title = f"{size} sandbox{'es' if size > 1 else ''}, one call in flight each: milliseconds, and calls/s"
    table = _table(title, "", *times, "ours / bare", "docker-py / ours", "calls/s ours", "docker-py", "times")
    for operation in dict.fromkeys(key.operation for key in results.calls if key.sandboxes == size):
        row = _row(results, size, operation)
        ours, peer = row[OURS], row[DOCKER_PY]
        table.add_row(
            operation,
            *(f"{row[variant].ms(50):.2f} / {row[variant].ms(99):.2f}" for variant in VARIANTS),
            f"{ours.ms(50) / row[BARE].ms(50):.2f}",
            f"{peer.ms(50) / ours.ms(50):.1f}",
            f"{ours.calls_per_s:.0f}",
            f"{peer.calls_per_s:.0f}",
            f"{ours.calls_per_s / peer.calls_per_s:.1f}",
        )
    return table


def _cpu(results: Results) -> Table:
    title = f"CPU seconds per 1,000 calls of {CALL} (the machine used {results.idle_busy_cores:.2f} cores idle, taken off)"
    table = _table(title, "", "sandboxes", "calls", "client", "engine and shims", "inside", "sum", "whole machine", "sum / ours")
    for size in sorted({key.sandboxes for key in results.calls}):
        row = _row(results, size, CALL)
        ours = row[OURS].per_thousand(results.idle_busy_cores)
        for variant, samples in row.items():
            used = samples.per_thousand(results.idle_busy_cores)
            total_s = _accounted_s(used)
            figures = [f"{value:.2f}" for value in (used.client_s, used.daemons_s, used.inside_s, total_s, used.machine_s)]
            table.add_row(variant, str(size), str(len(samples.times_s)), *figures, f"{total_s / _accounted_s(ours):.1f}")
    return table


def _accounted_s(used: Cpu) -> float:
    """By whose it is; what others do on the machine is not in it."""
    return used.client_s + used.daemons_s + used.inside_s


def _starts(results: Results) -> Table:
    table = _table("From nothing to the first answered command, milliseconds", "", "p50", "least", "most", "of", "times ours, cold")
    for way, times in results.starts.items():
        ratio = _median(times) / _median(results.starts[COLD])
        table.add_row(way, f"{_median(times):.1f}", f"{min(times):.1f}", f"{max(times):.1f}", str(len(times)), f"{ratio:.2f}")
    return table


def _memory(rows: Sequence[Memory]) -> Table:
    columns = ("MB each, off the available", "MB each, PSS of shim and agent", "starts/s", "cores busy", "call p50 ms", "p99 ms")
    table = _table("Idle sandboxes of ours; a call on random ones of them", "", *columns)
    for row in rows:
        calls = (f"{_median(row.call_ms):.2f}", f"{np.percentile(row.call_ms, 99):.2f}")
        figures = (f"{row.available_mib:.2f}", f"{row.resident_mib:.2f}", f"{row.starts_per_s:.1f}", f"{row.busy_cores:.2f}")
        table.add_row(str(row.sandboxes), *figures, *calls)
    return table


def _aims(rows: Sequence[Aim]) -> Table:
    table = _table("Aims", "", "measured", "aim", "")
    for aim in rows:
        bound = f"{'>=' if aim.at_least else '<='} {aim.bound:g}"
        table.add_row(aim.what, f"{aim.measured:.2f}", bound, "ok" if aim.reached else "NOT REACHED")
    return table
