"""What it costs to hand a batch to the trainer: Arrow against JSON, from the journals in Redis to the client's memory.

usage: python tests/bench/export.py [--json]

A real gateway process on core 0, Valkey and the client on core 1. Each rollout has 10 turns. Both forms of one batch are read alternately
in one run. The client reads into a buffer that it keeps, since a slower one would be what is measured. MB/s counts the bytes of the body
up to the last one; `to arrays` is the time from then until the client has arrays, and `arrays/s` the samples of both together: where a
trainer pays for JSON. `CPU` is the gateway's own time for one batch, which says more than `seconds` on a busy machine.
"""

import argparse
import asyncio
import http.client
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import psutil
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
ARROW, JSON = "application/vnd.apache.arrow.stream", "application/json"
COLUMNS = {"token_ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32, "versions": np.int32}
TURNS = 10
ROUNDS = 5


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
async def gateway(store: Store, folder: str) -> AsyncIterator[tuple[str, int]]:
    """Its URL and process id."""
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
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(f"{url}/healthz") as reply:
                        if reply.status == 200:
                            break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        await process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One body: its bytes, seconds to the last one, seconds from there to arrays, and CPU seconds of the gateway."""

    size: int
    seconds: float
    arrays_s: float
    cpu_s: float


class Client:
    """Reads one batch again and again over HTTP. Blocking, as a trainer's own loop is."""

    def __init__(self, url: str, path: str, gateway_pid: int) -> None:
        self._host = url.removeprefix("http://")
        self._path = path
        self._gateway = psutil.Process(gateway_pid)
        self._buffer = bytearray(2**28)

    def read(self, accept: str) -> Reading:
        before, started = self._cpu_s(), time.perf_counter()
        body = self._body(accept)
        received = time.perf_counter()
        cpu_s = self._cpu_s() - before
        arrays = from_arrow(body) if accept == ARROW else from_json(body)
        assert len(arrays)
        return Reading(size=len(body), seconds=received - started, arrays_s=time.perf_counter() - received, cpu_s=cpu_s)

    def _body(self, accept: str) -> memoryview:
        with closing(http.client.HTTPConnection(self._host)) as connection:
            connection.request("GET", self._path, headers={"Accept": accept, "Authorization": f"Bearer {KEY}"})
            reply = connection.getresponse()
            assert reply.status == 200, reply.read()
            view, end = memoryview(self._buffer), 0
            while count := reply.readinto(view[end : end + 2**20]):
                end += count
            return view[:end]

    def _cpu_s(self) -> float:
        times = self._gateway.cpu_times()
        return float(times.user + times.system)


def from_arrow(body: memoryview) -> pyarrow.Table:
    return pyarrow.ipc.open_stream(pyarrow.py_buffer(body)).read_all()


def from_json(body: memoryview) -> list[list[np.ndarray]]:
    return [
        [np.array(sample[name], dtype=kind) for name, kind in COLUMNS.items()]
        for group in orjson.loads(body)["groups"]
        for trajectory in group["trajectories"]
        for sample in trajectory["samples"]
    ]


async def lease(url: str, job_id: str, groups: int) -> str:
    """The path of a batch of all `groups`."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}, read_bufsize=2**22) as session:
        body = {"groups": groups, "lease_s": 3600}
        async with session.post(f"{url}/v1/jobs/{job_id}/batches", json=body, headers={"Accept": ARROW}) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()
        async with session.get(f"{url}/v1/jobs/{job_id}/batches") as reply:
            return f"/v1/batches/{(await reply.json())['batches'][0]['batch_id']}"


async def measure(store: Store, gateway: tuple[str, int], *, groups: int, size: int, tokens: int) -> list[dict[str, float | str]]:
    url, pid = gateway
    path = await lease(url, await fill(store, groups=groups, size=size, tokens=tokens), groups)
    client = Client(url, path, pid)
    took: dict[str, list[Reading]] = {ARROW: [], JSON: []}
    for _ in range(ROUNDS):
        for accept, readings in took.items():
            readings.append(await asyncio.to_thread(client.read, accept))
    return [figures_of(accept, readings, samples=groups * size, tokens=tokens) for accept, readings in took.items()]


def figures_of(accept: str, readings: list[Reading], *, samples: int, tokens: int) -> dict[str, float | str]:
    size_mb = readings[0].size / 1e6
    seconds = statistics.median(reading.seconds for reading in readings)
    arrays_s = statistics.median(reading.arrays_s for reading in readings)
    return {
        "form": "Arrow" if accept == ARROW else "JSON",
        "samples": samples,
        "tokens": tokens,
        "MB": size_mb,
        "seconds": seconds,
        "MB/s": size_mb / seconds,
        "CPU": statistics.median(reading.cpu_s for reading in readings),
        "to arrays": arrays_s,
        "arrays/s": samples / (seconds + arrays_s),
    }


async def bench() -> list[dict[str, float | str]]:
    os.sched_setaffinity(0, {1})
    with tempfile.TemporaryDirectory() as folder:
        async with open_store(Settings(data_dir=Path(folder))) as store, gateway(store, folder) as running:
            rows = await measure(store, running, groups=32, size=16, tokens=8192)
            return rows + await measure(store, running, groups=32, size=16, tokens=16_384)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    figures = uvloop.run(bench())
    if parser.parse_args().json:
        Console(soft_wrap=True).print_json(json.dumps(figures))
    else:
        table = Table(*figures[0], title="A batch, from the journals to the client")
        for row in figures:
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
        Console().print(table)
