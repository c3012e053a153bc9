"""What every deployment has: workers and a gateway are replaced one by one under load, and one whose engine hangs is replaced too."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.test_docker_faults import LossyRoad
from tests.e2e.stack import KEYS, Stack, call, end, free_port, ready, rule, running, spawn, task
from tests.e2e.test_main_path import assert_equals_record, flat, messages

pytestmark = [pytest.mark.docker, pytest.mark.timeout(360)]

LONG = "I think about it for a while. " * 12
POLICY: dict[str, Any] = {
    "rules": [
        rule(
            "do roll",
            LONG + call("bash", command="echo x >> /work/log"),
            LONG + call("bash", command="echo x >> /work/log; sleep 1"),
            LONG + call("bash", command="wc -l < /work/log; touch /work/done"),
            LONG + call("submit"),
        ),
    ],
}
GROUPS, SIZE = 4, 2
LEASE_S, STILL_S = 60.0, 30.0
"""Nobody waits for a lease to run out: what is handed back goes on at once, in the time that a slow machine needs for a turn."""
GRACE_S, LATE_S = 6.0, 8.0
"""LATE_S: what a slow machine needs to end a process; an engine that hangs would take longer, removals alone have 20 s."""


async def assert_nothing_was_lost(stack: Stack, job_id: str, groups: list[str]) -> None:
    """Every rollout ended in its first attempt, with the tokens that were sampled and each command's effect once."""
    batch = await stack.batch(job_id, GROUPS, wait_s=90)
    found = flat(batch)
    assert sorted(group["group_id"] for group in batch["groups"]) == sorted(groups)
    assert {(trajectory["attempt"], trajectory["reward"], trajectory["turns"]) for trajectory, _ in found} == {(1, 1.0, 4)}
    assert assert_equals_record(stack, batch) == GROUPS * SIZE * 4
    for group_id in groups:
        for index in range(SIZE):
            shown = await messages(stack, group_id, index)
            assert [message["content"] for message in shown if message["role"] == "tool"][2] == "2\n"


async def stood_still(stack: Stack, rollout_id: str) -> list[float]:
    """For each time that a worker handed it back, the seconds until its next step, as its journal has them."""
    told = (await stack.api.get(f"/v1/rollouts/{rollout_id}/events")).text
    names = [line.removeprefix("event: ") for line in told.splitlines() if line.startswith("event: ")]
    times = [json.loads(line.removeprefix("data: ")).get("at") for line in told.splitlines() if line.startswith("data: ")]
    return [times[place + 1] - times[place] for place, name in enumerate(names) if name == "handed_back"]


@asynccontextmanager
async def second_gateway(stack: Stack) -> AsyncIterator[Stack]:
    """The same deployment through another gateway."""
    port = free_port()
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {KEYS['alpha']}"}
    process = await spawn("serve", "--port", str(port), "--workers", "0", env=stack.env, log=stack.folder / "gateway-2.log")
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as api:
            await ready(api, "/healthz")
            yield replace(stack, url=url, api=api, gateway=process)
    finally:
        await end(process)


async def turns_begun(stack: Stack, groups: list[str]) -> None:
    """Until every rollout is in the middle of its work."""
    async with asyncio.timeout(60):
        for group_id in groups:
            for index in range(SIZE):
                while (await stack.api.get(f"/v1/rollouts/{group_id}-r{index}")).json()["turns"] < 1:
                    await asyncio.sleep(0.1)


async def test_a_rolling_restart_under_load_loses_nothing(tmp_path: Path, qwen3_dir: Path) -> None:
    async with running(tmp_path, qwen3_dir, POLICY, workers=0, tokens_per_s=60) as stack, second_gateway(stack) as other:
        stack.api.timeout = other.api.timeout
        env = stack.env | {"ROLLWAY_LEASE_S": str(LEASE_S)}
        workers = [await spawn("worker", env=env, log=tmp_path / f"worker-{number}.log") for number in range(2)]
        try:
            job_id = await stack.job("roll", group_size=SIZE, groups_per_step=GROUPS)
            groups = await stack.submit(job_id, *(task(f"roll {number}") for number in range(GROUPS)))
            await turns_begun(stack, groups)
            for number in range(2):
                assert await end(workers[number]) == 0
                workers[number] = await spawn("worker", env=env, log=tmp_path / f"worker-{number}-new.log")
            assert await end(stack.gateway) == 0
            await assert_nothing_was_lost(other, job_id, groups)
            still = [
                seconds for group_id in groups for index in range(SIZE) for seconds in await stood_still(other, f"{group_id}-r{index}")
            ]
            assert still, "no worker left in the middle of a rollout"
            assert max(still) < STILL_S
        finally:
            for worker in workers:
                await end(worker)


class HangingRoad(LossyRoad):
    """To an engine that gives no answer any more, and takes every connection."""

    hangs = False

    def hang(self) -> None:
        self.hangs = True
        self.fall_silent()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.hangs:
            await super().connect(reader, writer)
            return
        try:
            await asyncio.Event().wait()
        finally:
            writer.transport.abort()


@asynccontextmanager
async def hanging_road(folder: Path) -> AsyncIterator[tuple[HangingRoad, str]]:
    """And the engine's address at its end."""
    road, path = HangingRoad(), folder / "engine.sock"
    async with await asyncio.start_unix_server(road.accept, path=path):
        try:
            yield road, f"unix://{path}"
        finally:
            await road.aclose()


async def test_a_worker_whose_engine_hangs_leaves_within_its_grace_time(tmp_path: Path, qwen3_dir: Path) -> None:
    """Its rollouts are handed back all the same, and go on in their sandboxes as soon as another worker has them."""
    async with hanging_road(tmp_path) as (road, host), running(tmp_path, qwen3_dir, POLICY, workers=0) as stack:
        env = stack.env | {"ROLLWAY_LEASE_S": str(LEASE_S)}
        first = await spawn("worker", env=env | {"ROLLWAY_DOCKER_HOST": host, "ROLLWAY_GRACE_S": str(GRACE_S)}, log=tmp_path / "first.log")
        second = None
        try:
            job_id = await stack.job("roll", group_size=SIZE, groups_per_step=GROUPS)
            groups = await stack.submit(job_id, *(task(f"roll {number}") for number in range(GROUPS)))
            await turns_begun(stack, groups)
            road.hang()
            told_at = time.monotonic()
            assert await end(first, grace_s=60) == 0
            assert time.monotonic() - told_at < GRACE_S + LATE_S
            second = await spawn("worker", env=env, log=tmp_path / "second.log")
            await assert_nothing_was_lost(stack, job_id, groups)
        finally:
            for worker in filter(None, (first, second)):
                await end(worker, grace_s=60)
