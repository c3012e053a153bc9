"""A rollout whose sandbox was written to by an older policy: begun anew where the job bounds that, told in the trajectory where not."""

import asyncio
from typing import Any

import pytest

from tests.e2e.stack import Stack, call, rule, task
from tests.weight_play import Trainer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker, pytest.mark.timeout(120)]

POLICY: dict[str, Any] = {"rules": [rule("do gap.", call("bash", command="sleep 4; touch /work/done"), call("submit"))], "default": []}


async def in_its_call(stack: Stack, rollout: str, *, attempt: int) -> None:
    """Wait until the rollout's first turn is over and its call runs."""
    async with asyncio.timeout(60):
        while True:
            body = (await stack.api.get(f"/v1/rollouts/{rollout}")).json()
            if body["attempt"] == attempt and body["turns"] == 1 and body["sandbox_id"]:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("bound", "version"), [(None, 2), (1, 4)])
async def test_versions_pass_while_a_call_runs(stack: Stack, bound: int | None, version: int) -> None:
    job_id = await stack.job(f"gap-{bound}", group_size=1, max_environment_gap=bound, staleness_budget=9)
    trainer, rollout = Trainer(stack.api, job_id), (await stack.submit(job_id, task("gap")))[0] + "-r0"
    await in_its_call(stack, rollout, attempt=1)
    await trainer.until(await trainer.begun(version, from_disk="next"), "done")
    [group] = (await stack.batch(job_id, 1, wait_s=60))["groups"]
    [trajectory] = group["trajectories"]
    assert trajectory["reward"] == 1.0
    counts = (await trainer.job())["counts"]
    if bound is None:
        assert (trajectory["attempt"], trajectory["versions"]["environment_gap"]) == (1, 2)
    else:
        assert (trajectory["attempt"], trajectory["versions"]["environment_gap"]) == (2, 0)
        assert counts["ledger"]["discarded"]["stale_environment"]["rollouts"] == 1
        assert counts["failed"] == {}
    assert (await stack.api.delete(f"/v1/jobs/{job_id}")).status_code == 204
