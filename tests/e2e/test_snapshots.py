"""A sandbox that is lost with its worker: the rollout goes back to its last snapshot, and nothing shows that it was ever further."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import call, end, rule, running, spawn, task
from tests.e2e.test_faults import docker
from tests.e2e.test_main_path import assert_equals_record, containers, messages

pytestmark = [pytest.mark.docker, pytest.mark.timeout(150)]

LONG = "I think about it for a while. " * 12
POLICY: dict[str, Any] = {
    "rules": [
        rule("do kept.", *(LONG + call("bash", command=f"echo {n} >> /work/log; cat /work/log") for n in range(1, 5)), call("submit")),
    ],
}
TASK = task(
    "kept",
    sandbox={"shell": "per_call", "snapshot": {"every_turns": 2}},
    verifier={"command": "test \"$(tr -d '\\n' < /work/log)\" = 1234", "artifacts": ["/work/log"]},
)


async def snapshots(deployment_id: str) -> list[str]:
    return (await docker("images", "--quiet", "--filter", f"label=rollway={deployment_id}")).split()


async def test_a_rollout_goes_on_from_its_snapshot_when_worker_and_sandbox_die(tmp_path: Path, qwen3_dir: Path) -> None:
    async with running(tmp_path, qwen3_dir, POLICY, workers=0, tokens_per_s=150) as stack:
        first = await spawn("worker", env=stack.env, log=tmp_path / "first.log")
        job_id = await stack.job("kept", group_size=1)
        (group_id,) = await stack.submit(job_id, TASK)
        async with asyncio.timeout(60):
            while sum(message["role"] == "tool" for message in await messages(stack, group_id)) < 3:
                await asyncio.sleep(0.05)
        first.kill()  # in the fourth turn: the snapshot is of the second
        await first.wait()
        await docker("kill", *await containers(stack, group_id))
        second = await spawn("worker", env=stack.env, log=tmp_path / "second.log")
        try:
            batch = await stack.batch(job_id, 1, wait_s=60)
            async with asyncio.timeout(30):  # one that a sandbox was made from goes with the sweep after that
                while await snapshots(stack.env["ROLLWAY_DEPLOYMENT_ID"]):
                    await asyncio.sleep(0.2)
        finally:
            await end(second)
        ((trajectory,),) = [group["trajectories"] for group in batch["groups"]]
        assert (trajectory["attempt"], trajectory["reward"], trajectory["turns"], trajectory["tool_calls"]) == (1, 1.0, 5, 5)
        assert_equals_record(stack, batch)
        observations = [message["content"] for message in await messages(stack, group_id) if message["role"] == "tool"]
        assert observations == ["1\n", "1\n2\n", "1\n2\n3\n", "1\n2\n3\n4\n"]
        assert "event: restored" in (await stack.api.get(f"/v1/rollouts/{group_id}-r0/events")).text
        assert (await stack.api.get(f"/v1/jobs/{job_id}")).json()["counts"]["tokens_discarded"] > 0
