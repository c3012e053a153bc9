"""Playing a trainer, and a worker that samples all the while, for tests of weight updates."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from tokenizers import Tokenizer

from service.generator_pool import GeneratorPool
from service.records import FinishReason, GeneratorSpec, Sampling
from service.store import Store
from service.trajectories import Generation
from service.weight_store import WeightStore
from tests.gateway_play import job_body
from tests.gateway_stack import RunningGateway
from tests.standin_stack import chatml, standin, tiny_model

TOKENS = 300
TOKENS_PER_S = 100.0
"""A turn lasts for as long as a slow machine may take to begin an update."""
LOOK_S = 0.05


@dataclass(slots=True)
class Turn:
    """One turn as a worker journals it: cut generations go on from their own ids."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(lineage, version) of each sampled token."""
    parts: list[Generation] = field(default_factory=list)


class Player:
    """A job's pool in a worker, renewed from the store as a worker does it."""

    def __init__(self, pool: GeneratorPool, weights: WeightStore, job_id: str, tokenizer: Tokenizer) -> None:
        self.pool = pool
        self.weights = weights
        self.job_id = job_id
        self.version = 0
        self.prompt = chatml(tokenizer, [{"role": "user", "content": "Count the files"}])

    async def look_forever(self) -> None:
        while True:
            self.pool.take(await self.weights.read(self.job_id))
            await asyncio.sleep(LOOK_S)

    async def turn(self, tokens: int, *, rollout_id: str = "r") -> Turn:
        turn = Turn(list(self.prompt))
        while len(turn.ids) < tokens:
            generation = await self.pool.generate(
                rollout_id=rollout_id,
                ids=array("i", turn.prompt + turn.ids),
                max_new_tokens=tokens - len(turn.ids),
                sampling=Sampling(),
                version=self.version,
                lineage=0,
                timeout_s=30,
            )
            turn.parts.append(generation)
            turn.ids += generation.token_ids
            turn.versions += [(span.lineage, span.version) for span in generation.spans for _ in range(span.start, span.end)]
            if generation.finish is not FinishReason.ABORT:
                break
        return turn


@asynccontextmanager
async def playing(urls: list[str], weights: WeightStore, job_id: str, tokenizer: Tokenizer) -> AsyncIterator[Player]:
    end = tokenizer.token_to_id("<|im_end|>")
    specs = [GeneratorSpec(url=url) for url in urls]
    async with GeneratorPool(specs, vocab_size=tokenizer.get_vocab_size(), stop_token_ids=(end,)) as pool:
        player = Player(pool, weights, job_id, tokenizer)
        looking = asyncio.create_task(player.look_forever())
        try:
            yield player
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


class Trainer:
    """The trainer's calls."""

    def __init__(self, api: httpx.AsyncClient, job_id: str) -> None:
        self.api = api
        self.job_id = job_id

    async def begin(self, version: int, **fields: Any) -> httpx.Response:
        return await self.api.post(f"/v1/jobs/{self.job_id}/weight_updates", json={"version": version, **fields})

    async def begun(self, version: int, **fields: Any) -> str:
        reply = await self.begin(version, **fields)
        assert reply.status_code == 202, reply.text
        update_id: str = reply.json()["update_id"]
        return update_id

    async def until(self, update_id: str, state: str, *, wait_s: float = 30) -> dict[str, Any]:
        """The update, once it is in this state."""
        async with asyncio.timeout(wait_s):
            while True:
                reply = await self.api.get(f"/v1/weight_updates/{update_id}", params={"wait_s": 5})
                assert reply.status_code == 200, reply.text
                body: dict[str, Any] = reply.json()
                if body["state"] == state:
                    return body
                assert body["state"] not in ("done", "failed"), body
                await asyncio.sleep(0.02)

    async def say(self, update_id: str, what: str, **body: Any) -> httpx.Response:
        return await self.api.post(f"/v1/weight_updates/{update_id}/{what}", json=body)

    async def job(self) -> dict[str, Any]:
        body: dict[str, Any] = (await self.api.get(f"/v1/jobs/{self.job_id}")).json()
        return body


async def engine_says(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/model_info") as reply:
        label: str = (await reply.json())["weight_version"]
        return label


async def in_flight(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/loads") as reply:
        return sum(int(load["num_running_reqs"]) for load in (await reply.json())["loads"])


async def sampling(*urls: str, count: int = 1) -> None:
    """Wait until that many requests run there."""
    async with asyncio.timeout(60):
        while sum([await in_flight(url) for url in urls]) < count:
            await asyncio.sleep(0.01)


def as_recorded(turn: Turn, records: dict[str, Path]) -> list[tuple[int, int]]:
    """What the engines themselves, by URL, say of each token of a turn."""
    found: list[tuple[int, int]] = []
    ids = list(turn.prompt)
    for part in turn.parts:
        sampled = [part.token_ids, part.logprobs]
        lines = [json.loads(line) for line in records[part.generator].read_text().splitlines()]
        [line] = [line for line in lines if line["input_ids"] == ids and [line["output_ids"], line["logprobs"]] == sampled]
        found += [pair(label) for label in line["versions"]]
        ids += part.token_ids
    return found


def pair(label: int | str) -> tuple[int, int]:
    """(lineage, version) of a label; a bare number is of the first lineage."""
    lineage, _, version = str(label).rpartition(".")
    return int(lineage or 0), int(version)


@dataclass(slots=True)
class Scene:
    """A job on stand-ins, and a worker that samples from them."""

    urls: list[str]
    records: list[Path]
    trainer: Trainer
    player: Player
    folder: Path

    async def turns(self, group: asyncio.TaskGroup, count: int = 4, tokens: int = TOKENS) -> "list[asyncio.Task[Any]]":
        """So many turns, begun; they are with the engines when this returns."""
        tasks = [group.create_task(self.player.turn(tokens, rollout_id=f"r{number}")) for number in range(count)]
        await sampling(*self.urls, count=count)
        return tasks

    def check(self, turns: "list[asyncio.Task[Any]]", tokens: int = TOKENS) -> None:
        """Every token is there, under the weights that its engine recorded for it."""
        for task in turns:
            turn = task.result()
            assert len(turn.ids) == len(turn.versions) == tokens
            assert turn.versions == as_recorded(turn, dict(zip(self.urls, self.records, strict=True)))


def body_of(*generators: Any, **job: Any) -> dict[str, Any]:
    model = {"tokenizer": "tiny", "renderer": "chatml", "context_tokens": 4096}
    return job_body(model=model, generators=list(generators), **job)


@asynccontextmanager
async def scene(gateway: RunningGateway, folder: Path, count: int = 1, **job: Any) -> AsyncIterator[Scene]:
    async with gateway.client() as api, scene_at(api, gateway.store, folder, count, **job) as on:
        yield on


@asynccontextmanager
async def scene_at(api: httpx.AsyncClient, store: Store, folder: Path, count: int = 1, **job: Any) -> AsyncIterator[Scene]:
    tokenizer, _ = tiny_model(folder / "tiny")
    records = [folder / f"record{number}.jsonl" for number in range(count)]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(standin(folder, record=record, tokens_per_s=TOKENS_PER_S)) for record in records]
        reply = await api.post("/v1/jobs", json=body_of(*urls, **job))
        assert reply.status_code == 201, reply.text
        job_id = reply.json()["job_id"]
        player = await stack.enter_async_context(playing(urls, WeightStore(store), job_id, tokenizer))
        yield Scene(urls, records, Trainer(api, job_id), player, folder)
