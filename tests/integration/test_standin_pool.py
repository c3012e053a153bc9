"""The pool against the stand-in: what comes back is what was recorded, through aborts, labels and weight updates."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service.generator_pool import GeneratorPool
from service.records import FinishReason, GeneratorSpec, Sampling
from service.trajectories import Generation
from tests.standin_stack import chatml, standin, tiny_model


async def call(url: str, path: str, **body: Any) -> int:
    async with aiohttp.ClientSession() as http, http.post(url + path, json=body) as reply:
        return reply.status


def recorded(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


class Asker:
    """One rollout's calls."""

    def __init__(self, folder: Path, pool: GeneratorPool, *, max_new_tokens: int = 200) -> None:
        self.tokenizer, self.template = tiny_model(folder / "tiny")
        self.prompt = chatml(self.tokenizer, [{"role": "user", "content": "Count the files"}])
        self.pool = pool
        self.max_new_tokens = max_new_tokens

    async def ask(self, *, after: list[int] | None = None) -> Generation:
        return await self.pool.generate(
            rollout_id="r",
            ids=self.prompt + (after or []),
            max_new_tokens=self.max_new_tokens - len(after or []),
            sampling=Sampling(),
            version=0,
            lineage=0,
            timeout_s=20,
        )


def pool_over(folder: Path, url: str) -> GeneratorPool:
    tokenizer, template = tiny_model(folder / "tiny")
    return GeneratorPool([GeneratorSpec(url=url)], vocab_size=tokenizer.get_vocab_size(), stop_token_ids=(template.end_id,))


async def test_what_is_returned_is_what_was_recorded(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    async with standin(tmp_path, record=record) as url, pool_over(tmp_path, url) as pool:
        asker = Asker(tmp_path, pool)
        generations = [await asker.ask() for _ in range(5)]
    for line, generation in zip(recorded(record), generations, strict=True):
        assert line["input_ids"] == asker.prompt
        assert line["output_ids"] == generation.token_ids
        assert line["logprobs"] == generation.logprobs
        assert line["versions"] == [span.version for span in generation.spans for _ in range(span.start, span.end)]
        assert line["finish"] == generation.finish
    assert len({tuple(generation.token_ids) for generation in generations}) > 1


async def test_case_059_a_turn_cut_by_an_update_goes_on_from_its_own_ids(tmp_path: Path) -> None:
    async with standin(tmp_path, tokens_per_s=400.0) as url, pool_over(tmp_path, url) as pool:
        asker = Asker(tmp_path, pool)
        task = asyncio.create_task(asker.ask())
        await asyncio.sleep(0.15)
        assert await call(url, "/pause_generation", mode="abort") == 200
        first = await task
        assert await call(url, "/update_weights_from_disk", model_path="models/next", weight_version="1") == 200
        assert await call(url, "/continue_generation") == 200
        second = await asker.ask(after=first.token_ids)
    assert first.finish is FinishReason.ABORT
    assert 0 < len(first.token_ids) < 200
    assert len(first.token_ids) + len(second.token_ids) == 200
    assert [(span.version, span.start, span.end) for span in first.spans] == [(0, 0, len(first.token_ids))]
    assert [(span.version, span.start, span.end) for span in second.spans] == [(1, 0, len(second.token_ids))]
    text = asker.tokenizer.decode(first.token_ids + second.token_ids, skip_special_tokens=False)
    assert ("Count the files in the folder. " * 200).startswith(text)


async def test_a_label_moved_without_an_abort_is_in_the_spans(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    async with standin(tmp_path, tokens_per_s=400.0, record=record) as url, pool_over(tmp_path, url) as pool:
        task = asyncio.create_task(Asker(tmp_path, pool).ask())
        await asyncio.sleep(0.15)
        assert await call(url, "/update_weight_version", new_version="1.5", abort_all_requests=False) == 200
        generation = await task
    assert [(span.lineage, span.version) for span in generation.spans] == [(0, 0), (1, 5)]
    assert generation.finish is FinishReason.LENGTH
    assert recorded(record)[0]["versions"].count("1.5") == generation.spans[1].end - generation.spans[1].start


async def test_weights_loaded_without_a_pause_wait_for_what_runs(tmp_path: Path) -> None:
    async with standin(tmp_path, tokens_per_s=400.0) as url, pool_over(tmp_path, url) as pool:
        asker = Asker(tmp_path, pool, max_new_tokens=80)
        before = asyncio.create_task(asker.ask())
        await asyncio.sleep(0.05)
        loading = asyncio.create_task(call(url, "/update_weights_from_disk", model_path="models/next", weight_version="1"))
        await asyncio.sleep(0.05)
        after = asyncio.create_task(asker.ask())
        assert await loading == 200
        assert before.done()
        assert [span.version for span in (await before).spans] == [0]
        assert [span.version for span in (await after).spans] == [1]


async def test_weights_loaded_in_place_with_a_flush_are_changed_all_the_same(tmp_path: Path) -> None:
    async with standin(tmp_path, tokens_per_s=400.0) as url, pool_over(tmp_path, url) as pool:
        task = asyncio.create_task(Asker(tmp_path, pool, max_new_tokens=80).ask())
        await asyncio.sleep(0.05)
        assert await call(url, "/pause_generation", mode="in_place") == 200
        assert await call(url, "/update_weights_from_disk", model_path="models/next", weight_version="1") == 400
        assert await call(url, "/continue_generation") == 200
        assert [span.version for span in (await task).spans] == [0, 1]


async def test_continuing_what_is_not_paused_changes_nothing(tmp_path: Path) -> None:
    async with standin(tmp_path, tokens_per_s=50.0) as url, pool_over(tmp_path, url) as pool:
        task = asyncio.create_task(Asker(tmp_path, pool).ask())
        await asyncio.sleep(0.3)
        assert await call(url, "/continue_generation") == 200
        assert await call(url, "/abort_request", abort_all=True) == 200
        assert len((await task).token_ids) >= 10


async def test_an_id_outside_the_vocabulary_gets_no_answer_and_is_counted(tmp_path: Path) -> None:
    async with standin(tmp_path) as url, aiohttp.ClientSession() as http:
        for ids in ([1, 10**6], [-1], [2**40]):
            with pytest.raises(aiohttp.ClientError):
                await http.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})
        async with http.get(f"{url}/server_info") as reply:
            assert (await reply.json())["deaths"] == 3
