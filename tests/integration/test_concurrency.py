"""Adaptive rollouts in flight: kept in the store, obeyed by it, and steered by workers against stand-in generators of given speed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp.test_utils import TestServer
from pydantic import SecretStr

from service.batches import BatchRecord
from service.concurrency import Load
from service.generator_load import told
from service.generator_pool import GeneratorPool
from service.jobs import JobCounts
from service.records import GeneratorSpec, JobPatch, Limits, Message, Sampling, TaskSpec
from service.settings import Settings
from service.standin import create_standin
from service.standin.server import load_model
from service.steering import Steering
from service.weight_records import GeneratorWeights, JobWeights, Standing
from service.weight_store import WeightStore
from tests.gateway_play import DEAD_GENERATOR, job_body
from tests.hostile_generator import HostileGenerator, serving
from tests.standin_stack import LONG, standin
from tests.store_stack import Stack, store_at
from workers.resources import JobContexts, Resources
from workers.worker import Worker

pytestmark = pytest.mark.redis

TOKENS = 8
"""Of each rollout."""

IDLE = [Load(running=1, waiting=0, usage=0.0)]
CROWDED = [Load(running=4, waiting=4, usage=0.0)]


@pytest.fixture
async def stack(empty_redis_url: str) -> AsyncIterator[Stack]:
    async with store_at(empty_redis_url) as store:
        yield Stack(store)


async def counts(stack: Stack) -> JobCounts:
    return await stack.jobs.counts(stack.job_id)


def saying(loads: list[Load] | None) -> Callable[[], Any]:
    async def say() -> list[Load] | None:
        return loads

    return say


# ----------------------------------------------------------------------------------------------------------------- in the store


async def test_an_adaptive_job_begins_with_one_batch_in_flight(stack: Stack) -> None:
    await stack.open_job(concurrency="adaptive", staleness_budget=9)
    await stack.submit(10)
    assert len(await stack.take()) == 4  # two groups of two
    assert (await counts(stack)).in_flight_cap == 4


@pytest.mark.parametrize(
    ("fields", "cap"),
    [
        pytest.param({"concurrency": "fixed"}, 256, id="fixed"),
        pytest.param({"concurrency": "adaptive", "min_in_flight_rollouts": 6}, 6, id="lowest"),
        pytest.param({"concurrency": "adaptive", "max_in_flight_rollouts": 3}, 3, id="highest"),
        pytest.param({"concurrency": "adaptive", "groups_per_step": 1, "extra_members": 1}, 3, id="extra-members"),
    ],
)
async def test_the_cap_at_first(stack: Stack, fields: dict[str, Any], cap: int) -> None:
    await stack.open_job(**fields)
    assert (await counts(stack)).in_flight_cap == cap


async def test_what_was_decided_is_obeyed_until_the_job_is_fixed_again(stack: Stack) -> None:
    await stack.open_job(concurrency="adaptive", staleness_budget=9)
    await stack.submit(20)
    await stack.take()
    steering = Steering(stack.store, stack.jobs, every_s=0.0)
    grown = await steering.steer(await stack.jobs.get(stack.job_id), saying(IDLE))
    assert grown is not None
    assert (grown.cap, grown.reason) == (6, "grows")
    assert (await counts(stack)).in_flight_cap == 6
    assert len(await stack.take()) == 2
    await stack.jobs.patch(stack.job_id, JobPatch(max_in_flight_rollouts=5))
    assert (await counts(stack)).in_flight_cap == 5
    await stack.jobs.patch(stack.job_id, JobPatch(concurrency="fixed", max_in_flight_rollouts=40))
    assert (await counts(stack)).in_flight_cap == 40
    assert await steering.steer(await stack.jobs.get(stack.job_id), saying(IDLE)) is None


async def test_one_of_many_workers_decides(stack: Stack) -> None:
    """Each decision goes on from the one before, whoever made it."""
    await stack.open_job(concurrency="adaptive", staleness_budget=9)
    record = await stack.jobs.get(stack.job_id)
    workers = [Steering(stack.store, stack.jobs, every_s=60.0) for _ in range(5)]
    decided = await asyncio.gather(*(worker.steer(record, saying(IDLE)) for worker in workers))
    assert len([state for state in decided if state is not None]) == 1


async def test_a_decision_that_took_too_long_is_dropped(stack: Stack) -> None:
    await stack.open_job(concurrency="adaptive", staleness_budget=9)
    await stack.submit(20)
    await stack.take()
    record = await stack.jobs.get(stack.job_id)
    steering = Steering(stack.store, stack.jobs, every_s=0.0)

    async def slow() -> list[Load]:
        assert await Steering(stack.store, stack.jobs, every_s=0.0).steer(record, saying(IDLE)) is not None
        return CROWDED

    assert await steering.steer(record, slow) is None
    assert (await counts(stack)).in_flight_cap == 6


async def test_nothing_follows_from_generators_that_stand_still(stack: Stack) -> None:
    await stack.open_job(concurrency="adaptive")
    steering = Steering(stack.store, stack.jobs, every_s=0.0)
    assert await steering.steer(await stack.jobs.get(stack.job_id), saying(None)) is None


# ---------------------------------------------------------------------------------------------------- with generators and a worker


class Generators:
    """Stand-ins with `slots` requests at once, of `seconds` each."""

    def __init__(self, model: dict[str, Any], stack: AsyncExitStack) -> None:
        self._model = model
        self._stack = stack
        self.servers: list[TestServer] = []

    async def start(self, *, slots: int, seconds: float) -> str:
        app = create_standin(**self._model, policy=LONG, tokens_per_s=TOKENS / seconds, max_running=slots)
        server = TestServer(app)
        await server.start_server()
        self._stack.push_async_callback(server.close)
        self.servers.append(server)
        return str(server.make_url("")).rstrip("/")


@pytest.fixture
async def generators(qwen3_dir: Path) -> AsyncIterator[Generators]:
    async with AsyncExitStack() as stack:
        yield Generators(await asyncio.to_thread(load_model, qwen3_dir, "qwen3"), stack)


@asynccontextmanager
async def running(stack: Stack, qwen3_dir: Path, urls: list[str], **fields: Any) -> AsyncIterator[None]:
    """An adaptive job with a worker and a trainer that takes what there is, at once."""
    model = {"tokenizer": str(qwen3_dir), "renderer": "qwen3", "context_tokens": 4000}
    generators = [{"url": url, "max_concurrency": 1000} for url in urls]
    spec = {"concurrency": "adaptive", "staleness_budget": None, "group_size": 1, "model": model, "generators": generators}
    await stack.open_job(**spec | fields)
    task = TaskSpec(task_id="t", messages=[Message(role="user", content="hi")], limits=Limits(tokens=TOKENS, turn_tokens=TOKENS))

    async def train() -> None:
        await stack.groups.submit(stack.job_id, [task] * 5000)
        while True:
            found = await stack.lease(fields["groups_per_step"])
            if isinstance(found, BatchRecord):
                await stack.batches.ack(found.batch_id)
            else:
                await asyncio.sleep(0.02)

    settings = Settings(
        redis_url=SecretStr(stack.store.url), tokenizer_roots=[qwen3_dir.parent], worker_rollouts=200, steer_s=0.1, grace_s=1.0
    )
    async with JobContexts(settings, stack.jobs, WeightStore(stack.store)) as contexts, aiohttp.ClientSession() as http:
        resources = Resources(
            settings=settings,
            worker="w1",
            deployment_id="test",
            leases=stack.leases,
            groups=stack.groups,
            contexts=contexts,
            backends={},
            http=http,
            verifying=asyncio.Semaphore(1),
            stopping=asyncio.Event(),
        )
        tasks = [asyncio.create_task(train()), asyncio.create_task(Worker(stack.store, stack.jobs, resources).run())]
        try:
            yield
        finally:
            resources.stopping.set()
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(stack: Stack, holds: Callable[[JobCounts], bool]) -> JobCounts:
    """Poll the job until it is so; the counts then."""
    async with asyncio.timeout(120):
        while not holds(found := await counts(stack)):
            await asyncio.sleep(0.05)
    return found


@pytest.mark.timeout(300)
async def test_more_than_generators_bear_is_cut_to_what_they_bear(stack: Stack, generators: Generators, qwen3_dir: Path) -> None:
    """64 in flight on 8 slots: requests queue up, and the cap falls until few do; what is in flight follows it."""
    url = await generators.start(slots=8, seconds=0.05)
    async with running(stack, qwen3_dir, [url], groups_per_step=64, max_in_flight_rollouts=64):
        await until(stack, lambda found: found.in_flight_rollouts > 32)
        cut = await until(stack, lambda found: found.in_flight_cap <= 32)
        assert cut.in_flight_cap >= 1
        await until(stack, lambda found: found.in_flight_rollouts <= 32)


@pytest.mark.timeout(300)
async def test_generators_with_room_get_more(stack: Stack, generators: Generators, qwen3_dir: Path) -> None:
    url = await generators.start(slots=64, seconds=0.5)
    async with running(stack, qwen3_dir, [url], groups_per_step=8, max_in_flight_rollouts=32):
        await until(stack, lambda found: found.in_flight_cap == 32)
        await until(stack, lambda found: found.in_flight_rollouts > 16)


@pytest.mark.timeout(300)
async def test_a_generator_that_dies_takes_its_share_along(stack: Stack, generators: Generators, qwen3_dir: Path) -> None:
    urls = [await generators.start(slots=64, seconds=0.5), await generators.start(slots=64, seconds=0.5)]
    async with running(stack, qwen3_dir, urls, groups_per_step=8, max_in_flight_rollouts=32):
        await until(stack, lambda found: found.in_flight_cap == 32)
        await generators.servers[1].close()
        await until(stack, lambda found: found.in_flight_cap <= 16)


# ------------------------------------------------------------------------------------------------------------- what a pool knows


async def loads_with(url: str, **weights: Any) -> list[Load | None] | None:
    """Of a pool of `url`, whose weights are as told, and of a server that says nothing of its load."""
    async with (
        serving(HostileGenerator()) as old,
        GeneratorPool([GeneratorSpec(url=url), GeneratorSpec(url=old)], vocab_size=100, stop_token_ids=(3,)) as pool,
    ):
        pool.take(JobWeights(generators={url: GeneratorWeights(**weights)}))
        return await pool.loads()


NOTHING = Load(running=0, waiting=0, usage=0.0)


@pytest.mark.parametrize(
    ("weights", "loads"),
    [
        pytest.param({}, [NOTHING, NOTHING], id="both-serve"),
        pytest.param({"standing": Standing.QUARANTINED, "paused": True}, [None, NOTHING], id="one-in-quarantine"),
        pytest.param({"standing": Standing.HELD}, None, id="an-update-begins"),
        pytest.param({"paused": True}, None, id="paused"),
    ],
)
async def test_what_a_pool_says_of_its_generators(tmp_path: Path, weights: dict[str, Any], loads: list[Load | None] | None) -> None:
    async with standin(tmp_path) as url:
        assert await loads_with(url, **weights) == loads


async def test_a_generator_that_is_not_there_is_lost_to_every_worker() -> None:
    """Also to one whose calls have not failed there yet."""
    async with GeneratorPool([GeneratorSpec(url=DEAD_GENERATOR)], vocab_size=100, stop_token_ids=(3,)) as pool:
        assert await pool.loads() == [None]


async def test_calls_that_wait_for_a_place_are_waiting_requests(tmp_path: Path) -> None:
    """Two places here and four callers: as many wait as run."""
    async with (
        standin(tmp_path, tokens_per_s=1.0) as url,
        GeneratorPool([GeneratorSpec(url=url, max_concurrency=2)], vocab_size=100, stop_token_ids=(3,)) as pool,
    ):
        calls = [
            asyncio.create_task(
                pool.generate(
                    rollout_id=f"r{number}", ids=[5, 6], max_new_tokens=100, sampling=Sampling(), version=0, lineage=0, timeout_s=60.0
                )
            )
            for number in range(4)
        ]
        async with asyncio.timeout(30):
            while await pool.loads() != [Load(running=2, waiting=2, usage=0.0)]:
                await asyncio.sleep(0.05)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


# ------------------------------------------------------------------------------------------------------------------------ HTTP


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        pytest.param({"min_in_flight_rollouts": 300}, "min_in_flight_rollouts is above max_in_flight_rollouts", id="above-the-highest"),
        pytest.param({"min_in_flight_rollouts": 0}, "min_in_flight_rollouts", id="none"),
        pytest.param({"concurrency": "elastic"}, "concurrency", id="no-such-word"),
    ],
)
async def test_bad_input_is_named(client: httpx.AsyncClient, fields: dict[str, Any], named: str) -> None:
    refused = await client.post("/v1/jobs", json=job_body(**fields))
    assert refused.status_code == 422
    assert named in refused.text
    created = await client.post("/v1/jobs", json=job_body(concurrency="adaptive"))
    assert created.json()["counts"]["in_flight_cap"] == 8
    patched = await client.patch(f"/v1/jobs/{created.json()['job_id']}", json=fields)
    assert patched.status_code == 422
    assert named in patched.text


@pytest.mark.parametrize(
    ("ranks", "load"),
    [
        pytest.param([], Load(running=0, waiting=0, usage=0.0), id="none"),
        pytest.param(
            [
                {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.25},
                {"num_running_reqs": 4, "num_waiting_reqs": 0, "token_usage": 0.5},
            ],
            Load(running=7, waiting=1, usage=0.5),
            id="two-ranks",
        ),
        pytest.param([{"num_running_reqs": 2}, "what", {"token_usage": None}], Load(running=2, waiting=0, usage=0.0), id="half-said"),
        pytest.param(
            [{"num_running_reqs": -1, "num_waiting_reqs": "9", "token_usage": 7}], Load(running=0, waiting=0, usage=1.0), id="odd"
        ),
    ],
)
def test_what_a_generator_says_of_its_load(ranks: list[Any], load: Load) -> None:
    assert told(ranks) == load
