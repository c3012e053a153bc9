"""The rules of starting: rate, retries, places and what is counted. No backend, and nothing waits for long."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.base import (
    SandboxContentError,
    SandboxError,
    SandboxFencedError,
    SandboxLostError,
    SandboxSpecError,
    SandboxStartError,
)
from sandboxes.starting import RETRIES, Budget, StartLimits, TokenBucket, retry_pause_s


async def nothing() -> None:
    """No image to pull."""


@dataclass
class Tries:
    """Fails with each of `errors` in turn, then succeeds. Notes how many were at it at once."""

    errors: list[Exception] = field(default_factory=list)
    steps: int = 1
    now: int = 0
    most: int = 0
    made: int = 0

    async def __call__(self, _: object, budget: Budget) -> str:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for _ in range(self.steps):
                await asyncio.sleep(0)
            if self.errors:
                raise self.errors.pop(0)
            self.made += 1
            return "made"
        finally:
            self.now -= 1


async def begun(limits: StartLimits, make: Callable[[None, Budget], Awaitable[str]], *, within_s: float = 60.0) -> str:
    return await limits.start("box", within_s=within_s, prepare=nothing, make=make)


# ------------------------------------------------------------------------------------------------------------------- the rate


@given(
    per_s=st.floats(0.1, 1000),
    burst=st.integers(1, 50),
    gaps=st.lists(st.floats(0, 10), min_size=1, max_size=80),
)
def test_in_any_span_no_more_than_burst_and_rate(per_s: float, burst: int, gaps: list[float]) -> None:
    bucket, now, used = TokenBucket(per_s=per_s, burst=burst), 0.0, []
    for gap in gaps:
        now += gap
        used.append(now + bucket.take(now))
    assert used == sorted(used)
    for first in range(len(used)):
        for last in range(first, len(used)):
            assert last - first + 1 <= burst + per_s * (used[last] - used[first]) + 1e-6 * len(used) + 1e-9 * per_s * now


@given(per_s=st.floats(0.1, 1000), burst=st.integers(1, 50))
def test_a_full_bucket_makes_nobody_wait(per_s: float, burst: int) -> None:
    bucket = TokenBucket(per_s=per_s, burst=burst)
    assert all(bucket.take(5.0) == 0.0 for _ in range(burst))
    assert bucket.take(5.0) > 0.0


@pytest.mark.parametrize(("per_s", "burst"), [(0, 1), (-1, 1), (1, 0)])
def test_a_rate_that_starts_nothing_is_refused(per_s: float, burst: int) -> None:
    with pytest.raises(ValueError, match="would start nothing"):
        TokenBucket(per_s=per_s, burst=burst)


# ---------------------------------------------------------------------------------------------------------------- the retries


@given(tries=st.integers(1, 10), left_s=st.floats(0, 100), jitter=st.floats(0, 1, exclude_max=True))
def test_a_retry_is_in_the_budget_and_few(tries: int, left_s: float, jitter: float) -> None:
    pause_s = retry_pause_s(SandboxStartError("busy"), tries=tries, left_s=left_s, jitter=jitter)
    assert pause_s is None or (0 < pause_s < left_s and tries <= RETRIES)


@pytest.mark.parametrize("error", [SandboxSpecError("s"), SandboxFencedError("f"), SandboxContentError("c")])
def test_what_cannot_pass_is_not_tried_again(error: SandboxError) -> None:
    assert retry_pause_s(error, tries=1, left_s=100, jitter=0) is None


async def test_passing_failures_are_tried_again_and_counted() -> None:
    limits, tries = StartLimits(retry_pause_s=0.001), Tries(errors=[SandboxStartError("busy"), SandboxLostError("died")])
    assert await begun(limits, tries) == "made"
    assert (limits.counts.started, limits.counts.retried, limits.counts.failed_engine, limits.counts.starting) == (1, 2, 0, 0)


@pytest.mark.parametrize(
    ("raised", "told", "counted"),
    [
        pytest.param([SandboxSpecError("x")], SandboxSpecError, "failed_spec", id="spec"),
        pytest.param([SandboxContentError("no such user")], SandboxSpecError, "failed_spec", id="content-is-the-specs"),
        pytest.param([SandboxFencedError("x")], SandboxFencedError, "failed_engine", id="fenced"),
        pytest.param([SandboxStartError("x")] * 3, SandboxStartError, "failed_engine", id="engine"),
        pytest.param([SandboxError("x")] * 3, SandboxStartError, "failed_engine", id="any-error-is-a-failed-start"),
    ],
)
async def test_a_failure_is_told_and_counted_once(raised: list[Exception], told: type[SandboxError], counted: str) -> None:
    limits, tries = StartLimits(retry_pause_s=0.001), Tries(errors=list(raised))
    with pytest.raises(told):
        await begun(limits, tries)
    ends = {
        name: getattr(limits.counts, name) for name in ("started", "failed_spec", "failed_engine", "over_budget", "over_wait", "cancelled")
    }
    assert ends == {**dict.fromkeys(ends, 0), counted: 1}
    assert (limits.counts.starting, limits.counts.waiting, tries.errors) == (0, 0, [])


async def test_a_pull_holds_no_place_and_is_not_tried_again() -> None:
    limits, pulls = StartLimits(max_starting=1), 0

    async def pull() -> None:
        nonlocal pulls
        pulls += 1
        assert limits.counts.starting == 0
        raise SandboxStartError("429")

    with pytest.raises(SandboxStartError, match="429"):
        await limits.start("box", within_s=60, prepare=pull, make=Tries())
    assert (pulls, limits.counts.failed_engine, limits.counts.retried) == (1, 1, 0)


class Registry:
    """Pulls one image once for whoever waits, as a backend does: busy `refusals` times, then `answers`."""

    def __init__(self, *, refusals: int, pull: asyncio.Event) -> None:
        self.refusals = refusals
        self.pulls = 0
        self._pull = pull
        self._pulling: asyncio.Task[None] | None = None

    async def ensure(self) -> None:
        if self._pulling is None:
            self._pulling = asyncio.create_task(self._pulled())
        await asyncio.shield(self._pulling)

    async def _pulled(self) -> None:
        for _ in range(3):
            self.pulls += 1
            if self.pulls > self.refusals:
                await self._pull.wait()
                return
        raise SandboxStartError("429 toomanyrequests")


async def test_case_040_two_hundred_starts_on_a_new_image() -> None:
    limits, pull, tries = StartLimits(max_starting=4, starts_per_s=1e6, burst=500), asyncio.Event(), Tries()
    registry = Registry(refusals=2, pull=pull)
    group = [asyncio.create_task(limits.start(f"g{n}", within_s=60, prepare=registry.ensure, make=tries)) for n in range(200)]
    await asyncio.sleep(0.01)
    assert await begun(limits, Tries()) == "made", "other images are not delayed"
    assert limits.counts.starting == 0
    pull.set()
    assert await asyncio.gather(*group) == ["made"] * 200
    assert (registry.pulls, limits.counts.started, tries.most) == (3, 201, 4)


async def test_case_040_a_registry_that_stays_down_is_infrastructure() -> None:
    limits, registry = StartLimits(), Registry(refusals=9, pull=asyncio.Event())
    group = (limits.start(f"g{n}", within_s=60, prepare=registry.ensure, make=Tries()) for n in range(20))
    ends = await asyncio.gather(*group, return_exceptions=True)
    assert {type(end) for end in ends} == {SandboxStartError}
    assert (registry.pulls, limits.counts.failed_engine, limits.counts.failed_spec) == (3, 20, 0)


async def test_a_start_that_hangs_ends_with_its_budget() -> None:
    async def hang(_: None, budget: Budget) -> str:
        await asyncio.Event().wait()
        return "never"

    limits = StartLimits()
    with pytest.raises(SandboxStartError, match=r"within 0\.01 s"):
        await begun(limits, hang, within_s=0.01)
    assert (limits.counts.over_budget, limits.counts.starting) == (1, 0)


# ----------------------------------------------------------------------------------------------------------------- the places


async def test_two_hundred_starts_never_exceed_the_cap() -> None:
    limits, tries = StartLimits(max_starting=3, starts_per_s=1e6, burst=500), Tries(steps=3)
    await asyncio.gather(*(begun(limits, tries) for _ in range(200)))
    assert (tries.most, limits.counts.started, limits.counts.starting, limits.counts.waiting) == (3, 200, 0, 0)


async def test_the_queue_is_not_taken_from_the_budget() -> None:
    limits, release = StartLimits(max_starting=1), asyncio.Event()

    async def slow(_: None, budget: Budget) -> str:
        await release.wait()
        return "slow"

    first = asyncio.create_task(begun(limits, slow))
    await asyncio.sleep(0)
    second = asyncio.create_task(begun(limits, Tries(), within_s=0.02))
    await asyncio.sleep(0.05)
    assert limits.counts.waiting == 1
    release.set()
    assert (await first, await second) == ("slow", "made")
    assert limits.counts.waited_s > 0.02


async def test_a_start_without_a_place_fails_in_the_end_with_the_cure() -> None:
    limits = StartLimits(max_starting=1, max_wait_s=0.01)
    async with limits.removal():
        with pytest.raises(SandboxStartError, match="ROLLWAY_MAX_STARTING"):
            await begun(limits, Tries())
    assert (limits.counts.over_wait, limits.counts.waiting, limits.counts.starting) == (1, 0, 0)


async def test_a_start_goes_before_a_removal_that_waited_longer() -> None:
    limits, order = StartLimits(max_starting=1), []

    async def removal() -> None:
        async with limits.removal():
            order.append("removal")

    async def start(_: None, budget: Budget) -> str:
        order.append("start")
        return "made"

    async with limits.removal():
        waiting = [asyncio.create_task(removal())]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(begun(limits, start)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert order == ["start", "removal"]


@given(
    places=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["start", "removal", "cancel", "turn"]), st.integers(0, 30)), max_size=60),
)
def test_whatever_is_cancelled_no_place_is_lost_or_taken_twice(places: int, steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        limits, tries = StartLimits(max_starting=places, starts_per_s=1e6, burst=1000), Tries(steps=2)
        tasks: list[asyncio.Task[object]] = []

        async def removal() -> None:
            async with limits.removal():
                await tries(None, Budget(1))

        for what, which in steps:
            if what == "turn":
                await asyncio.sleep(0)
            elif what == "cancel" and tasks:
                tasks[which % len(tasks)].cancel()
            elif what == "removal":
                tasks.append(asyncio.create_task(removal()))
            elif what == "start":
                tasks.append(asyncio.create_task(begun(limits, tries)))
            assert limits.counts.starting <= places
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert tries.most <= places
        assert (limits.counts.starting, limits.counts.waiting) == (0, 0)
        assert all(task.done() for task in tasks)

    asyncio.run(run())
