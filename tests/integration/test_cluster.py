"""A real Redis Cluster of three primaries: jobs on every node, slots that move, a primary that is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from service.batches import NothingReady
from service.errors import StoreRefusedError, UnavailableError
from service.jobs import Jobs
from service.journal import Replied
from service.keys import JOBS, WORKERS
from service.leases import Lease
from service.records import GroupState
from service.settings import Settings
from service.store import Store, open_store
from tests.integration.test_worker import resources_of
from tests.redis_cluster import ClusterServers, Node, running_cluster
from tests.store_stack import Stack, store_at
from workers.worker import Worker

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
async def store(servers: ClusterServers) -> AsyncIterator[Store]:
    servers.flush()
    async with store_at(servers.url) as store:
        yield store


async def stack_at(store: Store, servers: ClusterServers, node: Node, **fields: Any) -> Stack:
    """With a job whose keys are on this node."""
    stack = Stack(store)
    for n in range(1000):
        job_id = await stack.open_job(name=f"job-{n}-{node.server.port}", **fields)
        if servers.owner(job_id) is node:
            return stack
        await stack.jobs.delete(job_id)
    raise AssertionError("no job came to this node")


async def stacks_everywhere(store: Store, servers: ClusterServers, **fields: Any) -> list[Stack]:
    return [await stack_at(store, servers, node, **fields) for node in servers.primaries]


async def play(stack: Stack) -> list[Lease]:
    """Two groups from their submission to the ack."""
    groups = await stack.submit(2)
    leases = await stack.take()
    await asyncio.gather(*(stack.open_journal(lease) for lease in leases))
    await asyncio.gather(*(stack.turn(lease, "hello", at_index=1) for lease in leases))
    assert not (await stack.leases.renew(stack.job_id, leases)).lost
    await stack.finish_all(leases)
    batch = await stack.batch(2)
    await stack.bump(1, ack=[batch.batch_id])
    assert [await stack.state(group) for group in groups] == [GroupState.ACKED] * 2
    assert isinstance(await stack.lease(1), NothingReady)
    return leases


async def test_jobs_live_on_every_node(store: Store, servers: ClusterServers) -> None:
    stacks = await stacks_everywhere(store, servers)
    await asyncio.gather(*(play(stack) for stack in stacks))
    await store.heartbeat("w1", {}, 30)
    assert [entry["worker"] for entry in await store.workers()] == ["w1"]
    ids = {stack.job_id for stack in stacks}
    assert ids == set(await stacks[0].jobs.ids()) == {record.job_id for record in await stacks[0].jobs.list("red")}
    for stack, node in zip(stacks, servers.primaries, strict=True):
        assert {name for name in node.keys("rw:{j*") if name.endswith(":groups")} == {f"rw:{{{stack.job_id}}}:groups"}
    for stack in stacks:
        await stack.jobs.delete(stack.job_id)
    assert await stacks[0].jobs.ids() == []
    left = {name.rpartition(":")[2] for node in servers.primaries for name in node.keys("rw:{j*")}
    assert left == {"job", "synced"}  # tombstones and marks, which go by themselves


async def test_one_write_carries_the_appends_of_all_nodes(store: Store, servers: ClusterServers) -> None:
    """And each node gets the scripts that it has lost."""
    stacks = await stacks_everywhere(store, servers, group_size=40, max_in_flight_rollouts=40)
    leases = []
    for stack in stacks:
        await stack.submit(1)
        leases.append(await stack.take())
    for node in servers.primaries:
        node.client.script_flush()
    await asyncio.gather(*(stack.open_journal(lease) for stack, held in zip(stacks, leases, strict=True) for lease in held))
    for stack, held in zip(stacks, leases, strict=True):
        assert [len(journal) for journal in await stack.leases.raw_journals([lease.rollout_id for lease in held])] == [1] * 40


async def test_a_node_that_stalls_holds_up_its_own_jobs_only(store: Store, servers: ClusterServers) -> None:
    stuck, free = [await stack_at(store, servers, node) for node in servers.primaries[:2]]
    leases = []
    for stack in (stuck, free):
        await stack.submit(1)
        leases.append(await stack.one())
    servers.primaries[0].client.client_pause(60_000, all=False)
    try:
        waiting = asyncio.create_task(stuck.open_journal(leases[0]))
        for n in range(20):
            await free.leases.append(leases[1], [Replied(at=1.0, content="on", calls=[])], at_index=n)
        assert not waiting.done()
    finally:
        servers.primaries[0].client.execute_command("CLIENT", "UNPAUSE")
    await waiting


LUA_READ = "return redis.call('GET', KEYS[1])"


async def lua(store: Store) -> None:
    await store.redis.eval(LUA_READ, 1, "k0")


async def pipeline(store: Store) -> None:
    some = store.redis.pipeline(transaction=False)
    for n in range(5):
        some.eval(LUA_READ, 1, f"k{n}")
    await some.execute()


async def transaction(store: Store) -> None:
    some = store.redis.pipeline(transaction=True)
    some.set("k0", "v0").get("k0")
    await some.execute()


@pytest.mark.parametrize("call", [lua, pipeline, transaction], ids=lambda call: f"case-070-{call.__name__}")
async def test_a_call_that_was_given_up_shifts_no_reply(store: Store, servers: ClusterServers, call: Callable[[Store], Any]) -> None:
    values = [f"v{n}".encode() for n in range(5)]
    for n, value in enumerate(values):
        await store.redis.set(f"k{n}", value)
    for node in servers.primaries:
        node.client.client_pause(60_000, all=False)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await call(store)
    finally:
        for node in servers.primaries:
            node.client.execute_command("CLIENT", "UNPAUSE")
    assert [await store.redis.get(f"k{n}") for n in range(5)] == values


async def test_a_job_follows_its_slot(store: Store, servers: ClusterServers) -> None:
    stack = await stack_at(store, servers, servers.primaries[0])
    await stack.submit(2)
    leases = await stack.take()
    await stack.open_journal(leases[0])
    servers.move(stack.job_id, servers.primaries[1])
    await stack.turn(leases[0], "on another node", at_index=1)
    assert len(await stack.leases.journal(leases[0].rollout_id)) == 2
    await stack.submit(1, prefix="more")
    [other] = await stack.take(1, worker="w2")
    assert int(other.fence) > max(int(lease.fence) for lease in leases)
    await stack.finish_all(leases)
    assert len((await stack.batch(2)).groups) == 2
    assert not servers.primaries[0].keys(f"rw:{{{stack.job_id}}}:*")
    servers.move(stack.job_id, servers.primaries[0])
    assert (await stack.jobs.counts(stack.job_id)).leased == 2


async def test_a_slot_between_two_nodes_makes_its_job_wait(store: Store, servers: ClusterServers) -> None:
    """The keys of a step lie on both nodes then: what cannot wait for the end of the move is refused, and nothing is done by halves."""
    stack = await stack_at(store, servers, servers.primaries[0])
    await stack.submit(1)
    lease = (await stack.take())[0]
    servers.begin_move(stack.job_id, servers.primaries[1])
    for refused in (stack.submit(1, prefix="more"), stack.open_journal(lease)):
        with pytest.raises(UnavailableError, match="TryAgain"):
            await refused
    begun = asyncio.create_task(stack.open_journal(lease))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(servers.end_move, stack.job_id, servers.primaries[1])
    await begun
    assert len(await stack.leases.journal(lease.rollout_id)) == 1
    assert (await stack.jobs.counts(stack.job_id)).backlog == 0
    servers.move(stack.job_id, servers.primaries[0])


async def test_reads_follow_a_key_that_is_already_there(store: Store, servers: ClusterServers) -> None:
    """ASK: one key moves before the others."""
    source, target = servers.primaries[:2]
    stack = await stack_at(store, servers, source)
    await store.redis.set(f"{{{stack.job_id}}}:early", "1")
    servers.begin_move(stack.job_id, target)
    source.client.migrate(target.server.host, target.server.port, [f"{{{stack.job_id}}}:early"], 0, 5000)
    pipeline = store.redis.pipeline(transaction=False)
    pipeline.get(f"{{{stack.job_id}}}:early")
    pipeline.exists(f"rw:{{{stack.job_id}}}:job")
    assert await pipeline.execute() == [b"1", 1]
    servers.end_move(stack.job_id, target)
    assert await store.redis.get(f"{{{stack.job_id}}}:early") == b"1"
    servers.move(stack.job_id, source)


@pytest.mark.parametrize(
    ("option", "value", "fine"),
    [
        pytest.param("maxmemory-policy", "allkeys-lru", "noeviction", id="evicts"),
        pytest.param("appendonly", "no", "yes", id="no-append-only-file"),
    ],
)
async def test_one_node_that_loses_data_refuses_the_cluster(servers: ClusterServers, option: str, value: str, fine: str) -> None:
    node = servers.primaries[1]
    node.client.config_set(option, value)
    try:
        with pytest.raises(StoreRefusedError, match=f"the Redis at 127.0.0.1:{node.server.port} would lose data: set `{option} {fine}`"):
            async with store_at(servers.url):
                pass
        async with open_store(Settings(redis_url=SecretStr(servers.url), allow_lossy_redis=True)) as store:
            await play(await stack_at(store, servers, node))
    finally:
        node.client.config_set(option, fine)
    servers.flush()


async def test_a_lost_primary_is_replaced_by_its_replica(tmp_path: Path) -> None:
    """What was accepted a moment before is there; the jobs of the other nodes go on meanwhile; and every fence is higher than before."""
    with running_cluster(tmp_path, replica=True) as servers:
        assert servers.replica is not None
        async with store_at(servers.url) as store:
            hurt = await stack_at(store, servers, servers.primaries[0], max_in_flight_rollouts=100)
            groups = await hurt.submit(2)
            lease = await hurt.one()
            await hurt.open_journal(lease)
            groups += await hurt.submit(1, prefix="last")
            servers.primaries[0].kill()
            with pytest.raises(UnavailableError):
                await hurt.submit(1, prefix="refused")
            async with asyncio.timeout(60):
                while True:
                    try:
                        await hurt.turn(lease, "after", at_index=1)
                        break
                    except UnavailableError:
                        await asyncio.sleep(0.1)
            assert servers.replica.role == "master"
            assert {record.group_id for record in await hurt.groups.list(hurt.job_id)} == set(groups)
            others = await hurt.take()
            assert len(others) == 5
            assert {int(other.fence) >> 32 for other in others} == {(int(lease.fence) >> 32) + 1}
            assert len(await hurt.leases.journal(lease.rollout_id)) == 2
            await store.ping()
            await hurt.finish_all([lease, *others])
            assert len((await hurt.batch(3)).groups) == 3


async def test_a_cluster_is_reached_by_any_of_its_nodes(servers: ClusterServers) -> None:
    servers.flush()
    ids = set()
    for node in servers.primaries:
        async with store_at(node.url) as store:
            ids.add(await store.deployment_id())
            await Jobs(store, retain_s=60).ids()
    assert len(ids) == 1
    assert {servers.owner(JOBS), servers.owner(WORKERS)} <= set(servers.primaries)


async def test_a_job_that_cannot_be_leased_from_holds_up_no_other(
    store: Store, servers: ClusterServers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on_its_way, free = [await stack_at(store, servers, node) for node in servers.primaries[:2]]
    [waiting], [served] = await on_its_way.submit(1), await free.submit(1)
    servers.begin_move(on_its_way.job_id, servers.primaries[2])
    async with resources_of(free, tmp_path / "no-tokenizer") as resources:
        async with asyncio.timeout(60):
            worker = asyncio.create_task(Worker(store, free.jobs, resources).run())
            while await free.state(served) is GroupState.QUEUED or f"no leases of {on_its_way.job_id}" not in caplog.text:
                await asyncio.sleep(0.05)
            resources.stopping.set()
            await worker
    await asyncio.to_thread(servers.end_move, on_its_way.job_id, servers.primaries[2])
    assert await on_its_way.state(waiting) is GroupState.QUEUED
    servers.move(on_its_way.job_id, servers.primaries[0])
