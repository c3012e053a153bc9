"""The pool against generators that misbehave: real HTTP, no tokens of meaning."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from service.errors import GeneratorError, MisalignedTokensError
from service.generator_pool import FAILURES_TO_OPEN, GeneratorPool
from service.records import FinishReason, GeneratorSpec, Sampling
from service.trajectories import Generation, VersionSpan
from service.weight_records import GeneratorWeights, JobWeights, Standing
from tests.hostile_generator import HostileGenerator, serving


@asynccontextmanager
async def pool_over(*generators: HostileGenerator, **fields: Any) -> AsyncIterator[GeneratorPool]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(generator)) for generator in generators]
        specs = [GeneratorSpec(url=url, **fields) for url in urls]
        yield await stack.enter_async_context(GeneratorPool(specs, vocab_size=100, stop_token_ids=(3,)))


async def generate(pool: GeneratorPool, **fields: Any) -> Generation:
    known: dict[str, Any] = {
        "rollout_id": "j1-g1-r0", "ids": [1, 2, 3], "max_new_tokens": 16, "sampling": Sampling(), "version": 6, "lineage": 0,
        "timeout_s": 5.0, "retry_s": 5.0,
    }  # fmt: skip
    return await pool.generate(**(known | fields))


async def test_what_is_sent_and_what_comes_back() -> None:
    generator = HostileGenerator()
    async with pool_over(generator, api_key="secret-key", headers={"x-team": "rl"}) as pool:
        generation = await generate(pool, ids=array("i", [1, 2, 3]), sampling=Sampling(temperature=0.5, min_new_tokens=99, regex="a+"))
    (call,), (headers,) = generator.calls, generator.headers
    assert call["input_ids"] == [1, 2, 3]
    assert call["return_logprob"] is True
    assert call["sampling_params"] == {
        "temperature": 0.5, "top_p": 1.0, "min_new_tokens": 16, "regex": "a+", "max_new_tokens": 16, "stop_token_ids": [3],
        "skip_special_tokens": False, "no_stop_trim": True,
    }  # fmt: skip
    assert headers["x-smg-routing-key"] == "j1-g1-r0"
    assert headers["Authorization"] == "Bearer secret-key"
    assert headers["x-team"] == "rl"
    assert generation.token_ids == [7, 3]
    assert generation.logprobs == [-0.5, -0.25]
    assert generation.spans == (VersionSpan(version=5, start=0, end=1), VersionSpan(version=6, start=1, end=2))
    assert (generation.finish, generation.matched, generation.cached_tokens) == (FinishReason.STOP, 3, 2)
    assert generation.generator.startswith("http://127.0.0.1:")
    assert generation.seconds > 0


@pytest.mark.parametrize("mood", ["409", "429", "503", "500", "duplicate", "garbage", "nan", "null", "short", "huge", "close"])
async def test_the_same_ids_are_sent_again_under_a_new_id(mood: str) -> None:
    generator = HostileGenerator(mood)
    async with pool_over(generator) as pool:
        assert (await generate(pool)).token_ids == [7, 3]
    first, second = generator.calls
    assert first["input_ids"] == second["input_ids"]
    assert first["rid"] != second["rid"]
    assert len(first["rid"]) == len(second["rid"]) == 32


@pytest.mark.parametrize(("mood", "message"), [("400", "temperature"), ("401", "api_key"), ("303", "final URL")])
async def test_what_would_fail_again_is_not_sent_again(mood: str, message: str) -> None:
    generator = HostileGenerator(mood)
    async with pool_over(generator) as pool:
        with pytest.raises(GeneratorError, match=message) as caught:
            await generate(pool)
    assert not caught.value.retryable
    assert len(generator.calls) == 1


async def test_a_call_that_gets_no_answer_is_aborted_and_sent_again() -> None:
    generator = HostileGenerator("hang")
    async with pool_over(generator) as pool:
        assert (await generate(pool, timeout_s=0.2)).token_ids == [7, 3]
    assert generator.aborts == [generator.calls[0]["rid"]]


async def test_an_abort_at_the_engine_gives_the_partial_turn() -> None:
    generator = HostileGenerator("hang")
    async with pool_over(generator) as pool, asyncio.TaskGroup() as group:
        task = group.create_task(generate(pool))
        while not generator.hanging:
            await asyncio.sleep(0.01)
        generator.abort_all()
        generation = await task
    assert generation.finish is FinishReason.ABORT
    assert generation.token_ids == [7, 3]


async def test_case_076_a_cancelled_call_is_aborted_and_only_that() -> None:
    generator = HostileGenerator("hang", "hang")
    async with pool_over(generator) as pool:
        leaving, staying = asyncio.create_task(generate(pool)), asyncio.create_task(generate(pool))
        while len(generator.calls) < 2:
            await asyncio.sleep(0.01)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        (rid,) = generator.aborts
        assert rid in {call["rid"] for call in generator.calls}
        assert not staying.done()
        assert pool.status()[0]["running"] == 1
        staying.cancel()
        await asyncio.gather(staying, return_exceptions=True)


async def test_aborts_go_to_the_workers_behind_a_router() -> None:
    router, first, second = HostileGenerator("hang"), HostileGenerator(), HostileGenerator()
    async with serving(first) as one, serving(second) as two, pool_over(router, control_urls=[one, two]) as pool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await generate(pool)
        assert first.aborts == second.aborts == [router.calls[0]["rid"]]
        assert router.aborts == []


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        pytest.param([1, 100, 2], "token id 100 at position 1", id="outside-the-vocabulary"),
        pytest.param(array("i", [1, 2, -5]), "token id -5 at position 2", id="negative"),
        pytest.param([1, 2**40], "int32", id="no-int32"),
        pytest.param([], "no token ids", id="empty"),
    ],
)
async def test_ids_that_would_kill_an_engine_are_never_sent(ids: "list[int] | array[int]", message: str) -> None:
    generator = HostileGenerator()
    async with pool_over(generator) as pool:
        with pytest.raises(MisalignedTokensError, match=message):
            await generate(pool, ids=ids)
    assert generator.calls == []


async def test_a_generators_limit_holds_and_the_rest_waits() -> None:
    generator = HostileGenerator()
    generator.delay_s = 0.02
    async with pool_over(generator, max_concurrency=3) as pool:
        await asyncio.gather(*(generate(pool, rollout_id=f"r{number}") for number in range(20)))
    assert generator.most_running == 3
    assert len(generator.calls) == 20


async def test_a_waiter_that_leaves_passes_its_place_on() -> None:
    generator = HostileGenerator("hang")
    async with pool_over(generator, max_concurrency=1) as pool:
        holding = asyncio.create_task(generate(pool))
        waiting = [asyncio.create_task(generate(pool)) for _ in range(3)]
        while not generator.calls:
            await asyncio.sleep(0.01)
        waiting[0].cancel()
        holding.cancel()
        async with asyncio.timeout(3):
            await asyncio.gather(*waiting[1:])
        await asyncio.gather(holding, waiting[0], return_exceptions=True)


async def test_a_rollout_stays_with_its_generator_and_many_spread() -> None:
    generators = [HostileGenerator() for _ in range(3)]
    async with pool_over(*generators) as pool:
        homes = [{(await generate(pool, rollout_id=f"r{number}")).generator for _ in range(4)} for number in range(12)]
    assert all(len(home) == 1 for home in homes)
    assert all(generator.calls for generator in generators)


async def test_a_full_home_spills() -> None:
    generators = [HostileGenerator(), HostileGenerator()]
    for generator in generators:
        generator.delay_s = 0.1
    async with pool_over(*generators, max_concurrency=2) as pool:
        await asyncio.gather(*(generate(pool) for _ in range(4)))
    assert [len(generator.calls) for generator in generators] == [2, 2]


async def test_a_failing_generator_is_left_alone_until_it_is_ready() -> None:
    sick, well = HostileGenerator(*["500"] * 100), HostileGenerator()
    sick.ready = False
    async with pool_over(sick, well) as pool:
        for number in range(20):
            await generate(pool, rollout_id=f"r{number}")
        assert len(sick.calls) == FAILURES_TO_OPEN
        assert [entry["well"] for entry in pool.status()] == [False, True]
        sick.moods.clear()
        sick.ready = True
        async with asyncio.timeout(10):
            while not pool.status()[0]["well"]:
                await asyncio.sleep(0.05)
                await asyncio.gather(*(generate(pool, rollout_id=f"r{number}") for number in range(8)))
        assert sick.probes > 0


async def test_a_full_generator_is_not_taken_for_ill() -> None:
    full = HostileGenerator(*["503"] * 4)
    async with pool_over(full) as pool:
        await generate(pool)
        assert pool.status()[0]["well"]
    assert full.probes == 0


async def test_when_nothing_answers_the_error_says_who_and_may_be_retried() -> None:
    generator = HostileGenerator(*["500"] * 1000)
    generator.ready = False
    async with pool_over(generator) as pool:
        while pool.status()[0]["well"]:
            with pytest.raises(GeneratorError, match="HTTP 500"):
                await generate(pool, retry_s=0.2)
        with pytest.raises(GeneratorError, match=r"no generator was well for 0\.2 s.*HTTP 500") as caught:
            await generate(pool, retry_s=0.2)
    assert caught.value.retryable


async def test_a_down_generator_is_a_connection_failure() -> None:
    async with GeneratorPool([GeneratorSpec(url="http://127.0.0.1:9")], vocab_size=100, stop_token_ids=(3,)) as pool:
        with pytest.raises(GeneratorError, match=r"127\.0\.0\.1:9") as caught:
            await generate(pool, retry_s=0.3)
    assert caught.value.retryable


async def test_a_key_with_a_line_break_is_named() -> None:
    async with pool_over(HostileGenerator(), api_key="secret\nkey") as pool:
        with pytest.raises(GeneratorError, match="cannot be written") as caught:
            await generate(pool)
    assert not caught.value.retryable
    assert "secret" not in str(caught.value)


async def test_generators_change_while_calls_run() -> None:
    old, new = HostileGenerator(), HostileGenerator()
    old.delay_s = 0.2
    async with serving(new) as new_url, pool_over(old, max_concurrency=1) as pool:
        running, waiting = asyncio.create_task(generate(pool)), asyncio.create_task(generate(pool))
        while not old.calls:
            await asyncio.sleep(0.01)
        pool.update([GeneratorSpec(url=new_url)])
        assert (await waiting).generator == new_url
        assert (await running).generator != new_url
        assert [entry["url"] for entry in pool.status()] == [new_url]


async def begun(pool: GeneratorPool, *generators: HostileGenerator) -> "tuple[asyncio.Task[Generation], HostileGenerator, str]":
    """A call that hangs, on which generator, and its URL."""
    task = asyncio.create_task(generate(pool))
    while not (home := next((generator for generator in generators if generator.hanging), None)):
        await asyncio.sleep(0.01)
    for generator in generators:
        generator.moods.clear()
    return task, home, next(status["url"] for status in pool.status() if status["running"])


def weights(url: str, standing: Standing, **fields: Any) -> JobWeights:
    return JobWeights(generators={url: GeneratorWeights(standing=standing, label="0.6", **fields)}, current="0.7")


async def test_a_call_on_a_quarantined_generator_comes_back_with_what_it_sampled() -> None:
    generators = HostileGenerator("hang"), HostileGenerator("hang")
    async with pool_over(*generators) as pool:
        task, home, url = await begun(pool, *generators)
        pool.take(weights(url, Standing.QUARANTINED))
        generation = await task
        assert (generation.finish, generation.token_ids, generation.generator) == (FinishReason.ABORT, [7, 3], url)
        assert home.aborts == [home.calls[0]["rid"]]
        assert all([(await generate(pool)).generator != url for _ in range(5)])
        pool.take(weights(url, Standing.SERVING))
        assert {(await generate(pool, rollout_id=f"r{number}")).generator for number in range(20)} >= {url}


async def test_a_call_on_weights_that_nobody_vouches_for_is_made_again_elsewhere() -> None:
    generators = HostileGenerator("hang"), HostileGenerator("hang")
    async with pool_over(*generators) as pool:
        task, home, url = await begun(pool, *generators)
        pool.take(weights(url, Standing.QUARANTINED, moved=True))
        generation = await task
        other = next(generator for generator in generators if generator is not home)
        assert generation.generator != url
        assert generation.finish is FinishReason.STOP
        assert other.calls[0]["input_ids"] == home.calls[0]["input_ids"]
        assert home.calls[0]["rid"] in home.aborts
        assert all(status["well"] for status in pool.status())


async def test_a_held_generator_gets_nothing_new_and_keeps_what_it_has() -> None:
    generator = HostileGenerator("hang")
    async with pool_over(generator) as pool:
        task, _, url = await begun(pool, generator)
        pool.take(weights(url, Standing.HELD, paused=True, paused_at=time.time()))
        late = asyncio.create_task(generate(pool))
        await asyncio.sleep(0.2)
        assert len(generator.calls) == 1
        assert not generator.aborts
        pool.take(weights(url, Standing.SERVING, paused_s=3600.0))
        assert (await late).token_ids == [7, 3]
        generator.abort_all()
        assert (await task).seconds == 0.0  # what it stood still is not the call's


async def test_an_engine_without_spans_gets_the_oldest_version_it_can_have_had() -> None:
    """Its own, where the job is ahead of it."""
    generator = HostileGenerator("no spans")
    async with pool_over(generator) as pool:
        url = pool.status()[0]["url"]
        pool.take(JobWeights(generators={url: GeneratorWeights(label="0.4")}, current="0.6"))
        generation = await generate(pool, version=6)
    assert [(span.version, span.start, span.end) for span in generation.spans] == [(4, 0, 2)]


async def versions_of_a_call(generator: HostileGenerator, *, before: str | None, after: str) -> list[int]:
    """Of a call for version 6 in whose middle the weights moved. before, after: the job's label then."""

    def labelled(current: str | None) -> JobWeights:
        return JobWeights(generators={url: GeneratorWeights(label=current)}, current=current)

    async with pool_over(generator) as pool:
        url = pool.status()[0]["url"]
        pool.take(labelled(before))
        task, _, _ = await begun(pool, generator)
        pool.take(labelled(after))
        generator.abort_all()
        generation = await task
        assert generation.finish is FinishReason.ABORT
        assert len(generator.calls) == 1
        assert pool.status()[0]["well"]
    return [span.version for span in generation.spans]


async def test_an_engine_without_spans_may_have_begun_on_the_weights_that_it_had_then() -> None:
    """Its label was 0.4 when the call began and is 0.6 now: the first token may be 4's, although the job was at 6 already."""
    generator = HostileGenerator("hang")
    generator.meta = {"weight_versions": None}
    assert await versions_of_a_call(generator, before="0.4", after="0.6") == [4]


async def test_the_first_update_of_a_job_costs_no_call_that_ran_before_it() -> None:
    """Until then its generators are called "default", which is the version that the job had as the call began."""
    generator = HostileGenerator("hang")
    generator.meta = {"weight_versions": [{"version": "default", "start": 0, "end": 1}, {"version": "0.7", "start": 1, "end": 2}]}
    assert await versions_of_a_call(generator, before=None, after="0.7") == [6, 7]
