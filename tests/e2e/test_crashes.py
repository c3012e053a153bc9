"""kill -9 at bad moments: what was accepted is finished once, and no command's effect is counted twice."""

import asyncio
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.e2e.stack import Stack, call, end, ready, rule, running, spawn, task
from tests.e2e.test_faults import docker
from tests.e2e.test_main_path import assert_equals_record, containers, flat, messages

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]

SHORT, LONG = "I think. ", "I think about it for a while. " * 15
POLICY: dict[str, Any] = {
    "rules": [
        rule("do once.", call("bash", command="echo x >> /work/log; sleep 3; wc -l < /work/log; touch /work/done"), call("submit")),
        rule(
            "do turns",
            [text + call("bash", command="echo turn >> /work/log") for text in (SHORT, LONG)],
            [text + call("bash", command="wc -l < /work/log; touch /work/done") for text in (SHORT, LONG)],
            [text + call("submit") for text in (SHORT, LONG)],
        ),
        rule("do big.", LONG),
        rule("do small.", SHORT),
    ],
}


async def test_case_065_a_command_whose_end_nobody_saw_runs_once(tmp_path: Path, qwen3_dir: Path) -> None:
    async with running(tmp_path, qwen3_dir, POLICY, workers=0) as stack:
        first = await spawn("worker", env=stack.env, log=tmp_path / "first.log")
        job_id = await stack.job("once", group_size=1)
        (group_id,) = await stack.submit(job_id, task("once"))
        async with asyncio.timeout(60):
            while not (box := await containers(stack, group_id)) or "sleep 3" not in await docker("top", box[0]):
                await asyncio.sleep(0.1)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        second = await spawn("worker", env=stack.env, log=tmp_path / "second.log")
        try:
            batch = await stack.batch(job_id, 1, wait_s=90)
        finally:
            await end(second)
        ((trajectory, _),) = flat(batch)
        assert (trajectory["attempt"], trajectory["reward"]) == (1, 1.0)
        assert trajectory["timing"]["tool_s"] >= 3
        observations = [message["content"] for message in await messages(stack, group_id) if message["role"] == "tool"]
        assert observations == ["1\n"]
        assert assert_equals_record(stack, batch) == 2


async def progress(stack: Stack, groups: list[str]) -> dict[str, tuple[str, int]]:
    """State and number of observations of each rollout."""
    found = {}
    for rollout_id in (f"{group}-r{index}" for group in groups for index in range(2)):
        shown = (await stack.api.get(f"/v1/rollouts/{rollout_id}", params={"include": "messages"})).json()
        found[rollout_id] = (shown["state"], sum(message["role"] == "tool" for message in shown["messages"] or ()))
    return found


async def test_case_066_gateway_and_worker_are_killed_and_nothing_is_lost(tmp_path: Path, qwen3_dir: Path) -> None:
    async with running(tmp_path, qwen3_dir, POLICY, tokens_per_s=100) as stack:
        job_id = await stack.job("turns", group_size=2, groups_per_step=6)
        groups = await stack.submit(job_id, *(task(f"turns {number}") for number in range(6)))
        async with asyncio.timeout(60):
            before = await progress(stack, groups)
            while "ended" not in {state for state, _ in before.values()}:
                await asyncio.sleep(0.2)
                before = await progress(stack, groups)
        workers = [child for child in psutil.Process(stack.gateway.pid).children() if "workers" in child.cmdline()]
        for process in (stack.gateway, *workers):
            process.send_signal(signal.SIGKILL)
        await stack.gateway.wait()
        again = ("serve", "--host", "127.0.0.1", "--port", str(urlsplit(stack.url).port), "--workers", "1")
        stack.gateway = await spawn(*again, env=stack.env, log=tmp_path / "gateway.log")
        try:
            await ready(stack.api, "/readyz")
            batch = await stack.batch(job_id, 6, wait_s=90)
        finally:
            await end(stack.gateway)
        trajectories = {trajectory["rollout_id"]: trajectory for trajectory, _ in flat(batch)}
        assert sorted(group["group_id"] for group in batch["groups"]) == sorted(groups)
        assert sorted(trajectories) == sorted(before)
        assert len(flat(batch)) == 12
        assert {trajectory["reward"] for trajectory in trajectories.values()} == {1.0}
        assert_equals_record(stack, batch)
        going_on = [rollout_id for rollout_id, (state, observed) in before.items() if state == "leased" and observed]
        assert any(trajectories[rollout_id]["attempt"] == 1 for rollout_id in going_on), "nothing was resumed"


async def test_case_058_a_small_job_does_not_wait_for_a_big_one(tmp_path: Path, qwen3_dir: Path) -> None:
    async with running(tmp_path, qwen3_dir, POLICY, workers=0, tokens_per_s=200) as stack:
        worker = await spawn("worker", env=stack.env | {"ROLLWAY_WORKER_ROLLOUTS": "4"}, log=tmp_path / "worker.log")
        try:
            plain = {"tools": [], "verifier": None}
            big = await stack.job("big", group_size=4, groups_per_step=50)
            await stack.submit(big, *(task("big", **plain) for _ in range(20)))
            busiest = 0
            async with asyncio.timeout(40):
                while (counts := await counted(stack, big))["ready"] < 2:
                    busiest = max(busiest, counts["leased_rollouts"])
                    await asyncio.sleep(0.05)
            small = await stack.job("small", group_size=4)
            (group_id,) = await stack.submit(small, task("small", **plain))
            await stack.group(group_id, "ready")
            left = await counted(stack, big)
            await stack.api.delete(f"/v1/jobs/{big}")
        finally:
            await end(worker)
        assert busiest == 4, "alone, the big job has every place"
        assert left["ready"] < 12


async def counted(stack: Stack, job_id: str) -> dict[str, int]:
    found: dict[str, int] = (await stack.api.get(f"/v1/jobs/{job_id}")).json()["counts"]
    return found
