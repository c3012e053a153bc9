"""Weight updates through the API, on stand-in generators that sample all the while: no token is lost, and each knows its weights."""

import asyncio
import time
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from service.records import GeneratorSpec
from service.standin import create_standin
from service.weight_store import WeightStore
from tests.gateway_stack import RunningGateway
from tests.standin_stack import LONG, tiny_model
from tests.weight_play import TOKENS, TOKENS_PER_S, engine_says, sampling, scene
from workers.resources import JobContexts

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]


@pytest.mark.parametrize("flush_cache", [False, True])
async def test_in_flight_two_versions_in_one_generation(tiny_gateway: RunningGateway, tmp_path: Path, flush_cache: bool) -> None:
    async with scene(tiny_gateway, tmp_path, 2, weight_update="in_flight", flush_cache=flush_cache) as on, asyncio.TaskGroup() as group:
        turns = await on.turns(group)
        update = await on.trainer.until(await on.trainer.begun(1, from_disk="next"), "done")
        assert {part["state"] for part in update["generators"]} == {"done"}
        assert [await engine_says(url) for url in on.urls] == ["0.1", "0.1"]
        assert (await on.trainer.job())["policy_version"] == 1
    on.check(turns)
    for task in turns:
        assert len(task.result().parts) == 1
        assert [(span.lineage, span.version) for span in task.result().parts[0].spans] == [(0, 0), (0, 1)]


async def test_abort_resume_goes_on_from_its_ids(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    async with scene(tiny_gateway, tmp_path, 2, weight_update="abort_resume") as on, asyncio.TaskGroup() as group:
        turns = await on.turns(group)
        await on.trainer.until(await on.trainer.begun(1, from_disk="next"), "done")
    on.check(turns)
    for task in turns:
        assert len(task.result().parts) >= 2
        assert {task.result().versions[0], task.result().versions[-1]} == {(0, 0), (0, 1)}


async def test_drain_lets_turns_finish_first(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    async with scene(tiny_gateway, tmp_path, 2, weight_update="drain") as on, asyncio.TaskGroup() as group:
        turns = await on.turns(group)
        update_id = await on.trainer.begun(1, from_disk="next")
        await asyncio.sleep(0.2)
        late = group.create_task(on.player.turn(20))
        await on.trainer.until(update_id, "done")
        assert all(task.done() for task in turns)
    on.check(turns)
    on.check([late], 20)
    assert {version for task in turns for version in task.result().versions} == {(0, 0)}
    assert set(late.result().versions) == {(0, 1)}


async def test_the_trainer_moves_the_weights_itself(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    """Nothing is sampled between paused and finish, and the label moves only then."""
    async with scene(tiny_gateway, tmp_path, weight_update="in_flight") as on, asyncio.TaskGroup() as group:
        began = time.monotonic()
        turns = await on.turns(group)
        update_id = await on.trainer.begun(3)
        await on.trainer.until(update_id, "paused")
        assert (await on.trainer.job())["policy_version"] == 0
        assert await engine_says(on.urls[0]) == "0"
        held = group.create_task(on.player.turn(5))
        await asyncio.sleep(0.3)
        assert not held.done()
        assert on.player.pool.status()[0]["standing"] == "held"
        first, again = [await on.trainer.say(update_id, "finish") for _ in range(2)]
        assert first.status_code == again.status_code == 202
        await on.trainer.until(update_id, "done")
        assert (await on.trainer.say(update_id, "finish")).json()["state"] == "done"
        assert (await on.trainer.job())["policy_version"] == 3
    on.check(turns)
    assert set(held.result().versions) == {(0, 3)}
    assert turns[0].result().parts[0].seconds < time.monotonic() - began - 0.25  # what it stood still is not the rollout's time


async def test_a_trainer_that_dies_leaves_no_false_label(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    """The deadline passes: nothing is sampled until the trainer says that it moved nothing; then everything goes on where it was."""
    async with scene(tiny_gateway, tmp_path, 2) as on:
        async with asyncio.TaskGroup() as group:
            turns = await on.turns(group)
            update_id = await on.trainer.begun(1, timeout_s=1)
            await on.trainer.until(update_id, "paused")
            failed = await on.trainer.until(update_id, "failed")
            assert "not finished within 1 s" in failed["reason"]
            await asyncio.sleep(0.5)
            assert not any(task.done() for task in turns)
            assert {status["standing"] for status in on.player.pool.status()} == {"quarantined"}
            assert (await on.trainer.say(update_id, "finish")).status_code == 409
            assert [found["field"] for found in (await on.trainer.job())["warnings"]] == ["generators", "generators"]
            assert (await on.trainer.say(update_id, "abandon", weights="untouched")).status_code == 202
            assert (await on.trainer.say(update_id, "abandon", weights="moved")).status_code == 409
        assert [await engine_says(url) for url in on.urls] == ["0", "0"]
    on.check(turns)
    assert {version for task in turns for version in task.result().versions} == {(0, 0)}


async def test_weights_that_moved_are_used_once_they_are_loaded_anew(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    async with scene(tiny_gateway, tmp_path) as on, asyncio.TaskGroup() as group:
        update_id = await on.trainer.begun(1)
        await on.trainer.until(update_id, "paused")
        assert (await on.trainer.say(update_id, "abandon", weights="moved")).json()["state"] == "failed"
        turn = group.create_task(on.player.turn(10))
        await asyncio.sleep(1.5)
        assert not turn.done()
        await on.trainer.until(await on.trainer.begun(1, from_disk="again"), "done")
    on.check([turn], 10)
    assert set(turn.result().versions) == {(0, 1)}


async def test_a_path_that_nobody_can_read_changes_nothing(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    async with scene(tiny_gateway, tmp_path, 2) as on, asyncio.TaskGroup() as group:
        turns = await on.turns(group)
        update_id = await on.trainer.begun(1, from_disk="/nope")
        failed = await on.trainer.until(update_id, "failed")
        assert "there is nothing at '/nope'" in failed["reason"]
        assert (await on.trainer.job())["policy_version"] == 0
    on.check(turns)
    assert {version for task in turns for version in task.result().versions} == {(0, 0)}


async def test_a_generator_that_died_misses_it_and_its_work_goes_elsewhere(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    tokenizer, template = tiny_model(tmp_path / "tiny")
    dying = TestServer(create_standin(tokenizer=tokenizer, template=template, policy=LONG, tokens_per_s=TOKENS_PER_S))
    await dying.start_server()
    url = str(dying.make_url("")).rstrip("/")
    async with scene(tiny_gateway, tmp_path, 1) as on, asyncio.TaskGroup() as group:
        patched = await on.trainer.api.patch(f"/v1/jobs/{on.trainer.job_id}", json={"generators": [*on.urls, url]})
        assert patched.status_code == 200, patched.text
        on.player.pool.update([GeneratorSpec(url=url) for url in (*on.urls, url)])
        tasks = [group.create_task(on.player.turn(TOKENS, rollout_id=f"r{number}")) for number in range(8)]
        await sampling(*on.urls)
        await sampling(url)
        update_id = await on.trainer.begun(1)
        await on.trainer.until(update_id, "paused")
        await dying.close()
        await on.trainer.say(update_id, "finish")
        update = await on.trainer.until(update_id, "done")
        assert {part["url"]: part["state"] for part in update["generators"]} == {on.urls[0]: "done", url: "failed"}
    assert all(len(task.result().ids) == TOKENS for task in tasks)
    assert {"serving", "quarantined"} == {status["standing"] for status in on.player.pool.status()}


async def test_a_worker_hears_of_it_with_its_jobs_record(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    """At its next heartbeat, or at once where a generation came back cut."""
    async with (
        scene(tiny_gateway, tmp_path) as on,
        JobContexts(tiny_gateway.settings, tiny_gateway.jobs, WeightStore(tiny_gateway.store)) as contexts,
    ):
        context = await contexts.get(on.trainer.job_id)
        assert context.pool.status()[0]["standing"] == "serving"
        update_id = await on.trainer.begun(1)
        await on.trainer.until(update_id, "paused")
        await contexts.get(on.trainer.job_id, fresh=True)
        assert context.pool.status()[0]["standing"] == "held"
        await on.trainer.say(update_id, "abandon", weights="moved")
        await contexts.refresh()
        assert context.pool.status()[0]["standing"] == "quarantined"
