"""The records that the Lua steps keep, as they read in Python (msgpack maps; fields that only Lua needs are left out)."""

import msgspec

from service.keys import JobKeys
from service.store import Store, unavailable


class RolloutFields(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout's record as the Lua steps keep it; before its group's first dispatch there is none."""

    state: str = "waiting"
    attempt: int = 1
    worker: str | None = None
    outcome: str | None = None
    stop_reason: str | None = None
    reward: float | None = None
    reward_detail: str = "{}"
    turns: int = 0
    tool_calls: int = 0
    sampled_tokens: int = 0
    oldest_version: int | None = None
    newest_version: int | None = None
    sandbox_id: str | None = None
    created_at: float = 0.0
    ended_at: float | None = None
    failures: list[str] = []


class GroupFields(msgspec.Struct, frozen=True, kw_only=True):
    """A group's record as the Lua steps keep it."""

    n: int
    task_id: str
    state: str
    size: int
    requested_size: int
    requeues: int
    priority: int
    created_at: float
    reason: str | None = None
    batch_id: str | None = None
    oldest_version: int | None = None
    ended_at: float | None = None
    failed_attempts: int = 0
    members: int | None = None

    @property
    def member_count(self) -> int:
        """Rollouts of the group: `requested_size` and the job's extra ones."""
        return self.members or self.requested_size


class BatchEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a batch as it was leased."""

    group_id: str
    staleness: int


class BatchFields(msgspec.Struct, frozen=True, kw_only=True):
    """A batch's record as the Lua steps keep it. state: live, acked, returned, rolled_back."""

    state: str
    version: int
    lineage: int
    leased_at: float
    lease_until: float
    groups: list[BatchEntry]


_group_decoder = msgspec.msgpack.Decoder(GroupFields)
_rollout_decoder = msgspec.msgpack.Decoder(RolloutFields)
_batch_decoder = msgspec.msgpack.Decoder(BatchFields)


def decode_group(data: bytes) -> GroupFields:
    return _group_decoder.decode(data)


def decode_rollout(data: bytes) -> RolloutFields:
    return _rollout_decoder.decode(data)


def decode_batch(data: bytes) -> BatchFields:
    return _batch_decoder.decode(data)


async def batch_journals(store: Store, job: JobKeys, batch: str) -> list[str]:
    """The journals of a batch's rollouts; none when there is no such batch. Raises UnavailableError."""
    with unavailable():
        raw = await store.redis.hget(job.batches, batch)
        size, extra = await store.redis.hmget(job.job, "group_size", "extra_members")
    if raw is None or size is None:
        return []
    members = int(size) + int(extra or 0)
    return [key for entry in decode_batch(raw).groups for key in job.journals(entry.group_id, members)]
