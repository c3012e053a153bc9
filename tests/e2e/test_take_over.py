"""A worker that dies or leaves in the middle of a rollout: another one goes on from the last journaled step."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack, call, end, rule, running, spawn, task
from tests.e2e.test_faults import docker
from tests.e2e.test_main_path import assert_equals_record, containers, messages, until_removed

pytestmark = [pytest.mark.docker, pytest.mark.timeout(150)]

LONG = "I think about it for a while. " * 12
POLICY: dict[str, Any] = {
    "rules": [
        rule(
            "do long.",
            LONG + call("bash", command="echo once >> /work/log"),
            LONG + call("bash", command="wc -l < /work/log; touch /work/done"),
            LONG + call("submit"),
        ),
        rule(
            "do slow.",
            call("bash", command="echo x >> /work/log; sleep 9; wc -l < /work/log"),
            LONG + call("bash", command="echo x >> /work/log; wc -l < /work/log; touch /work/done"),
            LONG + call("submit"),
        ),
    ],
}


async def until_observed(stack: Stack, group_id: str) -> None:
    """Until the first call's observation is journaled."""
    async with asyncio.timeout(60):
        while not any(message["role"] == "tool" for message in await messages(stack, group_id)):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "asked-to-leave"])
async def test_another_worker_goes_on_where_the_last_one_stopped(tmp_path: Path, qwen3_dir: Path, how: signal.Signals) -> None:
    async with running(tmp_path, qwen3_dir, POLICY, workers=0, tokens_per_s=60) as stack:
        first = await spawn("worker", env=stack.env, log=tmp_path / "first.log")
        job_id = await stack.job("long", group_size=1)
        (group_id,) = await stack.submit(job_id, task("long"))
        await until_observed(stack, group_id)
        await asyncio.sleep(0.7)  # into the second turn's generation
        first.send_signal(how)
        second = await spawn("worker", env=stack.env, log=tmp_path / "second.log")
        try:
            batch = await stack.batch(job_id, 1, wait_s=90)
        finally:
            await first.wait()
            await end(second)
        ((trajectory,),) = [group["trajectories"] for group in batch["groups"]]
        assert (trajectory["attempt"], trajectory["reward"], trajectory["turns"]) == (1, 1.0, 3)
        assert_equals_record(stack, batch)
        observations = [message["content"] for message in await messages(stack, group_id) if message["role"] == "tool"]
        assert observations[1].startswith("1\n")  # the first turn's command ran once


async def test_a_worker_that_slept_past_its_lease_does_nothing_more(tmp_path: Path, qwen3_dir: Path) -> None:
    """It wakes while another worker drives on in the same sandbox, in the middle of a call of its own."""
    async with running(tmp_path, qwen3_dir, POLICY, workers=0, tokens_per_s=60) as stack:
        first = await spawn("worker", env=stack.env, log=tmp_path / "first.log")
        second = None
        try:
            job_id = await stack.job("slow", group_size=1)
            (group_id,) = await stack.submit(job_id, task("slow"))
            async with asyncio.timeout(60):
                while not (box := await containers(stack, group_id)) or "sleep 9" not in await docker("top", box[0]):
                    await asyncio.sleep(0.05)
            first.send_signal(signal.SIGSTOP)
            second = await spawn("worker", env=stack.env, log=tmp_path / "second.log")
            await until_observed(stack, group_id)
            first.send_signal(signal.SIGCONT)
            batch = await stack.batch(job_id, 1, wait_s=60)
            await until_removed(stack, group_id)
            await asyncio.sleep(3)  # for what it might still want to do
        finally:
            first.send_signal(signal.SIGCONT)
            for worker in filter(None, (first, second)):
                await end(worker)
        ((trajectory,),) = [group["trajectories"] for group in batch["groups"]]
        assert (trajectory["attempt"], trajectory["reward"], trajectory["stop_reason"]) == (1, 1.0, "submitted")
        assert_equals_record(stack, batch)
        observations = [message["content"] for message in await messages(stack, group_id) if message["role"] == "tool"]
        assert observations == ["1\n", "2\n"]  # lines of the log: each command ran once
        shown = (await stack.api.get(f"/v1/rollouts/{group_id}-r0")).json()
        assert (shown["state"], shown["failures"]) == ("ended", [])
