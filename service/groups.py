"""Groups and their rollouts in the store: submit, read, cancel, forget.

What must always hold: what was submitted ends exactly once. The moves are in service/lua/state.lua; here is what is asked and answered.
"""

import asyncio
import uuid
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service import keys
from service.errors import BusyError, ConflictError, NotFoundError, TooLargeError
from service.records import GroupState, Outcome, TaskSpec
from service.store import Store, unavailable
from service.stored import GroupFields, RolloutFields, decode_group, decode_rollout

BUSY_RETRY_S = 5.0
"""When a client may try again after a full backlog; groups take seconds to minutes."""

MAX_SUBMIT_BYTES = 256 * 2**20
"""Of the tasks of one submission as they are stored, before compression: a job's defaults count once for each task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One rollout. state: waiting (its group is queued), pending, leased, ended, cancelled, failed. reward_detail: JSON."""

    rollout_id: str
    index: int
    attempt: int
    state: str
    worker: str | None
    outcome: Outcome | None
    stop_reason: str | None
    reward: float | None
    reward_detail: str
    turns: int
    tool_calls: int
    sampled_tokens: int
    oldest_version: int | None
    newest_version: int | None
    sandbox_id: str | None
    created_at: float
    ended_at: float | None
    failures: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One group with its members by index: `requested_size` and the job's extra ones. `size`: those of them that ended or still may;
    the others failed and were left out, or the group had enough without them.

    failed_attempts: how often infrastructure ended an attempt of a member, against the job's `group_retries`.
    """

    group_id: str
    job_id: str
    task_id: str
    state: GroupState
    reason: str | None
    size: int
    requested_size: int
    requeues: int
    failed_attempts: int
    priority: int
    created_at: float
    members: list[RolloutRecord]
    batch_id: str | None
    oldest_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """groups: (task id, group id) in the order of the tasks. backlog: queued groups of the job."""

    groups: list[tuple[str, str]]
    backlog: int


class Groups:
    """All groups of a store. Every method raises UnavailableError when the store is away."""

    def __init__(self, store: Store, *, retain_s: float) -> None:
        self._store = store
        self._retain_s = retain_s

    async def submit(self, job_id: str, tasks: Sequence[TaskSpec], *, request_key: str | None = None) -> Submitted:
        """Queue one group per task, all or none. The same `request_key` gets the same groups for `retain_s`.

        Raises:
            NotFoundError: no such job.
            BusyError: the backlog is full.
            TooLargeError: together they have more than `MAX_SUBMIT_BYTES`.
        """
        job = keys.JobKeys(job_id)
        packed = await asyncio.to_thread(_packed, tasks)  # 0.1 ms for each task of 4 kB
        reply = await self._store.script("submit")(job, [request_key or uuid.uuid4().hex, *packed])
        if reply["status"] == "missing":
            raise keys.missing(job_id)
        if reply["status"] == "busy":
            raise BusyError(
                f"the backlog holds {reply['backlog']} of at most {reply['limit']} groups, {len(tasks)} more do not fit; try again later",
                retry_after_s=BUSY_RETRY_S,
            )
        await self._store.to_disk(job, wrote=(job.groups, reply["groups"][-1]) if reply["groups"] else None)
        ids = [(task.task_id, group) for task, group in zip(tasks, reply["groups"], strict=False)]
        return Submitted(groups=ids, backlog=reply["backlog"])

    async def get(self, group_id: str) -> GroupRecord:
        """Raises NotFoundError."""
        job = keys.JobKeys(keys.job_of(group_id))
        found = await read_groups(self._store, job, [group_id])
        if not found:
            raise keys.missing(group_id)
        return found[0]

    async def list(self, job_id: str, *, state: GroupState | None = None, after: str | None = None, limit: int = 100) -> list[GroupRecord]:
        """Groups by number, after the group `after`, at most `limit`."""
        job = keys.JobKeys(job_id)
        found: list[GroupRecord] = []
        number = int(after.rpartition("-g")[2]) if after is not None and keys.job_of(after) == job_id else 0
        while len(found) < limit:
            with unavailable():
                ids = await self._store.redis.zrangebyscore(job.order, f"({number}", "+inf", start=0, num=max(limit, 100))
            if not ids:
                break
            names = [name.decode() for name in ids]
            groups = await read_groups(self._store, job, names, state=state)
            found += groups[: limit - len(found)]
            number = int(names[-1].rpartition("-g")[2])
        return found

    async def task(self, group_id: str) -> TaskSpec:
        """The group's task, while the group has not ended. Raises NotFoundError."""
        job = keys.JobKeys(keys.job_of(group_id))
        with unavailable():
            blob = await self._store.redis.hget(job.tasks, group_id)
        if blob is None:
            raise keys.missing(group_id)
        return TaskSpec.model_validate_json(zlib.decompress(blob))

    async def cancel(self, group_id: str) -> GroupRecord:
        """End the group as cancelled, unless it has ended.

        Raises:
            NotFoundError: no such group.
            ConflictError: it is in a batch that the trainer holds.
        """
        group = await self.get(group_id)
        job = keys.JobKeys(group.job_id)
        reply = await self._store.script("cancel")(job, [group_id], journals=job.journals(group_id, len(group.members)))
        if reply["status"] == "missing":
            raise keys.missing(group_id)
        if reply["status"] == "leased":
            raise ConflictError(
                f"group {group_id} is in batch {reply['batch_id']}, which the trainer holds; release or ack that batch first. "
                "Nothing was changed"
            )
        await self._store.to_disk(job)
        return await self.get(group_id)

    async def cancel_rollout(self, rollout_id: str) -> RolloutRecord:
        """Cancel the rollout and with it its group, whose rewards could no longer be compared. Raises as `cancel`."""
        await self.rollout(rollout_id)
        await self.cancel(keys.group_of(rollout_id))
        return await self.rollout(rollout_id)

    async def rollout(self, rollout_id: str) -> RolloutRecord:
        """Raises NotFoundError."""
        try:
            group = await self.get(keys.group_of(rollout_id))
        except NotFoundError:
            raise keys.missing(rollout_id) from None
        index = keys.index_of(rollout_id)
        if index >= len(group.members):
            raise keys.missing(rollout_id)
        return group.members[index]

    async def purge(self, job_id: str) -> int:
        """Forget what ended longer than `retain_s` ago; how many tombstones. Also brings back batches whose lease ran out."""
        purged = 0
        while True:
            reply = await self._store.script("purge")(keys.JobKeys(job_id), [self._retain_s])
            if not reply.get("purged"):
                return purged
            purged += reply["purged"]


def _packed(tasks: Sequence[TaskSpec]) -> list[str | bytes | int]:
    """Id, priority and compressed record of each. Raises TooLargeError."""
    parts: list[str | bytes | int] = []
    size = 0
    for task in tasks:
        record = task.model_dump_json().encode()
        size += len(record)
        if size > MAX_SUBMIT_BYTES:
            raise TooLargeError(
                f"with the job's defaults these tasks have more than {MAX_SUBMIT_BYTES} bytes; send fewer at once, or put large files "
                "into the image"
            )
        parts += (task.task_id, task.priority, zlib.compress(record, 1))
    return parts


async def read_groups(store: Store, job: keys.JobKeys, ids: Sequence[str], *, state: GroupState | None = None) -> list[GroupRecord]:
    """The groups among `ids` that exist (and are in `state`), in that order, with their members."""
    if not ids:
        return []
    with unavailable():
        raw = await store.redis.hmget(job.groups, ids)
    found = [(group, decode_group(data)) for group, data in zip(ids, raw, strict=True) if data is not None]
    found = [(group, fields) for group, fields in found if state is None or fields.state == state]
    names = [keys.rollout_id(group, index) for group, fields in found for index in range(fields.member_count)]
    if not names:
        return []
    with unavailable():
        members = iter(zip(names, await store.redis.hmget(job.rollouts, names), strict=True))
    return [_group(job.job_id, group, fields, [next(members) for _ in range(fields.member_count)]) for group, fields in found]


def _group(job_id: str, group: str, fields: GroupFields, members: Iterable[tuple[str, bytes | None]]) -> GroupRecord:
    return GroupRecord(
        group_id=group,
        job_id=job_id,
        task_id=fields.task_id,
        state=GroupState(fields.state),
        reason=fields.reason,
        size=fields.size,
        requested_size=fields.requested_size,
        requeues=fields.requeues,
        failed_attempts=fields.failed_attempts,
        priority=fields.priority,
        created_at=fields.created_at,
        members=[_rollout(name, index, data, fields) for index, (name, data) in enumerate(members)],
        batch_id=fields.batch_id,
        oldest_version=fields.oldest_version,
    )


def _rollout(rollout_id: str, index: int, data: bytes | None, group: GroupFields) -> RolloutRecord:
    if data is not None:
        fields = decode_rollout(data)
    else:  # never dispatched
        state = "cancelled" if group.ended_at is not None else "waiting"
        fields = RolloutFields(state=state, created_at=group.created_at, ended_at=group.ended_at)
    values = {name: getattr(fields, name) for name in fields.__struct_fields__}
    values["outcome"] = Outcome(fields.outcome) if fields.outcome else None
    return RolloutRecord(rollout_id=rollout_id, index=index, **values)
