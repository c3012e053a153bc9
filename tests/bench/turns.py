"""What orchestration costs a turn: everything but generation and tool time.

usage: python tests/bench/turns.py [--rollouts N] [--turns N] [--json]

One worker on core 0 (this process: real leases, journal, renewals, metrics, retries, the stock tokenizer's vocabulary); a canned
generator and the embedded Valkey on core 1. Histories begin at about 2,500 tokens and grow by about 540 a turn (200 sampled, 328 of tool
output, the template's own), so a rollout of 8 turns averages 4,400.

Saturated rows answer at once: turns per second of one worker core. Paced rows delay each generation so that the load is half of what
saturates: overhead is the time from one journaled generation to the next, less the generator's delay (the tool takes none).
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from sandboxes.base import ExecResult, Sandbox, SandboxBackend, SandboxInfo, SandboxSpec
from service import journal
from service.groups import Groups
from service.jobs import Jobs
from service.leases import Leases
from service.records import JobSpec, TaskSpec
from service.settings import Settings
from service.store import Store, open_store
from service.tokenizers import make_qwen3
from service.weight_store import WeightStore
from workers.resources import JobContexts, Resources
from workers.worker import Worker

ROUNDS = 3
"""Of the paced rows, all shown: what another process does on the machine shows in them first."""
FIRST_TOKENS = 2700
"""Above the length of every first prompt here, below that of every second."""
HERE = Path(__file__).parent
OUTPUT = ("    total += weights[index] * values[index]  # accumulate\n" * 40)[:1100].encode()


class InstantSandbox(Sandbox):
    """A sandbox whose every command prints the same text at once: tool time is not what is measured."""

    id = "instant"
    boot_id = "instant"
    start_seconds = 0.0

    async def exec(self, argv: Sequence[str], **more: object) -> ExecResult:
        return ExecResult(exit_code=0, stdout=OUTPUT, stderr=b"", seconds=0.0)


class InstantBackend(SandboxBackend):
    name = "docker"

    async def create(self, spec: SandboxSpec, *, name: str, fence: int = 0) -> InstantSandbox:
        return InstantSandbox()

    async def attach(self, sandbox_id: str, *, name: str | None = None, fence: int = 0, boot_id: str | None = None) -> InstantSandbox:
        return InstantSandbox()

    async def images(self) -> frozenset[str]:
        return frozenset()

    async def list(self) -> Sequence[SandboxInfo]:
        return []

    async def sweep(self, **which: object) -> int:
        return 0


def canned_reply(tokenizer_dir: Path, path: Path) -> None:
    """200 sampled tokens: some thought, one bash call, the end token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "sed -n 1,40p main.py"}}\n</tool_call><|im_end|>'
    tail = tokenizer.encode(call, add_special_tokens=False).ids
    thought = tokenizer.encode("I will look at the file before I change it. " * 40, add_special_tokens=False).ids
    ids = thought[: 200 - len(tail)] + tail
    meta = {
        "id": "RID",
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "prompt_tokens": "PROMPT",
        "completion_tokens": len(ids),
        "cached_tokens": 3900,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[-0.25, token, None] for token in ids],
        "output_token_logprobs_length": len(ids),
        "input_token_logprobs": [],
    }
    path.write_text(json.dumps({"text": "", "output_ids": ids, "meta_info": meta}, separators=(",", ":")))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def canned_generator(reply: Path, delay_s: float) -> AsyncIterator[str]:
    port = free_port()
    command = [sys.executable, str(HERE / "canned_generator.py"), str(port), str(reply), str(delay_s), str(FIRST_TOKENS)]
    process = await asyncio.create_subprocess_exec(*command)
    os.sched_setaffinity(process.pid, {1})
    try:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


def task(number: int, turns: int) -> TaskSpec:
    prompt = f"Task {number}.\n" + "def step(values, weights):\n    return [v * w for v, w in zip(values, weights)]\n" * 110
    return TaskSpec.model_validate(
        {
            "task_id": f"bench/{number}",
            "messages": [{"role": "user", "content": prompt}],
            "tools": ["bash"],
            "limits": {"turns": turns, "tokens": 100_000, "turn_tokens": 1024},
        }
    )


async def measure(store: Store, settings: Settings, url: str, *, name: str, in_flight: int, rollouts: int, turns: int) -> dict[str, float]:
    """Run `rollouts` of `turns` turns with `in_flight` at once; figures per turn."""
    jobs, groups = Jobs(store, retain_s=3600), Groups(store, retain_s=3600)
    settings = settings.model_copy(update={"worker_rollouts": in_flight})
    spec = {
        "name": name,
        "model": {"tokenizer": str(settings.tokenizer_roots[0] / "qwen3"), "renderer": "qwen3", "context_tokens": 32_768},
        "generators": [{"url": url, "max_concurrency": 4096}],
        "group_size": 1,
        "staleness_budget": None,
        "queue_groups": 100_000,
        "max_in_flight_rollouts": 100_000,
    }
    job, _ = await jobs.create("bench", JobSpec.model_validate(spec))
    submitted = await groups.submit(job.job_id, [task(number, turns) for number in range(rollouts)])
    stopping = asyncio.Event()
    leases = Leases(store, lease_s=settings.lease_s, max_attempts=3)
    async with JobContexts(settings, jobs, WeightStore(store)) as contexts, aiohttp.ClientSession() as http:
        await contexts.get(job.job_id)
        resources = Resources(
            settings=settings,
            worker="bench",
            deployment_id="bench",
            leases=leases,
            groups=groups,
            contexts=contexts,
            backends={"docker": InstantBackend()},
            http=http,
            verifying=asyncio.Semaphore(16),
            stopping=stopping,
        )
        worker = asyncio.create_task(Worker(store, jobs, resources).run())
        cpu, wall = time.process_time(), time.perf_counter()
        while (counts := await jobs.counts(job.job_id)).ready < rollouts:
            if counts.failed:
                raise SystemExit(f"rollouts failed: {counts.failed}")
            await asyncio.sleep(0.1)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        stopping.set()
        await worker
    gaps, sizes = [], []
    for _, group_id in submitted.groups:
        entries = await leases.journal(f"{group_id}-r0")
        at = [entry.at for entry in entries if isinstance(entry, journal.Generated)]
        gaps += list(np.diff(at))
        sizes.append(sum(len(journal.encode(entry)) for entry in entries if not isinstance(entry, journal.Prompted)))
    total = rollouts * turns
    return {
        "in_flight": in_flight,
        "turns": total,
        "turns_per_s": total / wall,
        "cpu_ms_per_turn": cpu / total * 1000,
        "turns_per_cpu_s": total / cpu,
        "gap_p50_ms": float(np.percentile(gaps, 50)) * 1000 if gaps else 0.0,
        "gap_p99_ms": float(np.percentile(gaps, 99)) * 1000 if gaps else 0.0,
        "journal_bytes_per_turn": (float(np.mean(sizes))) / turns,
    }


async def bench(rollouts: int, turns: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizers = Path(folder) / "tokenizers"
        tokenizers.mkdir()
        make_qwen3(tokenizers / "qwen3")
        reply = Path(folder) / "reply.json"
        canned_reply(tokenizers / "qwen3", reply)
        settings = Settings(data_dir=Path(folder), tokenizer_roots=[tokenizers])
        rows = []
        async with open_store(settings) as store:
            pin()
            for in_flight in (1, 64, 256):
                count = max(in_flight * 2, min(rollouts, in_flight * 8))
                async with canned_generator(reply, 0.0) as url:
                    saturated = await measure(store, settings, url, name=f"s{in_flight}", in_flight=in_flight, rollouts=count, turns=turns)
                delay_s = 2 * in_flight / saturated["turns_per_s"]
                rows.append({"paced": 0.0} | saturated)
                async with canned_generator(reply, delay_s) as url:
                    for number in range(ROUNDS):
                        name = f"p{in_flight}-{number}"
                        paced = await measure(store, settings, url, name=name, in_flight=in_flight, rollouts=count, turns=turns)
                        paced["overhead_p50_ms"] = paced["gap_p50_ms"] - delay_s * 1000
                        paced["overhead_p99_ms"] = paced["gap_p99_ms"] - delay_s * 1000
                        rows.append({"paced": 1.0} | paced)
            for length in (1, 10, 50):
                async with canned_generator(reply, 0.0) as url:
                    row = await measure(store, settings, url, name=f"j{length}", in_flight=8, rollouts=8, turns=length)
                rows.append({"paced": -1.0, "length": length} | row)
        return rows


def pin() -> None:
    """This process on core 0, everything it started (Valkey) on core 1."""
    children = subprocess.run(["ps", "-e", "-o", "pid=,comm="], capture_output=True, text=True, check=True).stdout
    for line in children.splitlines():
        pid, name = line.split(None, 1)
        if "valkey" in name or "redis" in name:
            os.sched_setaffinity(int(pid), {1})
    os.sched_setaffinity(0, {0})


def show(rows: list[dict[str, float]]) -> None:
    table = Table(title="Orchestration per turn, one worker core")
    columns = ("load", "in flight", "turns", "turns/s", "CPU ms/turn", "turns/CPU s", "overhead p50 ms", "overhead p99 ms")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        if row["paced"] < 0:
            continue
        figures = [f"{row.get(key, float('nan')):.2f}" for key in ("overhead_p50_ms", "overhead_p99_ms")]
        table.add_row(
            "half" if row["paced"] else "saturated",
            f"{row['in_flight']:.0f}",
            f"{row['turns']:.0f}",
            f"{row['turns_per_s']:.0f}",
            f"{row['cpu_ms_per_turn']:.2f}",
            f"{row['turns_per_cpu_s']:.0f}",
            *figures,
        )
    console = Console(width=120)
    console.print(table)
    for row in rows:
        if row["paced"] < 0:
            console.print(f"journal at {row['length']:.0f} turns: {row['journal_bytes_per_turn']:.0f} bytes a turn, the prompt left out")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = uvloop.run(bench(arguments.rollouts, arguments.turns))
    if arguments.json:
        Console(soft_wrap=True).print_json(json.dumps(figures))
    else:
        show(figures)
