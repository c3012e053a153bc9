"""A gateway that dies in the middle of a weight update: another one takes it to its end."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from service.crash_points import VARIABLE
from tests.integration.test_gateway_process import environment, serving
from tests.standin_stack import tiny_model
from tests.store_stack import store_at
from tests.weight_play import Scene, engine_says, scene_at

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

TAKEN_S = 60
"""A driver may be silent for 6 s; the rest is a busy machine's."""


@asynccontextmanager
async def doomed(
    redis_url: str, folder: Path, *, point: str = "", **job: str
) -> AsyncIterator[tuple[Scene, asyncio.subprocess.Process, dict[str, str]]]:
    """A scene under a gateway that is a process of its own."""
    tiny_model(folder / "tiny")
    env = environment(redis_url=redis_url, data_dir=str(folder), tokenizer_roots=str(folder))
    async with AsyncExitStack() as stack:
        process, url = await stack.enter_async_context(serving(env=env | ({VARIABLE: point} if point else {})))
        api = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
        store = await stack.enter_async_context(store_at(redis_url))
        yield await stack.enter_async_context(scene_at(api, store, folder, 2, **job)), process, env


@pytest.mark.parametrize("at", ["paused", "pausing"])
async def test_another_gateway_finishes_what_a_killed_one_began(empty_redis_url: str, tmp_path: Path, at: str) -> None:
    mode = "in_flight" if at == "paused" else "drain"
    async with doomed(empty_redis_url, tmp_path, weight_update=mode) as (on, process, env):
        async with asyncio.TaskGroup() as group:
            turns = await on.turns(group)
            update_id = await on.trainer.begun(1, from_disk="w" if at == "pausing" else None)
            if at == "paused":
                await on.trainer.until(update_id, "paused")
            process.send_signal(signal.SIGKILL)
            await process.wait()
            async with serving(env=env) as (_, url), httpx.AsyncClient(base_url=url, timeout=30) as api:
                on.trainer.api = api
                if at == "paused":
                    await on.trainer.say(update_id, "finish")
                update = await on.trainer.until(update_id, "done", wait_s=TAKEN_S)
                assert {part["state"] for part in update["generators"]} == {"done"}
                assert (await on.trainer.job())["policy_version"] == 1
        assert [await engine_says(url) for url in on.urls] == ["0.1", "0.1"]
        on.check(turns)


async def test_two_gateways_one_of_them_killed(empty_redis_url: str, tmp_path: Path) -> None:
    """Whichever drives, the one that lives finishes, also what was said to the other."""
    async with doomed(empty_redis_url, tmp_path) as (on, process, env):
        async with (
            serving(env=env) as (_, url),
            httpx.AsyncClient(base_url=url, timeout=30) as other,
            asyncio.TaskGroup() as group,
        ):
            turns = await on.turns(group)
            update_id = await on.trainer.begun(1)
            await on.trainer.until(update_id, "paused")
            on.trainer.api = other
            await on.trainer.say(update_id, "finish")
            process.send_signal(signal.SIGKILL)
            await on.trainer.until(update_id, "done", wait_s=TAKEN_S)
        on.check(turns)


@pytest.mark.parametrize("point", ["before weights_write", "after weights_write"])
async def test_a_gateway_that_dies_as_it_begins_one(empty_redis_url: str, tmp_path: Path, point: str) -> None:
    """Its client got no answer: either nothing has happened, or the update runs to its end."""
    async with doomed(empty_redis_url, tmp_path, point=point) as (on, process, env):
        async with asyncio.TaskGroup() as group:
            turns = await on.turns(group)
            with pytest.raises(httpx.TransportError):
                await on.trainer.begin(1, from_disk="w")
            await process.wait()
            async with serving(env=env) as (_, url), httpx.AsyncClient(base_url=url, timeout=30) as api:
                on.trainer.api = api
                stored = f"{on.trainer.job_id}-u1"
                update_id = stored if point.startswith("after") else await on.trainer.begun(1, from_disk="w")
                assert update_id == stored
                await on.trainer.until(update_id, "done", wait_s=TAKEN_S)
        assert [await engine_says(url) for url in on.urls] == ["0.1", "0.1"]
        on.check(turns)
