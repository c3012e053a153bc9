"""The pool behind the real sglang-router: /generate goes through it, aborts go to the workers it hides."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from service.generator_pool import GeneratorPool
from service.records import GeneratorSpec
from tests.e2e.stack import free_port
from tests.integration.test_standin_pool import Asker, recorded
from tests.standin_stack import standin, tiny_model


@asynccontextmanager
async def router(folder: Path, *workers: str) -> AsyncIterator[str]:
    port = free_port()
    command = [str(Path(sys.executable).parent / "sglang-router"), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *workers, "--policy", "round_robin", "--worker-startup-check-interval", "1"]
    command += ["--prometheus-port", str(free_port()), "--log-level", "warn", "--disable-retries", "--disable-circuit-breaker"]
    with (folder / "router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        await wait_for_workers(f"http://127.0.0.1:{port}", len(workers))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def wait_for_workers(url: str, count: int) -> None:
    async with asyncio.timeout(30), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"{url}/workers") as reply:
                    if reply.status == 200 and len((await reply.json())["workers"]) == count:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


async def in_flight(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/loads") as reply:
        return sum(int(load["num_running_reqs"]) for load in (await reply.json())["loads"])


@pytest.mark.timeout(90)
async def test_generations_go_through_and_aborts_reach_the_workers(tmp_path: Path) -> None:
    records = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    tokenizer, template = tiny_model(tmp_path / "tiny")
    async with (
        standin(tmp_path, record=records[0], tokens_per_s=200.0) as one,
        standin(tmp_path, record=records[1], tokens_per_s=200.0) as two,
        router(tmp_path, one, two) as url,
        GeneratorPool(
            [GeneratorSpec(url=url, control_urls=[one, two])], vocab_size=tokenizer.get_vocab_size(), stop_token_ids=(template.end_id,)
        ) as pool,
    ):
        asker = Asker(tmp_path, pool, max_new_tokens=20)
        generations = [await asker.ask() for _ in range(4)]
        lines = [line for record in records for line in recorded(record)]
        assert all(recorded(record) for record in records)
        assert sorted(line["output_ids"] for line in lines) == sorted(generation.token_ids for generation in generations)

        asker.max_new_tokens = 4000
        cancelled = asyncio.create_task(asker.ask())
        async with asyncio.timeout(10):
            while await in_flight(one) + await in_flight(two) == 0:
                await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        async with asyncio.timeout(5):  # the engine alone would go on for seconds
            while await in_flight(one) + await in_flight(two) > 0:
                await asyncio.sleep(0.05)
