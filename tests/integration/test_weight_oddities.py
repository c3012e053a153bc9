"""Weight updates on generators that answer oddly, and calls that come again: nothing is stuck, and nobody is left standing still."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from aiohttp import web
from aiohttp.test_utils import TestServer

from service.keys import JobKeys
from service.weight_records import JobWeights, Wanted
from service.weight_rules import begin, paused
from service.weight_store import Known, WeightStore
from tests.gateway_play import DEAD_GENERATOR
from tests.gateway_stack import RunningGateway
from tests.store_stack import Stack, store_at
from tests.weight_play import Trainer, body_of

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

MODEL = {"model_type": "llama", "weight_version": "0"}
Answers = dict[str, Any]
Calls = list[tuple[str, str | None]]


@asynccontextmanager
async def answering(answers: Answers) -> AsyncIterator[tuple[str, Calls]]:
    """A server that answers these paths so, its URL, and what it was asked: path and key."""
    calls: Calls = []

    async def answer(request: web.Request) -> web.Response:
        calls.append((request.path, request.headers.get("Authorization")))
        return web.json_response(answers[request.path]) if request.path in answers else web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/"), calls
    finally:
        await server.close()


@asynccontextmanager
async def trainer_of(gateway: RunningGateway, *generators: Any, **job: Any) -> AsyncIterator[Trainer]:
    async with gateway.client() as api:
        reply = await api.post("/v1/jobs", json=body_of(*generators, **job))
        assert reply.status_code == 201, reply.text
        yield Trainer(api, reply.json()["job_id"])


@pytest.mark.parametrize("odd", [{"weight_version": {"a": 1}}, {"weight_version": [1]}, {"architectures": 5}])
async def test_a_description_that_makes_no_sense_names_no_weights(tiny_gateway: RunningGateway, odd: Answers) -> None:
    async with answering({"/model_info": MODEL | odd}) as (url, _), trainer_of(tiny_gateway, url) as trainer:
        await trainer.until(await trainer.begun(1), "failed")


async def test_labels_that_make_no_sense_end_an_update(tiny_gateway: RunningGateway) -> None:
    answers: Answers = {"/model_info": MODEL, "/pause_generation": {}, "/continue_generation": {}, "/update_weight_version": {}}
    async with answering(answers) as (url, _), trainer_of(tiny_gateway, url) as trainer:
        update_id = await trainer.begun(1)
        await trainer.until(update_id, "paused")
        answers["/model_info"] = MODEL | {"weight_version": {}}
        await trainer.say(update_id, "finish")
        assert "its weight_version is None" in (await trainer.until(update_id, "failed"))["reason"]


@pytest.mark.parametrize("loads", [None, 5, [None], [{"num_running_reqs": None}], [{"num_running_reqs": "many"}]])
async def test_loads_that_make_no_sense_keep_nobody_draining(tiny_gateway: RunningGateway, loads: Any) -> None:
    answers = {"/model_info": MODEL, "/pause_generation": {}, "/v1/loads": {"loads": loads}}
    async with answering(answers) as (url, _), trainer_of(tiny_gateway, url, weight_update="drain") as trainer:
        await trainer.until(await trainer.begun(1), "paused")


async def test_a_generator_that_leaves_a_job_goes_on_where_and_by_the_key_by_which_it_was_stopped(tiny_gateway: RunningGateway) -> None:
    answers: Answers = {"/model_info": MODEL, "/pause_generation": {}, "/continue_generation": {}}
    async with answering({"/get_model_info": {}}) as (router, _), answering(answers) as (one, calls), answering(answers) as (two, others):
        spec = {"url": router, "control_urls": [one, two], "admin_api_key": "key"}
        async with trainer_of(tiny_gateway, spec) as trainer:
            update_id = await trainer.begun(1)
            await trainer.until(update_id, "paused")
            assert (await trainer.say(update_id, "abandon", weights="moved")).status_code == 202
            job = f"/v1/jobs/{trainer.job_id}"
            assert (await trainer.api.patch(job, json={"generators": [spec | {"control_urls": [two]}]})).status_code == 200
            assert calls[-1] == ("/continue_generation", "Bearer key")
            assert "/continue_generation" not in {path for path, _ in others}
            assert (await trainer.api.patch(job, json={"generators": [DEAD_GENERATOR]})).status_code == 200
            assert others[-1] == ("/continue_generation", "Bearer key")


async def test_the_same_request_is_the_same_update(tiny_gateway: RunningGateway) -> None:
    """Also where the answer was lost with its gateway."""
    async with answering({"/model_info": MODEL, "/pause_generation": {}}) as (url, _), trainer_of(tiny_gateway, url) as trainer:
        call = f"/v1/jobs/{trainer.job_id}/weight_updates"
        first = await trainer.api.post(call, json={"version": 1}, headers={"Idempotency-Key": "k"})
        assert first.status_code == 202
        [answer] = [key async for key in tiny_gateway.store.redis.scan_iter("rw:*:answer")]
        await tiny_gateway.store.redis.delete(answer)
        again = await trainer.api.post(call, json={"version": 1}, headers={"Idempotency-Key": "k"})
        assert (again.status_code, again.json()["update_id"]) == (202, first.json()["update_id"])
        assert (await trainer.begin(1)).status_code == 409


async def test_a_conflict_that_passes_is_not_remembered(tiny_gateway: RunningGateway) -> None:
    answers: Answers = {"/model_info": MODEL, "/pause_generation": {}, "/v1/loads": {"loads": [{"num_running_reqs": 1}]}}
    async with answering(answers) as (url, _), trainer_of(tiny_gateway, url, weight_update="drain") as trainer:
        update_id = await trainer.begun(1)
        call = f"/v1/weight_updates/{update_id}/finish"
        early = await trainer.api.post(call, json={}, headers={"Idempotency-Key": "k"})
        assert (early.status_code, early.headers["Retry-After"]) == (409, "1")
        answers["/v1/loads"] = {"loads": []}
        await trainer.until(update_id, "paused")
        assert (await trainer.api.post(call, json={}, headers={"Idempotency-Key": "k"})).status_code == 202


async def test_generators_that_answer_at_once_do_not_outdo_each_other(empty_redis_url: str) -> None:
    """64 of them cost 64 changes, and not that again for each that comes in between."""
    async with store_at(empty_redis_url) as store:
        job_id, urls = await Stack(store).open_job(), [f"http://g{number}" for number in range(64)]
        weights = WeightStore(store)
        wanted = Wanted(version=1, from_disk=None, rollback=False, timeout_s=9, mode="in_flight", flush_cache=False)
        labels = dict.fromkeys(urls, "0")
        begun = await weights.change(
            job_id, lambda known: begin(known.weights, wanted, job_id=job_id, policy=(0, 0), labels=labels, now=0.0)
        )
        assert begun.update is not None
        update_id = begun.update.update_id

        async def pause(url: str) -> None:
            await weights.change(job_id, lambda known: paused(known.weights, update_id, url, now=1.0))

        await store.redis.config_resetstat()
        await asyncio.gather(*map(pause, urls))
        assert (await store.redis.info("commandstats"))["cmdstat_evalsha"]["calls"] == 64
        assert all(generator.paused for generator in (await weights.read(job_id)).generators.values())


async def test_an_update_that_begins_beside_a_rollback_is_of_the_new_lineage(empty_redis_url: str) -> None:
    async with store_at(empty_redis_url) as store:
        job_id, seen = await Stack(store).open_job(), list[int]()
        wanted = Wanted(version=1, from_disk=None, rollback=False, timeout_s=9, mode="in_flight", flush_cache=False)

        def begun(known: Known) -> JobWeights:
            if not seen:
                with redis.Redis.from_url(empty_redis_url) as other:
                    other.hincrby(JobKeys(job_id).job, "lineage", 1)
            seen.append(known.lineage)
            policy = (known.lineage, known.version)
            return begin(known.weights, wanted, job_id=job_id, policy=policy, labels={"http://a": "0"}, now=0.0)

        weights = await asyncio.wait_for(WeightStore(store).change(job_id, begun), 20)
        assert seen == [0, 1]
        assert weights.update is not None
        assert weights.update.label == "1.1"
