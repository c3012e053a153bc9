"""The simulated trainer against a real gateway; the workers are played, the generator is a stand-in that it labels."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestServer

from service.batches import BatchRecord
from service.standin import create_standin, drawn_lengths
from service.standin.server import load_model
from service.trainer.figures import Summary
from service.trainer.gateway import GatewayError, open_gateway
from service.trainer.loop import Progress, Trainer
from service.trainer.options import Pace, TrainerError, TrainerOptions
from tests.gateway_play import DEAD_GENERATOR, job_body, play, task_body
from tests.gateway_stack import KEYS, RunningGateway, running_gateway
from tests.standin_stack import standin

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]

POLL_S = 0.01


@dataclass(slots=True, kw_only=True)
class Played:
    """A gateway with a job whose rollouts end as soon as they are let out."""

    gateway: RunningGateway
    job_id: str
    url: str
    generator_url: str

    async def train(self, progress: Progress | None = None, **options: Any) -> Summary:
        """Run a trainer to its end."""
        pace = Pace(step_s=options.pop("step_s", 0.02), time_scale=options.pop("time_scale", 1.0))
        given = TrainerOptions(url=self.url, key=KEYS["red"], job=self.job_id, pace=pace, **options)
        async with open_gateway(self.url, KEYS["red"]) as gateway:
            trainer = Trainer(gateway, await gateway.job(self.job_id), given, progress or Progress())
            async with asyncio.timeout(120):
                await trainer.run()
            return await trainer.summary()

    async def counts(self) -> Any:
        return await self.gateway.jobs.counts(self.job_id)


@pytest.fixture
async def generator_url(tmp_path: Path) -> AsyncIterator[str]:
    async with standin(tmp_path) as url:
        yield url


@asynccontextmanager
async def played(gateway: RunningGateway, generator_url: str, **job: Any) -> AsyncIterator[Played]:
    async with gateway.client() as client:  # the first job loads the tokenizer: seconds, more on a busy machine
        answer = await client.post("/v1/jobs", json=job_body(generators=[generator_url], groups_per_step=2, **job), timeout=120)
        assert answer.status_code == 201, answer.text
        job_id: str = answer.json()["job_id"]

    async def play_on() -> None:
        while True:
            if not await play(gateway.leases, job_id, count=1):
                await asyncio.sleep(POLL_S)

    playing = asyncio.create_task(play_on())
    try:
        yield Played(gateway=gateway, job_id=job_id, url=gateway.url, generator_url=generator_url)
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)


async def label_of(url: str) -> str:
    async with httpx.AsyncClient() as http:
        label: str = (await http.get(f"{url}/model_info")).json()["weight_version"]
        return label


async def test_it_feeds_leases_trains_labels_and_publishes(gateway: RunningGateway, generator_url: str) -> None:
    async with played(gateway, generator_url, staleness_budget=1) as job:
        summary = await job.train(steps=6, warm_up=1, time_scale=10.0, step_s=1.0)
        counts = await job.counts()
        assert (summary.steps, summary.version, summary.lost_batches, summary.discarded) == (5, 6, 0, {})
        assert 0.9 < summary.train_s < 9  # 0.1 s of ours, and what a busy machine adds
        assert summary.samples_per_s > 0
        assert summary.staleness is not None
        assert summary.staleness.max <= 1
        assert (counts.acked, counts.leased) == (12, 0)
        assert await label_of(generator_url) == "6"


async def test_several_batches_make_one_version(gateway: RunningGateway, generator_url: str) -> None:
    async with played(gateway, generator_url, steps_per_version=3) as job:
        assert (await job.train(steps=7)).version == 2
        assert (await job.counts()).acked == 14


async def test_a_prefetched_batch_counts_as_old_as_it_is_when_it_trains(gateway: RunningGateway, generator_url: str) -> None:
    async with played(gateway, generator_url, staleness_budget=2) as job:
        progress = Progress()
        await job.train(progress, steps=8, prefetch=1)
        counts = await job.counts()
        assert (progress.version, counts.acked, counts.leased) == (8, 16, 0), "what was leased ahead and not trained was handed back"
        ages = [age for step in progress.steps[2:] for age in step.staleness]
        assert fmean(ages) >= 0.5, "leased before the version that it trains, but for what was not ready then"


async def test_the_service_moves_the_weights_where_it_is_asked_to(gateway: RunningGateway, qwen3_dir: Path) -> None:
    standing_in = TestServer(create_standin(**load_model(qwen3_dir, "qwen3"), policy=drawn_lengths(10, 0)))
    async with standing_in:
        url = str(standing_in.make_url("")).rstrip("/")
        async with played(gateway, url) as job:
            summary = await job.train(steps=3, weight_updates=True)
            assert (summary.version, (await job.counts()).acked) == (3, 6)
            assert await label_of(url) == "0.3"


async def test_tasks_that_end_are_trained_to_the_last(gateway: RunningGateway, generator_url: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text(json.dumps({"tasks": [task_body(n) for n in range(3)]}))
    async with played(gateway, generator_url) as job:
        summary = await job.train(tasks=tmp_path / "tasks.json", epochs=3)
        assert summary.version == 5, "four batches of two, and the last group alone"
        assert (await job.counts()).acked == 9


async def test_a_trainer_that_was_restarted_takes_its_batches_back(gateway: RunningGateway, generator_url: str) -> None:
    async with played(gateway, generator_url, staleness_budget=0) as job, gateway.client() as client:
        tasks = {"tasks": [task_body(n) for n in range(2)]}
        assert (await client.post(f"/v1/jobs/{job.job_id}/tasks", json=tasks)).status_code == 202
        left = await client.post(f"/v1/jobs/{job.job_id}/batches", json={"groups": 2, "wait_s": 30})
        assert left.status_code == 200
        await job.train(steps=3)
        assert (await job.counts()).acked == 6, "on-policy, nothing could be dispatched beside a batch that is held"


async def test_a_lease_is_renewed_for_as_long_as_a_step_takes(gateway: RunningGateway, generator_url: str) -> None:
    async with played(gateway, generator_url, staleness_budget=1) as job:
        training = asyncio.create_task(job.train(step_s=600.0, lease_s=9.0))
        while not (held := await gateway.batches.live(job.job_id)):
            await asyncio.sleep(POLL_S)
        while (await gateway.batches.live(job.job_id))[0].lease_until == held[0].lease_until:
            await asyncio.sleep(POLL_S)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        assert await gateway.batches.live(job.job_id) == [], "it left nothing behind"


async def test_a_batch_that_is_lost_is_not_trained_on(gateway: RunningGateway, generator_url: str) -> None:
    async with played(gateway, generator_url, staleness_budget=1) as job:
        training = asyncio.create_task(job.train(steps=1, step_s=4.0))
        while not (held := await gateway.batches.live(job.job_id)):
            await asyncio.sleep(POLL_S)
        await gateway.batches.release(held[0].batch_id)
        taken = await gateway.batches.lease(job.job_id, groups=2, lease_s=300)
        assert isinstance(taken, BatchRecord)
        assert {group.group_id for group in taken.groups} == {group.group_id for group in held[0].groups}
        summary = await training
        assert (summary.lost_batches, summary.version) == (1, 1)
        assert (await job.counts()).acked == 2


@dataclass(slots=True)
class Way:
    """A way to a gateway. every: of so many calls one arrives, and its answer does not; 0: none."""

    to: str
    every: int = 0
    url: str = ""
    calls: int = 0

    async def forward(self, session: ClientSession, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        lost = self.every and self.calls % self.every == 0
        where = f"{self.to}{request.path_qs}"
        try:
            async with session.request(request.method, where, data=await request.read(), headers=request.headers) as answer:
                body = await answer.read()
        except ClientError as error:
            raise web.HTTPBadGateway from error
        if lost and request.transport is not None:
            request.transport.abort()
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in ("content-length", "transfer-encoding")}
        return web.Response(body=body, status=answer.status, headers=kept)


@asynccontextmanager
async def way_to(url: str, *, every: int = 0) -> AsyncIterator[Way]:
    way = Way(url, every)
    async with ClientSession(auto_decompress=False) as session:
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", partial(way.forward, session))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            way.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield way
        finally:
            await runner.cleanup()


async def test_answers_that_get_lost_cost_time_and_nothing_else(gateway: RunningGateway, generator_url: str) -> None:
    async with played(gateway, generator_url) as job, way_to(gateway.url, every=3) as way:
        job.url = way.url
        summary = await job.train(steps=8)
        counts = await job.counts()
        assert (summary.version, summary.lost_batches) == (8, 0)
        assert (counts.acked, counts.leased, counts.requeued) == (16, 0, 0)


async def test_a_gateway_that_is_replaced_costs_time_and_nothing_else(gateway: RunningGateway, generator_url: str) -> None:
    async with played(gateway, generator_url) as job, way_to(gateway.url) as way:
        async with running_gateway(gateway.settings) as first:
            way.to = first.url
            job.url = way.url
            training = asyncio.create_task(job.train(steps=8, step_s=0.1))
            while (await job.counts()).acked < 4:
                await asyncio.sleep(POLL_S)
        calls = way.calls
        while way.calls < calls + 3:  # some find nobody
            await asyncio.sleep(POLL_S)
        way.to = gateway.url
        assert (await training).version == 8
        assert (await job.counts()).acked == 16


async def test_a_generator_that_cannot_be_labelled_ends_it(gateway: RunningGateway) -> None:
    async with played(gateway, DEAD_GENERATOR) as job:
        with pytest.raises(TrainerError, match="cannot be labelled"):
            await job.train(steps=3)
        assert (await job.counts()).leased == 0


async def test_a_job_that_is_not_there_is_named(gateway: RunningGateway) -> None:
    async with open_gateway(gateway.url, KEYS["red"]) as calls:
        with pytest.raises(GatewayError, match="404"):
            await calls.job("j0123456789abcdef")


async def rollway(*arguments: str) -> asyncio.subprocess.Process:
    command = str(Path(sys.executable).with_name("rollway"))
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(command, "trainer", *arguments, stdout=pipe, stderr=pipe)


async def test_ctrl_c_hands_back_and_still_shows_the_figures(gateway: RunningGateway, generator_url: str) -> None:
    async with played(gateway, generator_url) as job:
        await job.train(steps=2)
        arguments = ("--url", gateway.url, "--key", KEYS["red"], "--job", job.job_id, "--step-s", "600", "--json")
        process = await rollway("--simulate", *arguments)
        while not await gateway.batches.live(job.job_id):
            await asyncio.sleep(POLL_S)
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        summary = json.loads(out)
        assert (process.returncode, summary["interrupted"], summary["version"], summary["steps"]) == (130, True, 2, 0)
        assert await gateway.batches.live(job.job_id) == []


async def test_a_job_of_its_own_is_gone_after(gateway: RunningGateway, generator_url: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text(json.dumps([]))
    spec = tmp_path / "job.json"
    spec.write_text(json.dumps(job_body("own", generators=[generator_url])))
    arguments = ("--simulate", "--url", gateway.url, "--key", KEYS["red"], "--spec", str(spec), "--tasks", str(tmp_path / "tasks.json"))
    process = await rollway(*arguments)
    _, errors = await process.communicate()
    assert (process.returncode, "no tasks" in errors.decode()) == (1, True)
    assert await gateway.jobs.list("red") == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param(("--job", "j1"), "--simulate", id="a-real-trainer"),
        pytest.param(("--simulate",), "--spec", id="no-job"),
        pytest.param(("--simulate", "--job", "j1", "--steps", "0"), "--steps", id="no-step"),
    ],
)
async def test_wrong_options_are_told(arguments: tuple[str, ...], named: str) -> None:
    process = await rollway(*arguments)
    _, errors = await process.communicate()
    assert (process.returncode, named in errors.decode()) == (2, True), errors.decode()


async def test_a_gateway_that_is_not_there_is_told_in_seconds() -> None:
    process = await rollway("--simulate", "--job", "j1", "--url", DEAD_GENERATOR)
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    assert (process.returncode, f"{DEAD_GENERATOR}/v1/jobs/j1 got no answer" in errors.decode()) == (1, True), errors.decode()


async def test_what_the_gateway_refuses_is_told_by_field(gateway: RunningGateway, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(job_body(staleness_budget=-1)))
    process = await rollway("--simulate", "--spec", str(tmp_path / "job.json"), "--url", gateway.url, "--key", KEYS["red"])
    _, errors = await process.communicate()
    assert (process.returncode, "staleness_budget" in errors.decode()) == (1, True), errors.decode()
