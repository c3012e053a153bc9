"""What it costs to hand a batch to the trainer: Arrow against JSON, from the journals in Redis to the client's memory.

usage: python tests/bench/export.py [--json]

A real gateway process on core 0, Valkey and the client on core 1. Each rollout has 10 turns. Both forms of one batch are read alternately
in one run; MB/s counts the bytes of the body, samples/s compares the forms.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson
import pyarrow.ipc
import uvloop
from rich.console import Console
from rich.table import Table

from service import journal
from service.groups import Groups
from service.jobs import Jobs
from service.leases import Ended, Leases
from service.records import JobSpec, Outcome, TaskSpec
from service.settings import Settings
from service.store import Store, open_store

KEY = "bench-key-1"
ARROW = "application/vnd.apache.arrow.stream"
TURNS = 10
ROUNDS = 3


def rollout_entries(tokens: int) -> list[journal.AnyEntry]:
    """A journal of `tokens` tokens: a prompt, then turns of which two thirds are sampled."""
    part = tokens // (TURNS * 3 + 3)
    sampled, appended = 2 * part, part
    entries: list[journal.AnyEntry] = [
        journal.Opened(at=0.0, attempt=1, worker="bench"),
        journal.Prompted(at=0.0, token_ids=journal.pack_ids(range(tokens - TURNS * 3 * part))),
    ]
    for turn in range(TURNS):
        entries += [
            journal.Generated(
                at=0.0,
                token_ids=journal.pack_ids(range(1000, 1000 + sampled)),
                logprobs=journal.pack_logprobs([-0.123456 - turn] * sampled),
                spans=[(1, 0, 0, sampled)],
                finish="stop",
                generator="bench",
                seconds=1.0,
            ),
            journal.Replied(at=0.0, content="x" * 400, calls=[journal.Call(id=f"c{turn}", name="bash", arguments="{}")]),
            journal.Observed(at=0.0, call_id=f"c{turn}", name="bash", text="y" * 1000),
            journal.Extended(at=0.0, token_ids=journal.pack_ids(range(appended))),
        ]
    return [
        *entries,
        journal.Stopped(at=0.0, reason="turn_limit"),
        journal.Scored(at=0.0, reward=1.0, detail="{}", seconds=0.1),
    ]


async def fill(store: Store, *, groups: int, size: int, tokens: int) -> str:
    """A job with that many ready groups; its id."""
    spec = {
        "name": f"export-{groups}-{tokens}",
        "model": {"tokenizer": "none", "context_tokens": 100_000},
        "generators": ["http://127.0.0.1:9"],
        "group_size": size,
        "groups_per_step": groups,
        "staleness_budget": 0,
        "max_in_flight_rollouts": groups * size,
    }
    job, _ = await Jobs(store, retain_s=3600).create("bench", JobSpec.model_validate(spec))
    task = {"messages": [{"role": "user", "content": "x"}]}
    tasks = [TaskSpec.model_validate(task | {"task_id": f"t{number}"}) for number in range(groups)]
    await Groups(store, retain_s=3600).submit(job.job_id, tasks)
    leases = Leases(store, lease_s=600, max_attempts=3)
    entries = rollout_entries(tokens)
    ended = Ended(
        outcome=Outcome.TRUNCATED, stop_reason="turn_limit", reward=1.0, reward_detail="{}", turns=TURNS, tool_calls=TURNS,
        sampled_tokens=1, oldest_version=1, newest_version=1, oldest_lineage=0,
    )  # fmt: skip
    while taken := await leases.take(job.job_id, "bench", n=64):
        for lease in taken:
            await leases.append(lease, entries, at_index=0)
            await leases.finish(lease, ended)
    return job.job_id


@asynccontextmanager
async def gateway(store: Store, folder: str) -> AsyncIterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"ROLLWAY_REDIS_URL": store.url, "ROLLWAY_DATA_DIR": folder, "ROLLWAY_API_KEYS": f"bench:{KEY}"}
    command = [str(Path(sys.executable).parent / "rollway"), "serve", "--port", str(port)]
    with open(f"{folder}/gateway.log", "wb") as log:
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=log, stderr=log)
    os.sched_setaffinity(process.pid, {0})
    try:
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(f"{url}/healthz") as reply:
                        if reply.status == 200:
                            break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def read(http: aiohttp.ClientSession, url: str, accept: str) -> tuple[int, float]:
    """Bytes and seconds to the last byte; then the body is parsed once to see that it is whole."""
    started = time.perf_counter()
    async with http.get(url, headers={"Accept": accept}) as reply:
        assert reply.status == 200, await reply.text()
        body = await reply.read()
    seconds = time.perf_counter() - started
    if accept == ARROW:
        pyarrow.ipc.open_stream(body).read_all()
    elif len(body) < 200_000_000:
        orjson.loads(body)
    return len(body), seconds


async def measure(store: Store, url: str, *, groups: int, size: int, tokens: int) -> list[dict[str, float | str]]:
    job_id = await fill(store, groups=groups, size=size, tokens=tokens)
    rows: list[dict[str, float | str]] = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}, read_bufsize=2**22) as http:
        body = {"groups": groups, "lease_s": 3600}
        async with http.post(f"{url}/v1/jobs/{job_id}/batches", json=body, headers={"Accept": ARROW}) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()
        async with http.get(f"{url}/v1/jobs/{job_id}/batches") as reply:
            batch_id = (await reply.json())["batches"][0]["batch_id"]
        took: dict[str, list[tuple[int, float]]] = {ARROW: [], "application/json": []}
        for _ in range(ROUNDS):
            for accept, results in took.items():
                results.append(await read(http, f"{url}/v1/batches/{batch_id}", accept))
        for accept, results in took.items():
            size_mb, seconds = results[0][0] / 1e6, statistics.median(seconds for _, seconds in results)
            samples = groups * size
            rows.append(
                {
                    "form": "Arrow" if accept == ARROW else "JSON",
                    "samples": samples,
                    "tokens": tokens,
                    "MB": size_mb,
                    "seconds": seconds,
                    "MB/s": size_mb / seconds,
                    "samples/s": samples / seconds,
                }
            )
        async with http.post(f"{url}/v1/batches/{batch_id}/ack") as reply:
            assert reply.status == 200
    return rows


async def bench() -> list[dict[str, float | str]]:
    os.sched_setaffinity(0, {1})
    with tempfile.TemporaryDirectory() as folder:
        async with open_store(Settings(data_dir=Path(folder))) as store, gateway(store, folder) as url:
            rows = await measure(store, url, groups=32, size=16, tokens=8192)
            return rows + await measure(store, url, groups=32, size=16, tokens=16_384)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    figures = uvloop.run(bench())
    if parser.parse_args().json:
        Console(soft_wrap=True).print_json(json.dumps(figures))
    else:
        table = Table(*figures[0], title="A batch, from the journals to the client")
        for row in figures:
            table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
        Console().print(table)
