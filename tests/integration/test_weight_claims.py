"""Weight updates that are refused, and whose a generator is: state stays as it was."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.gateway_play import DEAD_GENERATOR
from tests.gateway_stack import RunningGateway
from tests.standin_stack import standin
from tests.weight_play import Trainer, body_of, engine_says, scene

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]


async def job_on(api: httpx.AsyncClient, name: str, *generators: Any, **fields: Any) -> Trainer:
    reply = await api.post("/v1/jobs", json=body_of(*generators, name=name, **fields))
    assert reply.status_code == 201, reply.text
    return Trainer(api, reply.json()["job_id"])


async def test_updates_do_not_overlap_and_do_not_go_back(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    async with scene(tiny_gateway, tmp_path) as on:
        update_id = await on.trainer.begun(4)
        second = await on.trainer.begin(5)
        assert second.status_code == 409
        assert update_id in second.json()["detail"]
        assert second.headers["Retry-After"] == "1"
        await on.trainer.until(update_id, "paused")
        rollback = await on.trainer.api.put(f"/v1/jobs/{on.trainer.job_id}/policy", json={"version": 0, "rollback": True})
        assert (rollback.status_code, update_id in rollback.json()["detail"]) == (409, True)
        await on.trainer.say(update_id, "finish")
        await on.trainer.until(update_id, "done")
        back = await on.trainer.begin(3)
        assert (back.status_code, "rollback: true" in back.json()["detail"]) == (409, True)
        assert await engine_says(on.urls[0]) == "0.4"
        assert (await on.trainer.job())["policy_version"] == 4


async def test_a_rollback_opens_a_lineage_that_the_labels_name(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    async with scene(tiny_gateway, tmp_path) as on:
        for version, fields in ((4, {}), (4, {}), (2, {"rollback": True}), (3, {})):
            await on.trainer.until(await on.trainer.begun(version, from_disk="w", **fields), "done")
        assert await engine_says(on.urls[0]) == "1.3"
        job = await on.trainer.job()
        assert (job["policy_version"], job["lineage"]) == (3, 1)
        turn = await on.player.turn(5)
        assert set(turn.versions) == {(1, 3)}


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        pytest.param({}, 422, "version", id="no-version"),
        pytest.param({"version": -1}, 422, "version", id="negative"),
        pytest.param({"version": 1, "timeout_s": 0}, 422, "timeout_s", id="no-time"),
        pytest.param({"version": 1, "timeout_s": 1e9}, 422, "timeout_s", id="for-ever"),
        pytest.param({"version": 1, "from_disk": ""}, 422, "from_disk", id="no-path"),
        pytest.param({"version": 1, "unknown": 1}, 422, "unknown", id="unknown-field"),
    ],
)
async def test_what_is_wrong_is_named(tiny_gateway: RunningGateway, body: dict[str, Any], status: int, told: str) -> None:
    async with tiny_gateway.client() as api:
        trainer = await job_on(api, "run", DEAD_GENERATOR)
        reply = await api.post(f"/v1/jobs/{trainer.job_id}/weight_updates", json=body)
        assert reply.status_code == status, reply.text
        assert [found["field"] for found in reply.json()["fields"]] == [told]


async def test_nobody_answers_is_a_failed_update_and_nothing_moved(tiny_gateway: RunningGateway) -> None:
    async with tiny_gateway.client() as api:
        trainer = await job_on(api, "run", DEAD_GENERATOR)
        failed = await trainer.until(await trainer.begun(1), "failed")
        assert failed["reason"] == "no generator could be paused"
        assert "connection" in failed["generators"][0]["detail"]
        assert (await trainer.job())["policy_version"] == 0


async def test_what_is_nobodys_update_is_404(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    async with scene(tiny_gateway, tmp_path) as on, tiny_gateway.client("blue") as blue:
        update_id = await on.trainer.begun(1, from_disk="w")
        await on.trainer.until(update_id, "done")
        for name in (f"{on.trainer.job_id}-u2", f"{on.trainer.job_id}-b1", "nonsense", on.trainer.job_id):
            assert (await on.trainer.api.get(f"/v1/weight_updates/{name}")).status_code == 404
        assert (await blue.get(f"/v1/weight_updates/{update_id}")).status_code == 404
        assert (await blue.post(f"/v1/weight_updates/{update_id}/finish", json={})).status_code == 404
        assert (await blue.post(f"/v1/jobs/{on.trainer.job_id}/weight_updates", json={"version": 1})).status_code == 404


@asynccontextmanager
async def describing(path: str, described: dict[str, Any]) -> AsyncIterator[str]:
    """A server that answers one question about itself, and nothing else."""

    async def describe(_: web.Request) -> web.Response:
        return web.json_response(described)

    app = web.Application()
    app.add_routes([web.get(path, describe)])
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


async def test_a_router_needs_its_workers_named(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    async with describing("/get_model_info", {}) as url, standin(tmp_path) as one, standin(tmp_path) as two, tiny_gateway.client() as api:
        bare = await job_on(api, "bare", url)
        refused = await bare.begin(1, from_disk="w")
        assert refused.status_code == 422
        assert [found["field"] for found in refused.json()["fields"]] == ["generators.0.control_urls"]
        assert (await bare.job())["policy_version"] == 0
        named = await job_on(api, "named", {"url": url, "control_urls": [one, two]})
        await named.until(await named.begun(1, from_disk="w"), "done")
        assert [await engine_says(worker) for worker in (one, two)] == ["0.1", "0.1"]


async def test_generators_of_another_model_or_tokenizer_are_refused(tiny_gateway: RunningGateway) -> None:
    def model(architecture: str, vocab_size: int) -> Any:
        described = {"model_type": "llama", "architectures": [architecture], "vocab_size": vocab_size, "weight_version": "0"}
        return describing("/model_info", described)

    async with model("Llama", 99_999) as one, model("Qwen3", 99_999) as other, model("Llama", 3) as small, tiny_gateway.client() as api:
        reply = await (await job_on(api, "run", one, other, small)).begin(1)
        assert reply.status_code == 422
        problems = {found["field"]: found["problem"] for found in reply.json()["fields"]}
    assert problems.keys() == {"generators.1.url", "generators.2.url"}
    assert "another model" in problems["generators.1.url"]
    assert "another tokenizer" in problems["generators.2.url"]


async def test_one_job_at_a_time_moves_the_weights_of_a_generator(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    """Others may sample from it; whose it is is not told; a job that is deleted or patched gives it up."""
    async with standin(tmp_path) as one, standin(tmp_path) as two, tiny_gateway.client() as red, tiny_gateway.client("blue") as blue:
        mine, theirs = await job_on(red, "mine", one, two), await job_on(blue, "theirs", two + "/")
        await mine.until(await mine.begun(1, from_disk="w"), "done")
        refused = await theirs.begin(1, from_disk="w")
        assert refused.status_code == 409
        assert two.removeprefix("http://") in refused.json()["detail"]
        assert mine.job_id not in refused.text
        assert (await theirs.job())["policy_version"] == 0
        assert (await red.patch(f"/v1/jobs/{mine.job_id}", json={"generators": [one]})).status_code == 200
        await theirs.until(await theirs.begun(7, from_disk="w"), "done")
        assert await engine_says(two) == "0.7"
        assert (await red.patch(f"/v1/jobs/{mine.job_id}", json={"generators": [one, two]})).status_code == 200
        assert (await mine.begin(2, from_disk="w")).status_code == 409
        assert (await blue.delete(f"/v1/jobs/{theirs.job_id}")).status_code == 204
        await mine.until(await mine.begun(2, from_disk="w"), "done")


async def test_generators_do_not_change_under_an_update(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    async with scene(tiny_gateway, tmp_path) as on:
        job = f"/v1/jobs/{on.trainer.job_id}"
        update_id = await on.trainer.begun(1)
        await on.trainer.until(update_id, "paused")
        refused = await on.trainer.api.patch(job, json={"generators": [DEAD_GENERATOR]})
        assert (refused.status_code, update_id in refused.json()["detail"]) == (409, True)
        assert (await on.trainer.api.patch(job, json={"staleness_budget": 3})).status_code == 200
        await on.trainer.say(update_id, "abandon", weights="untouched")
        async with asyncio.timeout(20):
            while on.player.pool.status()[0]["standing"] != "serving":
                await asyncio.sleep(0.02)
        assert (await on.trainer.api.patch(job, json={"generators": [DEAD_GENERATOR]})).status_code == 200


async def test_a_deleted_job_lets_its_generators_go_on(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    async with scene(tiny_gateway, tmp_path) as on, asyncio.TaskGroup() as group:
        turns = await on.turns(group, count=1)
        await on.trainer.until(await on.trainer.begun(1), "paused")
        await asyncio.sleep(0.2)
        assert (await on.trainer.api.delete(f"/v1/jobs/{on.trainer.job_id}")).status_code == 204
        await asyncio.wait(turns, timeout=20)
    on.check(turns)


async def test_a_generator_that_was_started_anew_does_not_mix_in(tiny_gateway: RunningGateway, tmp_path: Path) -> None:
    """Its label is none that an update gave it: its answers are refused, and it is left alone until an update takes it along."""
    async with scene(tiny_gateway, tmp_path, 2) as on:
        await on.trainer.until(await on.trainer.begun(1, from_disk="w"), "done")
        async with httpx.AsyncClient() as http:  # as a new process would, it forgets who it was
            reply = await http.post(f"{on.urls[0]}/update_weight_version", json={"new_version": "default", "abort_all_requests": False})
            assert reply.status_code == 200
        async with asyncio.timeout(20):
            while on.player.pool.status()[0]["well"]:
                turns = await asyncio.gather(*(on.player.turn(3, rollout_id=f"r{number}") for number in range(24)))
                assert {version for turn in turns for version in turn.versions} == {(0, 1)}
        assert "'default'" in on.player.pool.status()[0]["last_error"]
        await asyncio.sleep(1.0)
        assert not on.player.pool.status()[0]["well"]
        await on.trainer.until(await on.trainer.begun(1, from_disk="w"), "done")
        async with asyncio.timeout(20):
            while not on.player.pool.status()[0]["well"]:
                await asyncio.gather(*(on.player.turn(3, rollout_id=f"r{number}") for number in range(24)))
