"""A leased batch as bytes for the trainer, JSON or Arrow, in bounded chunks.

Journals are read a few rollouts at a time and turned into samples in threads, so that neither memory nor the loop feels the size of a
batch. The first chunk is made before the answer begins: what can be refused is refused with a status, not with a broken stream.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import orjson

from service import arrow
from service.arrow import GroupHead
from service.batches import BatchGroup, BatchRecord
from service.errors import GoneError, JournalError, MisalignedTokensError, UnexportableError
from service.groups import Groups, RolloutRecord
from service.journal import decode
from service.leases import Leases
from service.metrics import Metrics
from service.records import Outcome
from service.samples import build_trajectory
from service.trajectories import Sample, Trajectory

CHUNK_ROLLOUTS = 16
"""Rollouts in one chunk: 16 x 16k tokens are 3.4 MB of Arrow, large enough that the cost per chunk vanishes."""

JSON_MEDIA_TYPE = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rollout of a batch, with what its group says of it."""

    group: GroupHead
    rollout: RolloutRecord
    metadata: dict[str, Any]


Chunk = Sequence[tuple[GroupHead, Trajectory]]
Item = TypeVar("Item")


class Exporter:
    """Reads what a batch's rollouts journaled and writes what a trainer reads."""

    def __init__(self, groups: Groups, leases: Leases, metrics: Metrics) -> None:
        self._groups = groups
        self._leases = leases
        self._metrics = metrics

    async def arrow(self, batch: BatchRecord) -> AsyncGenerator[bytes, None]:
        """An Arrow IPC stream; the last piece ends it."""
        schema = arrow.schema({name: str(value) for name, value in batch_head(batch).items()})
        pending = arrow.open_stream(schema)
        async for data in self._encoded(batch, partial(arrow_chunk, schema=schema)):
            yield self._count("arrow", pending + data)
            pending = b""
        yield self._count("arrow", pending + arrow.END_OF_STREAM)

    async def json(self, batch: BatchRecord) -> AsyncGenerator[bytes, None]:
        """The same as JSON text."""
        pending = orjson.dumps(batch_head(batch))[:-1] + b',"groups":['
        form = JsonGroups()
        async for data in self._encoded(batch, form.chunk):
            yield self._count("json", pending + data)
            pending = b""
        yield self._count("json", pending + form.end())

    def _count(self, form: str, data: bytes) -> bytes:
        self._metrics.exported_bytes.labels(form).inc(len(data))
        return data

    async def _encoded(self, batch: BatchRecord, encode: Callable[[Chunk], bytes]) -> AsyncIterator[bytes]:
        """A few trajectories at a time, built and encoded in one visit to a thread; the next journals are read meanwhile."""

        def work(members: Sequence[Member], journals: Sequence[Sequence[bytes]]) -> bytes:
            chunk = build_chunk(members, journals, leased_at=batch.leased_at)
            self._metrics.exported_samples.inc(sum(len(trajectory.samples) for _, trajectory in chunk))
            return encode(chunk)

        async with aclosing(one_ahead(self._journals(batch))) as read:
            async for members, journals in read:
                yield await asyncio.to_thread(work, members, journals)

    async def _journals(self, batch: BatchRecord) -> AsyncGenerator[tuple[list[Member], list[list[bytes]]], None]:
        members: list[Member] = []
        for group in batch.groups:
            head, metadata = group_head(group), (await self._groups.task(group.group_id)).metadata
            members += [Member(group=head, rollout=rollout, metadata=metadata) for rollout in group.rollouts]
            while len(members) >= CHUNK_ROLLOUTS or (members and group is batch.groups[-1]):
                some, members = members[:CHUNK_ROLLOUTS], members[CHUNK_ROLLOUTS:]
                yield some, await self._leases.raw_journals([member.rollout.rollout_id for member in some])


async def one_ahead(items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """`items`, each fetched while the one before it is used."""

    async def fetch() -> Item | None:
        return await anext(items, None)

    fetching = asyncio.create_task(fetch())
    try:
        while (item := await fetching) is not None:
            fetching = asyncio.create_task(fetch())
            yield item
    finally:
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        await items.aclose()


def build_chunk(members: Sequence[Member], journals: Sequence[Sequence[bytes]], *, leased_at: float) -> Chunk:
    """Samples and what belongs to them. Blocking.

    Raises:
        GoneError: a journal is gone: the batch was acked, or its groups were leased again, while it was read.
        UnexportableError: a journal that must not be exported.
    """
    return [(member.group, build_member(member, journal, leased_at)) for member, journal in zip(members, journals, strict=True)]


def build_member(member: Member, journal: Sequence[bytes], leased_at: float) -> Trajectory:
    rollout = member.rollout
    if not journal:
        raise GoneError(f"rollout {rollout.rollout_id} is no longer kept: its batch was acked, or has ended")
    try:
        return build_trajectory(
            [decode(entry) for entry in journal],
            rollout_id=rollout.rollout_id,
            index=rollout.index,
            outcome=rollout.outcome or Outcome.COMPLETED,
            ready_s=max(0.0, leased_at - rollout.ended_at) if rollout.ended_at else 0.0,
            metadata=member.metadata,
        )
    except (JournalError, MisalignedTokensError) as error:
        raise UnexportableError(f"journal: {rollout.rollout_id}: {error}", group_id=member.group.group_id) from error


def batch_head(batch: BatchRecord) -> dict[str, Any]:
    """What is said of the whole batch."""
    return {
        "batch_id": batch.batch_id,
        "policy_version": batch.policy_version,
        "lineage": batch.lineage,
        "lease_until": batch.lease_until,
    }


def group_head(group: BatchGroup) -> GroupHead:
    return GroupHead(
        group_id=group.group_id,
        task_id=group.task_id,
        staleness=group.staleness,
        requested_size=group.requested_size,
        size=group.size,
    )


def arrow_chunk(chunk: Chunk, schema: Any) -> bytes:
    return arrow.record_batch([row for head, trajectory in chunk for row in arrow.rows_of(head, trajectory)], schema)


class JsonGroups:
    """Trajectories as they stand in `groups`: a group is opened at its first one and closed at the next group's."""

    def __init__(self) -> None:
        self._open: GroupHead | None = None

    def chunk(self, chunk: Chunk) -> bytes:
        parts: list[bytes] = []
        for head, trajectory in chunk:
            if head != self._open:
                parts += [b"]}," if self._open else b"", orjson.dumps(asdict(head))[:-1], b',"trajectories":[']
                self._open = head
            else:
                parts.append(b",")
            parts.append(orjson.dumps(trajectory_object(trajectory), option=orjson.OPT_SERIALIZE_NUMPY))
        return b"".join(parts)

    def end(self) -> bytes:
        return b"]}]}" if self._open else b"]}"


def trajectory_object(trajectory: Trajectory) -> dict[str, Any]:
    """The JSON form, its samples' arrays left as numpy for the encoder."""
    return {
        "rollout_id": trajectory.rollout_id,
        "index": trajectory.index,
        "attempt": trajectory.attempt,
        "outcome": trajectory.outcome,
        "stop_reason": trajectory.stop_reason,
        "reward": trajectory.reward,
        "reward_detail": trajectory.reward_detail,
        "samples": [sample_object(sample) for sample in trajectory.samples],
        "turns": trajectory.turns,
        "tool_calls": trajectory.tool_calls,
        "timing": asdict(trajectory.timing),
        "versions": {
            "oldest": trajectory.oldest_version,
            "newest": trajectory.newest_version,
            "environment_gap": trajectory.environment_gap,
        },
        "metadata": trajectory.metadata,
    }


def sample_object(sample: Sample) -> dict[str, Any]:
    return {
        "token_ids": sample.token_ids,
        "loss_mask": sample.loss_mask,
        "logprobs": sample.logprobs,
        "versions": sample.versions,
        "prompt_len": sample.prompt_len,
    }
