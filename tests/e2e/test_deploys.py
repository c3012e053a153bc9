"""What every deployment has: workers and a gateway are replaced one by one under load."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.stack import KEYS, Stack, call, end, free_port, ready, rule, running, spawn, task
from tests.e2e.test_main_path import assert_equals_record, flat, messages

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]

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
        workers = [await spawn("worker", env=stack.env, log=tmp_path / f"worker-{number}.log") for number in range(2)]
        try:
            job_id = await stack.job("roll", group_size=SIZE, groups_per_step=GROUPS)
            groups = await stack.submit(job_id, *(task(f"roll {number}") for number in range(GROUPS)))
            await turns_begun(stack, groups)
            for number in range(2):
                assert await end(workers[number]) == 0
                workers[number] = await spawn("worker", env=stack.env, log=tmp_path / f"worker-{number}-new.log")
            assert await end(stack.gateway) == 0
            await assert_nothing_was_lost(other, job_id, groups)
        finally:
            for worker in workers:
                await end(worker)
