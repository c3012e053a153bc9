"""Batches: groups leased to the trainer, whole, oldest policy first.

What must always hold: a group is in one live batch at a time, and none is delivered stale (section "Staleness" of the README). A batch that
ran out or was handed back can still be acked until one of its groups is leased again.
"""

import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from service import keys
from service.errors import ConflictError, FieldProblem, GoneError, InvalidError
from service.groups import GroupRecord, RolloutRecord, read_groups
from service.records import GroupState
from service.store import Store, unavailable
from service.stored import BatchEntry, BatchFields, batch_journals, decode_batch

logger = logging.getLogger(__name__)

JOURNAL_ROUNDS = 20
"""Each round turns away what the last one found stale, or leases anew what ran out on its way; more are needed only while that goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """staleness: policy version at the lease minus the oldest sampled one, at least 0.

    rollouts: the `size` members that ended, each with its index among all; those that the group was to have more, up to `requested_size`,
    failed.
    """

    group_id: str
    task_id: str
    staleness: int
    requested_size: int
    size: int
    rollouts: list[RolloutRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A live batch. policy_version, lineage: the job's when it was leased. leased_at, lease_until: unix time."""

    batch_id: str
    job_id: str
    policy_version: int
    lineage: int
    leased_at: float
    lease_until: float
    groups: list[BatchGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingReady:
    """Fewer groups than asked are ready. drained: and nothing is queued, running or leased; what is ready is too few."""

    drained: bool


class Batches:
    """All batches of a store. Every method raises UnavailableError when the store is away."""

    def __init__(self, store: Store, *, retain_s: float) -> None:
        self._store = store
        self._retain_s = retain_s

    async def lease(
        self,
        job_id: str,
        *,
        groups: int,
        lease_s: float,
        allow_fewer: bool = False,
        trains_version: int | None = None,
        request_key: str | None = None,
    ) -> BatchRecord | NothingReady:
        """Exactly `groups` ready groups (1 to `groups` with `allow_fewer`), or none. Stale ones are turned away first.

        The same `request_key` gets the same batch while that is live, and a new one after it ran out or was handed back.

        Raises:
            NotFoundError: no such job.
            InvalidError: more groups than the gate lets out, or a version to train that has passed.
            GoneError: the batch of this `request_key` was acked.
        """
        job = keys.JobKeys(job_id)
        trains = "" if trains_version is None else trains_version
        args = [groups, int(allow_fewer), lease_s, trains, request_key or uuid.uuid4().hex]
        stale: list[str] = []
        journals: list[str] = []
        for _ in range(JOURNAL_ROUNDS):
            reply = await self._store.script("lease_batch")(job, [*args, *stale], journals=journals)
            match reply["status"]:
                case "journals":
                    stale = reply["groups"]
                    journals = [key for group in stale for key in job.journals(group, reply["members"])]
                case "ok":
                    await self._store.to_disk(job)
                    try:
                        return await self._record(job, reply["batch_id"], msgspec.convert(reply["batch"], BatchFields))
                    except GoneError as error:
                        logger.warning("%s: leasing anew", error)  # nobody has heard of it
                case "none":
                    return NothingReady(drained=reply["drained"])
                case "above":
                    raise _wrong(
                        "groups",
                        f"{groups} groups can never be ready at once: the job lets out {reply['limit']}; ask for fewer, "
                        "or raise staleness_budget, groups_per_step, steps_per_version or (with no budget) queue_groups",
                    )
                case "behind":
                    raise _wrong("trains_version", f"{trains_version} has passed: the policy version is {reply['version']}")
                case "acked":
                    raise GoneError("the batch of this request was acked already; use a new Idempotency-Key for the next one")
                case _:
                    raise keys.missing(job_id)
        return NothingReady(drained=False)

    async def live(self, job_id: str) -> list[BatchRecord]:
        """The batches that are leased now, those that end first in front."""
        job = keys.JobKeys(job_id)
        with unavailable():
            ids = await self._store.redis.zrange(job.batch_leases, 0, -1)
            raw = await self._store.redis.hmget(job.batches, ids) if ids else []
        records = []
        for name, data in zip(ids, raw, strict=True):
            with contextlib.suppress(GoneError):
                if data is not None:
                    records.append(await self._record(job, name.decode(), decode_batch(data)))
        return records

    async def get(self, batch_id: str) -> BatchRecord:
        """A live batch once more.

        Raises:
            NotFoundError: no such batch.
            GoneError: it was acked, ran out, was handed back, or its lineage ended.
        """
        job = keys.JobKeys(keys.job_of(batch_id))
        with unavailable():
            raw = await self._store.redis.hget(job.batches, batch_id)
        if raw is None:
            raise keys.missing(batch_id)
        fields = decode_batch(raw)
        if fields.state != "live":
            raise GoneError(f"batch {batch_id} is no longer leased ({fields.state})")
        return await self._record(job, batch_id, fields)

    async def ack(self, batch_id: str) -> None:
        """The trainer is done with it. Idempotent; also late, unless one of its groups was leased again.

        Raises:
            NotFoundError: no such batch.
            GoneError: one of its groups is no longer its, or its lineage ended.
        """
        job = keys.JobKeys(keys.job_of(batch_id))
        journals = await batch_journals(self._store, job, batch_id)
        reply = await self._store.script("ack_batch")(job, [batch_id], journals=journals)
        if reply["status"] == "missing":
            raise keys.missing(batch_id)
        if reply["status"] == "gone":
            raise GoneError(f"batch {batch_id} ran out and one of its groups is no longer its: it cannot be acked")
        await self._store.to_disk(job)

    async def release(self, batch_id: str) -> None:
        """Hand it back: its groups are the first to be leased again. Idempotent.

        Raises:
            NotFoundError: no such batch.
            ConflictError: it was acked.
        """
        reply = await self._hold(batch_id, "")
        if reply["status"] == "gone" and reply["state"] == "acked":
            raise ConflictError(f"batch {batch_id} was acked; it cannot be handed back")

    async def spoil(self, batch: BatchRecord, group_id: str, reason: str) -> None:
        """A group of it cannot be exported: that one fails with `reason`, and the others are the first to be leased again. Idempotent."""
        job = keys.JobKeys(batch.job_id)
        indices = [rollout.index for group in batch.groups if group.group_id == group_id for rollout in group.rollouts]
        journals = [job.journal(keys.rollout_id(group_id, index)) for index in indices]
        await self._store.script("spoil")(job, [batch.batch_id, group_id, reason[:2000]], journals=journals)

    async def extend(self, batch_id: str, lease_s: float) -> float:
        """Hold it for `lease_s` from now; the unix time at which it runs out.

        Raises:
            NotFoundError: no such batch.
            GoneError: it is not live.
        """
        reply = await self._hold(batch_id, lease_s)
        if reply["status"] == "gone":
            raise GoneError(f"batch {batch_id} is no longer leased ({reply['state']})")
        return float(reply["lease_until"])

    async def _hold(self, batch_id: str, lease_s: float | str) -> dict[str, str]:
        job = keys.JobKeys(keys.job_of(batch_id))
        reply = await self._store.script("hold_batch")(job, [batch_id, lease_s])
        if reply["status"] == "missing":
            raise keys.missing(batch_id)
        return reply

    async def _record(self, job: keys.JobKeys, batch_id: str, fields: BatchFields) -> BatchRecord:
        """A batch is told whole or not at all: who acks it acks all of its groups. Raises GoneError: it ended meanwhile."""
        records = await read_groups(self._store, job, [entry.group_id for entry in fields.groups], state=GroupState.LEASED)
        groups = _batch_groups(batch_id, fields.groups, records)
        if len(groups) < len(fields.groups):
            raise GoneError(f"batch {batch_id} ran out while it was read")
        return BatchRecord(
            batch_id=batch_id,
            job_id=job.job_id,
            policy_version=fields.version,
            lineage=fields.lineage,
            leased_at=fields.leased_at,
            lease_until=fields.lease_until,
            groups=groups,
        )


def _wrong(field: str, problem: str) -> InvalidError:
    return InvalidError(f"{field}: {problem}", fields=[FieldProblem(field=field, problem=problem)])


def _batch_groups(batch_id: str, entries: Sequence[BatchEntry], records: Sequence[GroupRecord]) -> list[BatchGroup]:
    staleness = {entry.group_id: entry.staleness for entry in entries}
    return [
        BatchGroup(
            group_id=record.group_id,
            task_id=record.task_id,
            staleness=staleness[record.group_id],
            requested_size=record.requested_size,
            size=record.size,
            rollouts=[member for member in record.members if member.state == "ended"],
        )
        for record in records
        if record.batch_id == batch_id
    ]
