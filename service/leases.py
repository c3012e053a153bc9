"""Leases of rollouts: taken by workers, renewed, and the only way to write a rollout's journal.

What must always hold: only the holder of a rollout's current fence changes it, checked in the same step as the write. Each lease ends in
exactly one of finish, restart, release, loss by expiry, or its group's end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from service import keys
from service.crash_points import reached
from service.errors import LeaseLostError
from service.fair_share import Load
from service.journal import AnyEntry, Generated, Restored, SandboxOpened, decode, encode
from service.records import GroupState, Outcome
from service.stale_work import stop_stale
from service.store import AWAY, Argument, Store, unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One rollout in a worker's hand. `fence`: an integer as text, higher than that of every earlier lease of this rollout.

    members: of its group, those included that the job has more than it takes.
    resumed: its journal is not empty. queued_s: since it was queued, or came back.
    sandbox_losses: how often the model destroyed its sandbox. expiries: how often a lease of this attempt ran out.
    """

    job_id: str
    group_id: str
    rollout_id: str
    index: int
    attempt: int
    fence: str
    members: int
    resumed: bool
    queued_s: float
    cancelled: bool
    tenant: str
    policy_version: int
    lineage: int
    sandbox_losses: int
    expiries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Rollouts that are no longer ours. Those in `lost` may be another worker's; attempts in `cancelled` are nobody's any more: the client,
    a failed sibling, enough siblings or a new version ended them."""

    lost: frozenset[str]
    cancelled: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rollout ended. reward None: left to the trainer. reward_detail: JSON. Versions are None where nothing was sampled.

    discarded_tokens: that the attempt sampled and gave up; cut_back_tokens: those of them that lay behind a snapshot it went back to.
    seconds: what it was worked on, by `sandbox`, `generate`, `tool` and `verify`.
    """

    outcome: Outcome
    stop_reason: str
    reward: float | None
    reward_detail: str
    turns: int
    tool_calls: int
    sampled_tokens: int
    discarded_tokens: int = 0
    cut_back_tokens: int = 0
    oldest_version: int | None
    newest_version: int | None
    oldest_lineage: int | None
    seconds: Mapping[str, float] = field(default_factory=dict)


class Leases:
    """Leases of a store's rollouts. Every method raises UnavailableError when the store is away."""

    def __init__(self, store: Store, *, lease_s: float, max_attempts: int) -> None:
        self._store = store
        self._lease_s = lease_s
        self._max_attempts = max_attempts

    async def take(self, job_id: str, worker: str, *, n: int) -> list[Lease]:
        """Up to `n` rollouts: resumed ones first, then by age; groups are admitted from the backlog as the gate allows.

        Raises:
            NotFoundError: no such job.
        """
        job = keys.JobKeys(job_id)
        reply = await self._store.script("take")(job, [worker, n, self._lease_s])
        if reply["status"] == "missing":
            raise keys.missing(job_id)
        if not reply["leases"]:
            return []
        await self._store.to_disk(job)
        resumed = await self._with_journal(job, [entry["rollout_id"] for entry in reply["leases"] if entry["again"]])
        return [_lease(job_id, entry, reply, resumed) for entry in reply["leases"]]

    async def loads(self, job_ids: Sequence[str]) -> dict[str, Load]:
        """What each job has of all workers now, in one round trip; without those on nodes of a cluster that are away."""
        if not job_ids:
            return {}
        with unavailable():
            pipeline = self._store.redis.pipeline(transaction=False)
            for job in map(keys.JobKeys, job_ids):
                pipeline.zcard(job.leases)
                pipeline.hget(job.job, "weight")
            replies = await pipeline.execute(raise_on_error=False)
            read = [pair for pair in zip(job_ids, replies[::2], replies[1::2], strict=True) if not isinstance(pair[1], AWAY)]
            if not read:
                raise replies[0]
            return {job_id: Load(in_flight=in_flight, weight=float(weight or 1)) for job_id, in_flight, weight in read}

    async def _with_journal(self, job: keys.JobKeys, rollouts: Sequence[str]) -> frozenset[str]:
        if not rollouts:
            return frozenset()
        with unavailable():
            pipeline = self._store.redis.pipeline(transaction=False)
            for rollout in rollouts:
                pipeline.exists(job.journal(rollout))
            replies = await pipeline.execute()
        return frozenset(rollout for rollout, there in zip(rollouts, replies, strict=True) if there)

    async def renew(self, job_id: str, leases: Iterable[Lease]) -> Renewal:
        """Hold these for another `lease_s`. Work of the job that can no longer be in time is stopped; the next renewal tells."""
        parts = [part for lease in leases for part in (lease.rollout_id, lease.fence, lease.attempt)]
        reply = await self._store.script("renew")(keys.JobKeys(job_id), [self._lease_s, *parts])
        if reply["stale"]:
            await stop_stale(self._store, job_id)
        return Renewal(lost=frozenset(reply["lost"]), cancelled=frozenset(reply["over"]))

    async def append(self, lease: Lease, entries: Sequence[AnyEntry], *, at_index: int, durable: bool = False) -> None:
        """Append to the journal, whose length the caller believes to be `at_index`. Repeating a call after a lost reply is safe.

        durable: on the disk of Redis before this returns.

        Raises:
            LeaseLostError: the lease is another's, or the journal is not as long as believed.
        """
        job = keys.JobKeys(lease.job_id)
        sandbox = next((entry.id for entry in entries if isinstance(entry, SandboxOpened | Restored)), "")
        sampled = sum(len(entry.token_ids) // 4 for entry in entries if isinstance(entry, Generated))
        args: list[Argument] = [lease.rollout_id, lease.fence, at_index, sandbox, sampled, _oldest_place(entries), *map(encode, entries)]
        reached("before", *entries)
        names = [job.fences, job.journal(lease.rollout_id), job.rollouts, job.counts, job.sampled, job.oldest]
        length = await self._store.append(names, args)
        if length < 0:
            why = "its lease is another's" if length == -1 else f"its journal is not {at_index} entries long"
            raise LeaseLostError(f"{lease.rollout_id}: {why}")
        reached("after", *entries)
        if durable:
            await self._store.to_disk(job)

    async def journal(self, rollout_id: str, *, start: int = 0) -> list[AnyEntry]:
        """The entries of the current attempt from index `start`. Raises JournalError."""
        return [decode(data) for data in await self.raw_journal(rollout_id, start=start)]

    async def raw_journal(self, rollout_id: str, *, start: int = 0) -> list[bytes]:
        """The same, undecoded."""
        job = keys.JobKeys(keys.job_of(rollout_id))
        with unavailable():
            entries: list[bytes] = await self._store.redis.lrange(job.journal(rollout_id), start, -1)
        return entries

    async def raw_journals(self, rollout_ids: Sequence[str]) -> list[list[bytes]]:
        """The undecoded journals of rollouts of one job, in one round trip."""
        if not rollout_ids:
            return []
        job = keys.JobKeys(keys.job_of(rollout_ids[0]))
        with unavailable():
            pipeline = self._store.redis.pipeline(transaction=False)
            for rollout in rollout_ids:
                pipeline.lrange(job.journal(rollout), 0, -1)
            journals: list[list[bytes]] = await pipeline.execute()
        return journals

    async def finish(self, lease: Lease, ended: Ended) -> GroupState:
        """The rollout has its trajectory; the state of its group after that. Repeating the call is safe.

        Raises:
            LeaseLostError: the lease is another's, or the group has ended.
        """
        fields = {name: getattr(ended, name) for name in Ended.__dataclass_fields__ if getattr(ended, name) is not None}
        reply = await self._settle("finish", lease, [msgspec.msgpack.encode(fields)])
        return GroupState(reply["state"])

    async def restart(
        self, lease: Lease, reason: str, *, retry: bool, attempt_counts: bool = True
    ) -> Literal["pending", "left_out", "group_failed"]:
        """This attempt failed: the rollout begins anew, unless `retry` is false or the attempts, its own or its group's, are used up.

        Then the group fails with `reason`, or, with `retry` and enough members left for the job's `min_group_size`, goes on without it.
        Reasons are counted by what stands before their first colon. Repeating the call is safe.

        Raises:
            LeaseLostError: the lease is another's, or the group has ended.
        """
        args: list[Argument] = [lease.index, reason, int(retry), int(attempt_counts), self._max_attempts]
        reply = await self._settle("restart", lease, args)
        state: Literal["pending", "left_out", "group_failed"] = reply["state"]
        return state

    async def _settle(self, name: str, lease: Lease, args: Sequence[Argument]) -> dict[str, Any]:
        job = keys.JobKeys(lease.job_id)
        journals = job.journals(lease.group_id, lease.members)
        reply = await self._store.script(name)(job, [lease.group_id, lease.rollout_id, lease.fence, *args], journals=journals)
        if reply["status"] != "ok":
            raise LeaseLostError(f"{lease.rollout_id}: its lease is another's, or its group has ended")
        return reply

    async def release(self, lease: Lease) -> None:
        """Hand the rollout back, first in line with its journal. A lease that is lost already has nothing to hand back."""
        await self._store.script("release")(keys.JobKeys(lease.job_id), [lease.rollout_id, lease.fence])

    async def live_attempts(self, job_id: str) -> dict[str, int]:
        """rollout id -> attempt of all rollouts that workers hold or may take, for the sweep of sandboxes."""
        job = keys.JobKeys(job_id)
        with unavailable():
            pipeline = self._store.redis.pipeline(transaction=True)
            pipeline.zrange(job.pending, 0, -1)
            pipeline.zrange(job.leases, 0, -1)
            names = [name for part in await pipeline.execute() for name in part]
            raw = await self._store.redis.hmget(job.rollouts, names) if names else []
        records = ((name.decode(), data) for name, data in zip(names, raw, strict=True) if data is not None)
        return {name: int(msgspec.msgpack.decode(data)["attempt"]) for name, data in records}


def _oldest_place(entries: Iterable[AnyEntry]) -> int | str:
    """Where the oldest token in them stands among all (place_of in moves.lua); empty: nothing that may train was sampled."""
    spans = (span for entry in entries if isinstance(entry, Generated) and not entry.discarded for span in entry.spans)
    return min((lineage * 2**32 + version for version, lineage, start, end in spans if end > start), default="")


def _lease(job_id: str, entry: dict[str, Any], reply: dict[str, Any], resumed: frozenset[str]) -> Lease:
    rollout = entry["rollout_id"]
    return Lease(
        job_id=job_id,
        group_id=keys.group_of(rollout),
        rollout_id=rollout,
        index=keys.index_of(rollout),
        attempt=entry["attempt"],
        fence=entry["fence"],
        members=reply["members"],
        resumed=rollout in resumed,
        queued_s=float(entry["queued_s"]),
        cancelled=False,
        tenant=reply["tenant"],
        policy_version=reply["version"],
        lineage=reply["lineage"],
        sandbox_losses=entry["sandbox_losses"],
        expiries=entry["expiries"],
    )
