"""The books of sampled tokens: one row per fate, and what a scrape shows of them. Any order of them is test_gate_model.py's."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from service.jobs import JobCounts
from service.journal import Restored
from service.keys import JobKeys
from service.ledger import Entry
from service.metrics import JobGauges, job_series
from service.store import open_store
from tests.store_stack import Stack, ended, fast_settings

pytestmark = pytest.mark.redis


@pytest.fixture
async def stack(fast_valkey_url: str) -> AsyncIterator[Stack]:
    async with open_store(fast_settings(fast_valkey_url)) as store:
        await store.redis.flushall()
        yield Stack(store, max_attempts=2)


async def failed_attempt(stack: Stack) -> None:
    [first, second] = await stack.take()
    await stack.sample(first, 5, at_index=0)
    await stack.leases.restart(first, "sandbox: lost", retry=True)
    await stack.finish_all([await stack.one(), second], tokens=3)


async def failed_before_its_first_token(stack: Stack) -> None:
    await stack.leases.restart((await stack.take())[0], "sandbox: lost", retry=True)


async def failed_group(stack: Stack) -> None:
    leases = await stack.take()
    for lease in leases:
        await stack.sample(lease, 5, at_index=0)
    await stack.leases.restart(leases[0], "task: setup exited 1", retry=False)


async def cancelled_group(stack: Stack) -> None:
    first, second = await stack.take()
    await stack.sample(first, 2, at_index=0)
    await stack.finish_all([second], tokens=9)
    await stack.groups.cancel(first.group_id)


async def same_rewards(stack: Stack) -> None:
    await stack.finish_all(await stack.take(), tokens=8, reward=1.0)


async def too_old(stack: Stack) -> None:
    """Run again once, then dropped."""
    for version in (0, 1):
        await stack.finish_all(await stack.take(), tokens=4, version=version)
        await stack.bump(version + 1)
        await stack.lease(1)


async def of_a_dead_lineage(stack: Stack) -> None:
    await stack.finish_all(await stack.take(), tokens=4)
    await stack.bump(0, rollback=True)
    await stack.lease(1)


async def cut_back(stack: Stack) -> None:
    """A turn of 7 sampled anew as 6, of which a lost sandbox costs the last 2."""
    first, second = await stack.take()
    await stack.sample(first, 7, at_index=0, discarded=True)
    await stack.sample(first, 4, at_index=1)
    await stack.sample(first, 2, at_index=2)
    await stack.leases.append(first, [Restored(at=1.0, id="s", boot_id="", cut_to=1, seconds=0.0)], at_index=3)
    await stack.leases.finish(first, ended(tokens=4, discarded_tokens=9, cut_back_tokens=2))
    await stack.finish_all([second], tokens=0)
    await stack.batches.ack((await stack.batch(1)).batch_id)


async def unexportable(stack: Stack) -> None:
    await stack.finish_all(await stack.take(), tokens=3)
    batch = await stack.batch(1)
    await stack.batches.spoil(batch, batch.groups[0].group_id, "journal: damaged")


async def acked(stack: Stack) -> None:
    first, second = await stack.take()
    await stack.sample(first, 1000, at_index=0)
    await stack.finish_all([first], tokens=1000)
    await stack.finish_all([second], tokens=1)
    await stack.batches.ack((await stack.batch(1)).batch_id)


@pytest.mark.parametrize(
    ("play", "kept", "discarded", "standing"),
    [
        pytest.param(acked, Entry(2, 1001, {1: 1, 1024: 1}), {}, 0, id="acked"),
        pytest.param(failed_attempt, Entry(), {"failed:sandbox": Entry(1, 5, {8: 1})}, 6, id="failed-attempt"),
        pytest.param(failed_before_its_first_token, Entry(), {}, 0, id="failed-before-its-first-token"),
        pytest.param(
            failed_group, Entry(), {"failed:task": Entry(1, 5, {8: 1}), "sibling_failed": Entry(1, 5, {8: 1})}, 0, id="failed-group"
        ),
        pytest.param(cancelled_group, Entry(), {"cancelled": Entry(2, 11, {2: 1, 16: 1})}, 0, id="cancelled-ended-and-not"),
        pytest.param(same_rewards, Entry(), {"zero_variance": Entry(2, 16, {8: 2})}, 0, id="zero-variance"),
        pytest.param(too_old, Entry(), {"requeued": Entry(2, 8, {4: 2}), "stale": Entry(2, 8, {4: 2})}, 0, id="requeued-then-stale"),
        pytest.param(of_a_dead_lineage, Entry(), {"rolled_back": Entry(2, 8, {4: 2})}, 0, id="rolled-back"),
        pytest.param(
            cut_back,
            Entry(2, 4, {0: 1, 4: 1}),
            {"cut_back": Entry(1, 2, {2: 1}), "sampled_anew": Entry(1, 7, {8: 1})},
            0,
            id="given-up-within-an-attempt",
        ),
        pytest.param(unexportable, Entry(), {"failed:journal": Entry(2, 6, {4: 2})}, 0, id="unexportable"),
    ],
)
async def test_fates(
    stack: Stack, play: Callable[[Stack], Awaitable[None]], kept: Entry, discarded: dict[str, Entry], standing: int
) -> None:
    await stack.open_job(staleness_budget=0, max_requeues=1, zero_variance="drop" if play is same_rewards else "keep")
    await stack.submit(1)
    await play(stack)
    counts = await stack.jobs.counts(stack.job_id)
    assert (counts.ledger.kept, counts.ledger.discarded) == (kept, discarded)
    assert counts.tokens_standing == standing
    closes(counts)


def closes(counts: JobCounts) -> None:
    tokens = (counts.ledger.kept.tokens, sum(entry.tokens for entry in counts.ledger.discarded.values()))
    assert tokens == (counts.tokens_delivered, counts.tokens_discarded)
    assert counts.tokens_generated == sum(tokens) + counts.tokens_standing


async def test_an_append_whose_reply_was_lost_counts_once(stack: Stack) -> None:
    await stack.open_job(group_size=1)
    await stack.submit(1)
    lease = await stack.one()
    for _ in range(2):
        await stack.sample(lease, 6, at_index=0)
    assert (await stack.jobs.counts(stack.job_id)).tokens_standing == 6


async def test_a_lease_that_runs_out_keeps_what_was_sampled(stack: Stack) -> None:
    """The attempt goes on elsewhere; what nobody ends still stands."""
    await stack.open_job(group_size=1)
    await stack.submit(1)
    lease = await stack.one()
    await stack.sample(lease, 6, at_index=0)
    await stack.store.redis.zadd(JobKeys(stack.job_id).leases, {lease.rollout_id: 1.0})
    again = await stack.one()
    assert again.resumed
    await stack.sample(again, 2, at_index=1)
    assert (await stack.jobs.counts(stack.job_id)).tokens_standing == 8
    await stack.leases.restart(again, "worker_lost: gone", retry=True)
    assert (await stack.jobs.counts(stack.job_id)).ledger.discarded == {"failed:worker_lost": Entry(1, 8, {8: 1})}


async def test_a_scrape_shows_the_books(stack: Stack) -> None:
    await stack.open_job()
    await stack.submit(1)
    await failed_attempt(stack)
    await stack.batches.ack((await stack.batch(1)).batch_id)
    registry = CollectorRegistry()
    registry.register(JobGauges(await job_series(stack.jobs)))
    lines = generate_latest(registry).decode().splitlines()
    assert {
        'rollway_job_tokens_generated{job="job",tenant="red"} 11.0',
        'rollway_job_discarded_tokens{job="job",reason="failed:sandbox",tenant="red"} 5.0',
        'rollway_job_rollout_tokens_bucket{fate="kept",job="job",le="2.0",tenant="red"} 0.0',
        'rollway_job_rollout_tokens_bucket{fate="kept",job="job",le="4.0",tenant="red"} 2.0',
        'rollway_job_rollout_tokens_sum{fate="discarded",job="job",tenant="red"} 5.0',
    } <= set(lines)
