"""A worker is killed at each named step; what it left is finished once, by others, from where it stood."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from service.crash_points import VARIABLE
from tests.e2e.stack import Stack, call, end, rule, running, spawn
from tests.e2e.test_main_path import assert_equals_record, flat
from tests.sandbox_backends import has_engine

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(not has_engine(), reason="needs a Docker engine"),
    pytest.mark.timeout(240),
]

POINTS = [
    "after lease",
    "before generated",
    "after sandbox_intended",
    "before sandbox_opened",
    "before observed",
    "after verifying",
    "before scored",
    "after finish",
]

POLICY: dict[str, Any] = {
    "rules": [
        rule(
            "do each.",
            call("bash", command="echo 1 >> /work/log; wc -l < /work/log"),
            call("bash", command="echo 2 >> /work/log; wc -l < /work/log"),
            call("submit"),
        )
    ]
}
TASK = {
    "messages": [{"role": "user", "content": "Please do each."}],
    "tools": ["bash", "submit"],
    "verifier": {"command": 'test "$(cat /work/log)" = "$(printf \'1\\n2\')"', "timeout_s": 20, "artifacts": ["/work/log"]},
}
ONE_BY_ONE = {"ROLLWAY_WORKER_ROLLOUTS": "1", "ROLLWAY_SANDBOX_POOL": "0", "ROLLWAY_LEASE_S": "15"}
"""As many workers as points load their tokenizers at once: the lease must last that long."""


async def listening(log: Path) -> None:
    async with asyncio.timeout(90):
        while "slots, sandboxes" not in log.read_text():
            await asyncio.sleep(0.1)


async def test_a_worker_killed_at_any_step_leaves_what_others_finish(tmp_path: Path, qwen3_dir: Path) -> None:
    """Each takes one rollout and dies at its point; the side effects and the tokens tell whether it was gone on with well."""
    async with running(tmp_path, qwen3_dir, POLICY, workers=0) as stack:
        doomed = [await doomed_worker(stack, number, point) for number, point in enumerate(POINTS)]
        for number in range(len(POINTS)):
            await listening(tmp_path / f"doomed-{number}.log")
        job_id = await stack.job("each", group_size=1, groups_per_step=len(POINTS))
        groups = await stack.submit(job_id, *(TASK | {"task_id": f"each-{number}"} for number in range(len(POINTS))))
        async with asyncio.timeout(60):
            statuses = [await worker.wait() for worker in doomed]
        assert dict(zip(POINTS, statuses, strict=True)) == dict.fromkeys(POINTS, -signal.SIGKILL)
        healthy = await spawn("worker", env=stack.env, log=tmp_path / "healthy.log")
        try:
            batch = await stack.batch(job_id, len(POINTS), wait_s=90)
            assert sorted(group["group_id"] for group in batch["groups"]) == sorted(groups)
            found = {(t["attempt"], t["reward"], t["stop_reason"]) for t, _ in flat(batch)}
            assert found == {(1, 1.0, "submitted")}, "an attempt was given up, or a command ran twice or never"
            assert assert_equals_record(stack, batch) == 3 * len(POINTS)
        finally:
            await end(healthy)


async def doomed_worker(stack: Stack, number: int, point: str) -> asyncio.subprocess.Process:
    return await spawn("worker", env=stack.env | ONE_BY_ONE | {VARIABLE: point}, log=stack.folder / f"doomed-{number}.log")
