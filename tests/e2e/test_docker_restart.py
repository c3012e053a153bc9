"""dockerd is killed and started again while commands run in its sandboxes, in an engine of the test's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack, call, end, rule, running, spawn, task
from tests.e2e.test_main_path import assert_equals_record, flat, messages
from tests.own_dockerd import OwnDockerd, missing, own_dockerd
from tests.sandbox_backends import has_engine

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(bool(missing()), reason=f"needs a second Docker engine: {missing()}"),
    pytest.mark.skipif(not has_engine(), reason="needs a Docker engine that has the tests' image"),
    pytest.mark.timeout(480),
]

FIRST, SECOND = "sleep 8", "sleep 9"
"""Long enough to be seen, whatever a slow machine takes for a look."""
POLICY: dict[str, Any] = {
    "rules": [
        rule(
            "do restart",
            call("bash", command=f"echo x >> /work/log; {FIRST}; wc -l < /work/log"),
            call("bash", command=f"echo x >> /work/log; {SECOND}; wc -l < /work/log; touch /work/done"),
            call("submit"),
        ),
    ],
}
AWAY_S = 12.0
"""Longer than the call that runs when the engine goes, and than all tries of a start one after the other."""


@asynccontextmanager
async def stack_on(engine: OwnDockerd, folder: Path, tokenizer: Path) -> AsyncIterator[Stack]:
    """Gateway and worker, whose sandboxes are the engine's. None is left: a warm one that could not be removed while
    it was away, a sweep removes."""
    async with running(folder, tokenizer, POLICY, workers=0) as stack:
        env = stack.env | {"ROLLWAY_DOCKER_HOST": engine.host}
        worker = await spawn("worker", env=env, log=folder / "worker.log")
        try:
            yield stack
        finally:
            assert await end(worker) == 0
        ours = f"label=rollway={env['ROLLWAY_DEPLOYMENT_ID']}"
        assert [name for name in await engine.containers(ours) if "-pool-" not in name] == []
        async with asyncio.timeout(100):  # nobody's, once the worker has not been heard of for a while
            while await engine.containers(ours):
                sweep = await spawn("sandbox", "cleanup", "--older-than=0", "--yes", env=env, log=folder / "sweep.log")
                assert await sweep.wait() == 0


async def in_their_calls(engine: OwnDockerd, group_ids: list[str], command: str) -> None:
    """Until each group's one rollout was seen in the middle of that command."""

    async def in_its_call(group_id: str) -> None:
        while not (box := await engine.containers(f"name={group_id}-r0")) or command not in await engine.top(box[0]):
            await asyncio.sleep(0.05)

    async with asyncio.timeout(120):
        await asyncio.gather(*map(in_its_call, group_ids))


async def observations(stack: Stack, group_id: str) -> list[str]:
    return [message["content"] for message in await messages(stack, group_id) if message["role"] == "tool"]


async def test_sandboxes_that_outlive_their_engine_are_gone_on_with(tmp_path: Path, qwen3_dir: Path) -> None:
    """Results of calls are fetched by their ids, and what is asked for meanwhile waits: nothing runs twice, no attempt is given up."""
    async with own_dockerd(tmp_path / "e") as engine:
        await engine.start(live_restore=True)
        async with stack_on(engine, tmp_path, qwen3_dir) as stack:
            job_id = await stack.job("kept", group_size=1, groups_per_step=4)
            groups = await stack.submit(job_id, task("restart 0"), task("restart 1"))
            await in_their_calls(engine, groups, FIRST)
            await engine.kill()
            await engine.start(live_restore=True)
            await in_their_calls(engine, groups, SECOND)
            await engine.kill()
            groups += await stack.submit(job_id, task("restart 2"), task("restart 3"))
            await asyncio.sleep(AWAY_S)
            await engine.start(live_restore=True)
            batch = await stack.batch(job_id, 4, wait_s=180)
            assert {(t["attempt"], t["reward"], t["stop_reason"]) for t, _ in flat(batch)} == {(1, 1.0, "submitted")}
            assert assert_equals_record(stack, batch) == 4 * 3
            for group_id in groups:
                assert await observations(stack, group_id) == ["1\n", "2\n"]


async def test_sandboxes_that_die_with_their_engine_are_nobodys_answer(tmp_path: Path, qwen3_dir: Path) -> None:
    """Without live-restore a new dockerd ends what it finds: the attempts begin anew, in sandboxes where nothing has been done."""
    async with own_dockerd(tmp_path / "e") as engine:
        await engine.start(live_restore=False)
        async with stack_on(engine, tmp_path, qwen3_dir) as stack:
            job_id = await stack.job("lost", group_size=1, groups_per_step=2)
            groups = await stack.submit(job_id, task("restart 0"), task("restart 1"))
            await in_their_calls(engine, groups, FIRST)
            await engine.kill()
            await engine.start(live_restore=False)
            batch = await stack.batch(job_id, 2, wait_s=180)
            assert {(t["attempt"], t["reward"], t["stop_reason"]) for t, _ in flat(batch)} == {(2, 1.0, "submitted")}
            for group_id in groups:
                assert await observations(stack, group_id) == ["1\n", "2\n"]
                (failure,) = (await stack.api.get(f"/v1/rollouts/{group_id}-r0")).json()["failures"]
                assert failure.startswith("sandbox: ")
            assert_equals_record(stack, batch)
