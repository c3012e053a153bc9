"""The pool: on a stand-in that dies and refuses on request, and on a real engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.base import Sandbox, SandboxError, SandboxSpec, SandboxSpecError, SandboxStartError
from sandboxes.pool import SandboxPool
from sandboxes.poolable import bare, kind
from sandboxes.starting import RETRIES, StartLimits
from tests.standin_sandboxes import StandinBackend

SPEC = SandboxSpec(image="one:1", start_s=10.0)
OTHER = replace(SPEC, image="two:1")


def pool_over(backend: StandinBackend, *, size: int = 4, idle_s: float = 300.0, max_age_s: float = 1800.0) -> SandboxPool:
    return SandboxPool(backend, deployment_id="d", worker="w", size=size, idle_s=idle_s, max_age_s=max_age_s)  # type: ignore[arg-type]


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def backend() -> StandinBackend:
    return StandinBackend()


@pytest_asyncio.fixture
async def pool(backend: StandinBackend) -> AsyncIterator[SandboxPool]:
    async with pool_over(backend) as made:
        yield made
    assert backend.closed
    assert not [name for name in backend.names if name.startswith(made.prefix)]


async def warmed(pool: SandboxPool, spec: SandboxSpec = SPEC, *, name: str = "first") -> Sandbox:
    """One cold start, and one warm sandbox after it."""
    sandbox = await pool.create(spec, name=name)
    await until(lambda: pool.counts.warm > 0)
    return sandbox


# ------------------------------------------------------------------------------------------------------------------ claiming


async def test_the_second_of_a_kind_is_claimed(pool: SandboxPool, backend: StandinBackend) -> None:
    await warmed(pool)
    claimed = await pool.create(replace(SPEC, files={"/a": b"a"}, setup=("true",), env={"A": "a"}, labels={"rollout": "r"}), name="second")
    assert (pool.counts.cold, pool.counts.claimed) == (1, 1)
    box = backend.boxes[claimed.id]
    assert box.name == "second"
    assert box.history[0].startswith(pool.prefix)
    assert pool.prefix.startswith("rw-d-pool-w-")


@pytest.mark.parametrize(
    "change", [{"image": "x"}, {"network": "open"}, {"memory_mib": 64}, {"user": "nobody"}, {"read_only": True}, {"workdir": "/x"}]
)
async def test_another_kind_starts_cold(pool: SandboxPool, change: dict[str, object]) -> None:
    await warmed(pool)
    await pool.create(replace(SPEC, **change), name="second")  # type: ignore[arg-type]
    assert (pool.counts.cold, pool.counts.claimed) == (2, 0)


def test_a_bare_spec_is_of_the_same_kind_and_outlives_its_wait() -> None:
    spec = replace(SPEC, files={"/a": b"a"}, setup=("true",), env={"A": "a"}, labels={"rollout": "r"}, lifetime_s=100.0)
    made = bare(spec, worker="w", max_age_s=50.0)
    assert kind(replace(made, lifetime_s=100.0)) == kind(spec)
    assert (made.files, made.setup, made.env, made.labels, made.lifetime_s) == ({}, (), {}, {"pool": "w"}, 150.0)


async def test_a_dead_one_is_removed_and_the_claim_goes_on(pool: SandboxPool, backend: StandinBackend) -> None:
    await warmed(pool)
    dead = next(box for box in backend.boxes.values() if box.name.startswith(pool.prefix))
    dead.alive = False
    claimed = await pool.create(SPEC, name="second")
    assert claimed.id != dead.id
    assert pool.counts.dead_at_claim == 1
    await until(lambda: dead.id not in backend.boxes)


async def test_a_failed_setup_is_the_specs_and_leaves_nothing(pool: SandboxPool, backend: StandinBackend) -> None:
    await warmed(pool)
    with pytest.raises(SandboxSpecError, match="exit code 1"):
        await pool.create(replace(SPEC, setup=("exit 1",)), name="second")
    assert "second" not in backend.names
    assert (pool.counts.claimed, pool.counts.cold) == (0, 1)


async def test_a_broken_claim_starts_cold_once(pool: SandboxPool, backend: StandinBackend) -> None:
    await warmed(pool)
    backend.broken.append(SandboxError("the engine hiccuped"))
    sandbox = await pool.create(SPEC, name="second")
    assert backend.boxes[sandbox.id].history == ["second"]
    assert (pool.counts.broken_at_claim, pool.counts.cold, pool.counts.claimed) == (1, 2, 0)


async def test_a_claim_that_hangs_ends_with_its_budget_and_leaves_nothing(pool: SandboxPool, backend: StandinBackend) -> None:
    await warmed(pool)
    backend.held = asyncio.Event()
    with pytest.raises(SandboxStartError, match=r"within 0\.05 s of its claim"):
        await pool.create(replace(SPEC, start_s=0.05), name="second")
    assert "second" not in backend.names


async def test_a_cancelled_claim_leaves_nothing(pool: SandboxPool, backend: StandinBackend) -> None:
    await warmed(pool)
    backend.held = asyncio.Event()
    claim = asyncio.create_task(pool.create(SPEC, name="second"))
    await until(lambda: "second" in backend.names)
    claim.cancel()
    await asyncio.wait({claim})
    assert claim.cancelled()
    assert "second" not in backend.names


# ------------------------------------------------------------------------------------------------------------------ refilling


async def test_what_is_warm_follows_use_and_never_passes_the_size(pool: SandboxPool) -> None:
    warm = []
    for round_ in range(4):
        await asyncio.gather(*(pool.create(SPEC, name=f"{round_}-{number}") for number in range(6)))
        await asyncio.sleep(0.15)
        warm.append(pool.counts.warm)
    assert warm == sorted(warm)
    assert (warm[0], warm[-1]) == (1, 4)


async def test_idle_kinds_keep_none(backend: StandinBackend) -> None:
    async with pool_over(backend, idle_s=0.3) as pool:
        sandbox = await warmed(pool)
        await until(lambda: pool.counts.warm == 0 and list(backend.boxes) == [sandbox.id])


async def test_the_old_are_replaced(backend: StandinBackend) -> None:
    async with pool_over(backend, max_age_s=0.01) as pool:
        await warmed(pool)
        await until(lambda: pool.counts.refilled >= 2 and pool.counts.removed >= 1)


async def test_what_is_being_removed_still_has_its_place(backend: StandinBackend) -> None:
    async with pool_over(backend, size=1, max_age_s=0.01) as pool:
        await warmed(pool)
        backend.removals_held = asyncio.Event()
        await until(lambda: pool.counts.warm == 0)
        await asyncio.sleep(0.2)
        assert len([name for name in backend.names if name.startswith(pool.prefix)]) == 1
        backend.removals_held.set()
        await until(lambda: pool.counts.refilled >= 2)


async def test_a_removal_that_found_no_place_is_made_when_the_pool_closes() -> None:
    backend = StandinBackend(limits=StartLimits(max_starting=1, starts_per_s=1e6, burst=100))
    pool = pool_over(backend, max_age_s=0.01)
    owned = await warmed(pool)
    async with backend.limits.removal():
        await until(lambda: pool.counts.warm == 0)
        closing = asyncio.create_task(pool.aclose())
        await asyncio.sleep(0.02)
    await closing
    assert list(backend.boxes) == [owned.id]


async def test_a_refill_waits_behind_every_cold_start() -> None:
    backend = StandinBackend(limits=StartLimits(max_starting=1, starts_per_s=1e6, burst=100))
    async with pool_over(backend) as pool:
        await asyncio.gather(*(pool.create(SPEC, name=f"cold-{number}") for number in range(20)))
        assert pool.counts.refilled <= 1
        assert pool.counts.cold + pool.counts.claimed == 20


@pytest.mark.parametrize(
    "refusals",
    [
        pytest.param([SandboxStartError("busy")] * (RETRIES + 1), id="engine"),
        pytest.param([SandboxSpecError("the image is gone")], id="spec"),
    ],
)
async def test_a_refill_that_fails_is_told_to_nobody_and_pauses(
    pool: SandboxPool, backend: StandinBackend, refusals: list[SandboxError]
) -> None:
    await pool.create(SPEC, name="first")
    backend.refusals.extend(refusals)
    await until(lambda: pool.counts.refills_failed == 1)
    await asyncio.sleep(0.2)
    assert (pool.counts.refills_failed, pool.counts.warm) == (1, 0)
    await pool.create(SPEC, name="second")
    assert pool.counts.cold == 2


# -------------------------------------------------------------------------------------------------------------- whatever happens


async def test_a_sweep_keeps_what_the_pool_knows_and_takes_what_it_lost(pool: SandboxPool, backend: StandinBackend) -> None:
    owned = await warmed(pool)
    await backend.create(SPEC, name=f"{pool.prefix}lost")
    swept = await pool.sweep(keep=frozenset({"first"}), older_than_s=0, keep_prefixes=(pool.prefix,))
    assert swept == 1
    assert {box.name.startswith(pool.prefix) or box.id == owned.id for box in backend.boxes.values()} == {True}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["create", "create", "other", "bad", "cancel", "hasty", "hasty", "hasty", "kill", "refuse", "break", "turn", "turns"]
        ),
        st.integers(0, 40),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(size=st.integers(0, 4), places=st.integers(1, 3), hesitation=st.integers(0, 3), warm=st.booleans(), operations=OPERATIONS)
def test_nothing_is_given_twice_nothing_is_lost(
    size: int, places: int, hesitation: int, warm: bool, operations: list[tuple[str, int]]
) -> None:
    asyncio.run(interleaved(StandinBackend(hesitation=hesitation), size, places, warm, operations))


async def interleaved(backend: StandinBackend, size: int, places: int, warm: bool, operations: list[tuple[str, int]]) -> None:
    backend.limits = StartLimits(max_starting=places, starts_per_s=1e6, burst=10_000)
    pool = pool_over(backend, size=size)
    tasks: list[asyncio.Task[Sandbox]] = []
    for _ in range(12 if warm and size else 0):  # used often enough to have all that fits
        tasks.append(asyncio.create_task(pool.create(SPEC, name=f"r{len(tasks)}")))
        await asyncio.wait(tasks[-1:])
        for _ in range(40):
            await asyncio.sleep(0)
    specs = {"create": SPEC, "other": OTHER, "bad": replace(SPEC, setup=("exit 1",))}
    for what, which in operations:
        if what in specs:
            tasks.append(asyncio.create_task(pool.create(specs[what], name=f"r{len(tasks)}")))
        elif what == "cancel" and tasks:
            tasks[which % len(tasks)].cancel()
        elif what == "hasty":
            tasks.append(asyncio.create_task(pool.create(SPEC, name=f"r{len(tasks)}")))
            for _ in range(which % 10):
                await asyncio.sleep(0)
            tasks[-1].cancel()
        elif what == "kill" and backend.boxes:
            list(backend.boxes.values())[which % len(backend.boxes)].alive = False
        elif what == "refuse":
            backend.refusals.append(SandboxSpecError("no such image") if which % 2 else SandboxStartError("busy"))
        elif what == "break":
            backend.broken.append(SandboxError("hiccup"))
        for _ in range({"turn": 1, "turns": which}.get(what, 0)):
            await asyncio.sleep(0)
        unclaimed = [box for box in backend.boxes.values() if box.name.startswith(pool.prefix)]
        assert pool.counts.warm <= size
        assert len(unclaimed) <= size + pool.counts.dead_at_claim + len(tasks)
    async with asyncio.timeout(20):
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    given_out = [end for end in ends if not isinstance(end, BaseException)]
    assert len({sandbox.id for sandbox in given_out}) == len(given_out)
    assert all(isinstance(end, SandboxStartError | asyncio.CancelledError) for end in ends if isinstance(end, BaseException))
    names = frozenset(backend.boxes[sandbox.id].name for sandbox in given_out)
    assert all(not name.startswith(pool.prefix) for name in names)
    assert await pool.sweep(keep=names, older_than_s=0) == 0, "the pool has lost track of a sandbox"
    await pool.aclose()
    assert {box.name for box in backend.boxes.values()} == names
    assert (backend.limits.counts.starting, backend.limits.counts.waiting) == (0, 0)
