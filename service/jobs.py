"""Jobs in the store: create, read, change, delete; live counts; the policy version.

What must always hold: a name of a tenant belongs to one live job. Counts are kept by the steps that move groups, never found by scanning.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from service import keys
from service.concurrency import Bounds, first
from service.errors import ConflictError, GoneError, InvalidError, NotFoundError
from service.ledger import Ledger, read_ledger
from service.records import JobPatch, JobSpec
from service.stale_work import stop_stale
from service.staleness import capacity
from service.store import Store, unavailable
from service.stored import batch_journals

UNCLAIMED_S = 600
"""A job that a crash left without its name goes after this."""

UNLINK_KEYS = 1000
"""Keys freed by one command, so that none holds Redis for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as it is now. `deleted`: a tombstone; it stays for `retain_s`."""

    job_id: str
    tenant: str
    spec: JobSpec
    policy_version: int
    lineage: int
    created_at: float
    deleted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCounts:
    """Groups by state (acked, cancelled, dropped, failed: since the job began; by reason), places of the gate, rollouts and tokens.

    tokens_standing: of what was generated, that which was neither delivered (acked) nor discarded yet.
    """

    backlog: int
    running: int
    ready: int
    leased: int
    acked: int
    cancelled: int
    dropped: dict[str, int]
    failed: dict[str, int]
    requeued: int
    charged: int
    capacity: int | None
    pending_rollouts: int
    leased_rollouts: int
    in_flight_rollouts: int
    in_flight_cap: int
    left_out_rollouts: int
    surplus_rollouts: int
    tokens_generated: int
    tokens_discarded: int
    tokens_delivered: int
    tokens_standing: int
    ledger: Ledger


class Jobs:
    """All jobs of a store. Every method raises UnavailableError when the store is away."""

    def __init__(self, store: Store, *, retain_s: float) -> None:
        self._store = store
        self._retain_s = retain_s

    async def create(self, tenant: str, spec: JobSpec) -> tuple[JobRecord, bool]:
        """The tenant's job of that name, and whether it is new.

        The record comes first, then the name, then the list of jobs: a crash in between leaves what the next call repairs.

        Raises:
            ConflictError: the name belongs to a job with another spec.
        """
        names = keys.names(tenant)
        while True:
            with unavailable():
                taken = await self._store.redis.hget(names, spec.name)
            if taken is not None:
                job_id = taken.decode()
                record = await self._read(job_id)
                if record is not None and not record.deleted and await self._publish(job_id):
                    if record.spec != spec:
                        raise _differs(record, spec)
                    return record, False
                with unavailable():
                    await self._store.redis.hdel(names, spec.name)
                continue
            job_id = keys.new_job_id()
            await self._write(job_id, tenant, spec)
            with unavailable():
                claimed = await self._store.redis.hsetnx(names, spec.name, job_id)
            await self._store.names_to_disk(names)
            if claimed and await self._publish(job_id):
                return await self.get(job_id), True
            with unavailable():
                await self._store.redis.unlink(keys.JobKeys(job_id).job)

    async def _write(self, job_id: str, tenant: str, spec: JobSpec) -> None:
        job = keys.JobKeys(job_id)
        fields = {
            "job_id": job_id,
            "tenant": tenant,
            "spec": spec.model_dump_json(),
            "created_at": repr(time.time()),
            "deleted": "0",
            "version": "0",
            "lineage": "0",
            "epoch": "0",
            **_gate(spec),
        }
        with unavailable():
            pipeline = self._store.redis.pipeline(transaction=True)
            pipeline.hset(job.job, mapping=fields)
            pipeline.expire(job.job, UNCLAIMED_S)
            await pipeline.execute()

    async def _publish(self, job_id: str) -> bool:
        """Whether the job is there for workers now; False: it was deleted meanwhile."""
        job = keys.JobKeys(job_id)
        reply = await self._store.script("publish")(job)
        if reply["status"] == "missing":
            return False
        with unavailable():
            await self._store.redis.sadd(keys.JOBS, job_id)
        await self._store.to_disk(job, wrote=(job.job, "job_id"))
        await self._store.names_to_disk(keys.JOBS)
        return True

    async def _read(self, job_id: str) -> JobRecord | None:
        with unavailable():
            fields = await self._store.redis.hmget(
                keys.JobKeys(job_id).job, "tenant", "spec", "version", "lineage", "created_at", "deleted"
            )
        if fields[1] is None:
            return None
        tenant, spec, version, lineage, created_at, deleted = fields
        return JobRecord(
            job_id=job_id,
            tenant=tenant.decode(),
            spec=JobSpec.model_validate_json(spec),
            policy_version=int(version),
            lineage=int(lineage),
            created_at=float(created_at),
            deleted=deleted == b"1",
        )

    async def get(self, job_id: str, *, tenant: str | None = None) -> JobRecord:
        """The job; also a deleted one while its tombstone stays.

        Raises:
            NotFoundError: there is none, or it is not `tenant`'s (None: not checked).
        """
        record = await self._read(keys.job_of(job_id)) if keys.job_of(job_id) == job_id else None
        if record is None or (tenant is not None and record.tenant != tenant):
            raise keys.missing(job_id)
        return record

    async def ids(self) -> list[str]:
        """Ids of all live jobs, for workers."""
        with unavailable():
            return sorted(member.decode() for member in await self._store.redis.smembers(keys.JOBS))

    async def list(self, tenant: str) -> list[JobRecord]:
        """The tenant's live jobs by age."""
        with unavailable():
            ids = await self._store.redis.hvals(keys.names(tenant))
        records = [await self._read(job_id.decode()) for job_id in ids]
        return sorted((r for r in records if r is not None and not r.deleted), key=lambda record: record.created_at)

    async def patch(self, job_id: str, patch: JobPatch) -> JobRecord:
        """Change what the patch names; of `JobPatch.nullable`, null given on purpose is a value (`staleness_budget`: the gate is off).

        Raises:
            NotFoundError: no such job.
            InvalidError: the changed spec contradicts itself.
        """
        job = keys.JobKeys(job_id)
        while True:
            with unavailable():
                read = await self._store.redis.hget(job.job, "spec")
            if read is None:
                raise keys.missing(job_id)
            spec = _patched(JobSpec.model_validate_json(read), patch)
            gate = [part for pair in _gate(spec).items() for part in pair]
            reply = await self._store.script("patch_job")(job, [read, spec.model_dump_json(), *gate])
            if reply["status"] == "missing":
                raise keys.missing(job_id)
            if reply["status"] == "ok":
                await self._store.to_disk(job)
                await stop_stale(self._store, job_id)
                return await self.get(job_id)

    async def delete(self, job_id: str) -> None:
        """Cancel everything of the job and free it. Idempotent while the tombstone stays.

        Raises:
            NotFoundError: no such job.
        """
        record = await self.get(job_id)
        job = keys.JobKeys(job_id)
        await self._store.script("delete_job")(job, [self._retain_s])
        with unavailable():
            names = keys.names(record.tenant)
            if await self._store.redis.hget(names, record.spec.name) == job_id.encode():
                await self._store.redis.hdel(names, record.spec.name)
        await self.free(job_id)

    async def free(self, job_id: str) -> None:
        """Finish what a crash in the middle of `delete` left of a deleted job: its journals, rollouts, and place in the list."""
        job = keys.JobKeys(job_id)
        with unavailable():
            rollouts = [rollout.decode() for rollout in await self._store.redis.hkeys(job.rollouts)]
            for start in range(0, len(rollouts), UNLINK_KEYS):
                await self._store.redis.unlink(*(job.journal(rollout) for rollout in rollouts[start : start + UNLINK_KEYS]))
            await self._store.redis.unlink(job.rollouts)
            await self._store.redis.srem(keys.JOBS, job_id)

    async def counts(self, job_id: str) -> JobCounts:
        """Live counts; no scan.

        Raises:
            NotFoundError: no such job.
        """
        job = keys.JobKeys(job_id)
        with unavailable():
            pipeline = self._store.redis.pipeline(transaction=True)
            pipeline.hmget(job.job, "deleted", "capacity", "max_in_flight", "start_in_flight", "in_flight_cap")
            pipeline.hgetall(job.counts)
            pipeline.hgetall(job.ledger)
            for queue in (job.backlog, job.pending, job.leases, job.ready):
                pipeline.zcard(queue)
            pipeline.scard(job.charged)
            (deleted, places, *caps), raw, books, backlog, pending, leased, ready, charged = await pipeline.execute()
        if deleted is None:
            raise keys.missing(job_id)
        counted = _numbers(raw)
        generated, discarded, delivered = (counted.get(f"tokens_{what}", 0) for what in ("generated", "discarded", "delivered"))
        return JobCounts(
            backlog=backlog,
            running=counted.get("running", 0),
            ready=ready,
            leased=counted.get("leased", 0),
            acked=counted.get("acked", 0),
            cancelled=counted.get("cancelled", 0),
            dropped=_by_reason(counted, "dropped"),
            failed=_by_reason(counted, "failed"),
            requeued=counted.get("requeued", 0),
            charged=charged,
            capacity=int(places) if places else None,
            pending_rollouts=pending,
            leased_rollouts=leased,
            in_flight_rollouts=pending + leased,
            in_flight_cap=_in_flight_cap(*caps),
            left_out_rollouts=counted.get("left_out_rollouts", 0),
            surplus_rollouts=counted.get("surplus_rollouts", 0),
            tokens_generated=generated,
            tokens_discarded=discarded,
            tokens_delivered=delivered,
            tokens_standing=generated - discarded - delivered,
            ledger=read_ledger(_numbers(books)),
        )

    async def set_policy(self, job_id: str, version: int, *, ack: Sequence[str] = (), rollback: bool = False) -> JobRecord:
        """The trainer published `version`; batches in `ack` are acked in the same step, or nothing happens.

        `rollback`: any version is taken, live batches end, acked groups give their places back, a new lineage opens.

        Raises:
            NotFoundError: no such job, or one of the batches is not its.
            ConflictError: lower than the current version, without `rollback`.
            GoneError: a group of one of the batches was leased again.
        """
        job = keys.JobKeys(job_id)
        journals = [key for batch in ack for key in await batch_journals(self._store, job, batch)]
        reply = await self._store.script("policy")(job, [version, int(rollback), *ack], journals=journals)
        match reply["status"]:
            case "missing":
                raise keys.missing(job_id)
            case "missing_batch":
                raise NotFoundError(f"job {job_id} has no batch {reply['batch_id']!r}")
            case "lower":
                raise ConflictError(
                    f"version {version} is below the current {reply['version']}; "
                    "a trainer that restarted from a checkpoint says rollback: true"
                )
            case "updating":
                told = f"update {reply['update_id']} runs and has labelled generators; it rolls back itself, if begun with rollback: true"
                raise ConflictError(f"{told}; finish or abandon it first", retry_after_s=1.0)
            case "gone":
                raise GoneError(f"batch {reply['batch_id']} ran out and one of its groups is no longer its; nothing was changed")
        await self._store.to_disk(job)
        await stop_stale(self._store, job_id)
        return await self.get(job_id)


def _differs(record: JobRecord, spec: JobSpec) -> ConflictError:
    fields = [name for name in JobSpec.model_fields if getattr(record.spec, name) != getattr(spec, name)]
    fixed = [name for name in fields if name not in JobPatch.model_fields]
    cure = f"{', '.join(fixed)} cannot change: PATCH takes other fields only" if fixed else f"PATCH /v1/jobs/{record.job_id} changes that"
    told = f"a job named {spec.name!r} exists with another spec: they differ in {', '.join(fields)}"
    return ConflictError(f"{told}; {cure}, or delete that job, or choose another name")


def _numbers(raw: dict[bytes, bytes]) -> dict[str, int]:
    return {field.decode(): int(value) for field, value in raw.items()}


def _by_reason(counted: dict[str, int], state: str) -> dict[str, int]:
    return {field.split(":", 1)[1]: value for field, value in counted.items() if field.startswith(f"{state}:")}


def _in_flight_cap(most: bytes, start: bytes | None, steered: bytes | None) -> int:
    """As in service/lua/take.lua."""
    return min(int(most), int(steered or start)) if start else int(most)


def _start_in_flight(spec: JobSpec) -> int | str:
    """The cap of an adaptive job before the first decision; empty: the job is not adaptive."""
    if spec.concurrency == "fixed":
        return ""
    return first(Bounds(lowest=spec.least_in_flight, highest=spec.max_in_flight_rollouts, group=spec.members), spec.groups_per_step)


def _gate(spec: JobSpec) -> dict[str, Any]:
    """What the Lua steps read of a spec. Empty: the gate is off."""
    places = capacity(spec.staleness_budget, spec.groups_per_step, spec.steps_per_version)
    return {
        "capacity": "" if places is None else places,
        "budget": "" if spec.staleness_budget is None else spec.staleness_budget,
        "group_size": spec.group_size,
        "extra_members": spec.extra_members,
        "weight": spec.weight,
        "max_in_flight": spec.max_in_flight_rollouts,
        "start_in_flight": _start_in_flight(spec),
        "queue_groups": spec.queue_groups,
        "backlog_limit": spec.backlog_limit,
        "max_requeues": spec.max_requeues,
        "stale_policy": spec.stale_policy,
        "zero_variance": spec.zero_variance,
        "group_retries": "" if spec.group_retries is None else spec.group_retries,
        "min_group_size": "" if spec.min_group_size is None else spec.min_group_size,
    }


def _patched(spec: JobSpec, patch: JobPatch) -> JobSpec:
    changes = patch.model_dump(exclude_unset=True)
    given = {name: value for name, value in changes.items() if value is not None or name in JobPatch.nullable}
    try:
        return JobSpec.model_validate({**spec.model_dump(), **given})
    except ValidationError as error:
        raise InvalidError("; ".join(found["msg"].removeprefix("Value error, ") for found in error.errors())) from None
