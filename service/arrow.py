"""A batch as an Arrow IPC stream: one row a sample, token columns as lists. Pure.

List columns are built from whole numpy arrays (one copy a chunk, none an element), and a message is serialised by itself, so that a
stream is the schema's message, one message a chunk, and the end mark.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from service.trajectories import Sample, Timing, Trajectory

MEDIA_TYPE = "application/vnd.apache.arrow.stream"

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Continuation mark and length 0, as the IPC format ends a stream."""

_EMPTY = Sample(
    token_ids=np.empty(0, np.int32),
    loss_mask=np.empty(0, np.uint8),
    logprobs=np.empty(0, np.float32),
    versions=np.empty(0, np.int32),
    prompt_len=0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHead:
    """What every row of one group says about its group."""

    group_id: str
    task_id: str
    staleness: int
    requested_size: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample in its place. `sample_index` is -1 for a trajectory without samples, which keeps its reward in the group."""

    group: GroupHead
    trajectory: Trajectory
    sample_index: int
    sample: Sample


def rows_of(group: GroupHead, trajectory: Trajectory) -> list[Row]:
    numbered = list(enumerate(trajectory.samples)) or [(-1, _EMPTY)]
    return [Row(group=group, trajectory=trajectory, sample_index=number, sample=sample) for number, sample in numbered]


_TIMING = pa.struct([(field.name, pa.float64()) for field in fields(Timing)])

_SCALARS: tuple[tuple[str, Any, Callable[[Row], Any]], ...] = (
    ("group_id", pa.string(), lambda row: row.group.group_id),
    ("task_id", pa.string(), lambda row: row.group.task_id),
    ("staleness", pa.int32(), lambda row: row.group.staleness),
    ("requested_size", pa.int32(), lambda row: row.group.requested_size),
    ("size", pa.int32(), lambda row: row.group.size),
    ("rollout_id", pa.string(), lambda row: row.trajectory.rollout_id),
    ("index", pa.int32(), lambda row: row.trajectory.index),
    ("attempt", pa.int32(), lambda row: row.trajectory.attempt),
    ("outcome", pa.string(), lambda row: str(row.trajectory.outcome)),
    ("stop_reason", pa.string(), lambda row: row.trajectory.stop_reason),
    ("reward", pa.float64(), lambda row: row.trajectory.reward),
    ("reward_detail", pa.string(), lambda row: orjson.dumps(row.trajectory.reward_detail).decode()),
    ("sample_index", pa.int32(), lambda row: row.sample_index),
    ("prompt_len", pa.int32(), lambda row: row.sample.prompt_len),
    ("turns", pa.int32(), lambda row: row.trajectory.turns),
    ("tool_calls", pa.int32(), lambda row: row.trajectory.tool_calls),
    ("timing", _TIMING, lambda row: asdict(row.trajectory.timing)),
    ("oldest_version", pa.int32(), lambda row: row.trajectory.oldest_version),
    ("newest_version", pa.int32(), lambda row: row.trajectory.newest_version),
    ("environment_gap", pa.int32(), lambda row: row.trajectory.environment_gap),
    ("metadata", pa.string(), lambda row: orjson.dumps(row.trajectory.metadata).decode()),
)

_LISTS: tuple[tuple[str, Any, Callable[[Sample], npt.NDArray[Any]]], ...] = (
    ("token_ids", pa.int32(), lambda sample: sample.token_ids),
    ("loss_mask", pa.uint8(), lambda sample: sample.loss_mask),
    ("logprobs", pa.float32(), lambda sample: sample.logprobs),
    ("versions", pa.int32(), lambda sample: sample.versions),
)


def schema(batch: dict[str, str]) -> Any:
    """The stream's schema; what is said of the whole batch is its metadata."""
    columns = [pa.field(name, kind) for name, kind, _ in _SCALARS] + [pa.field(name, pa.list_(kind)) for name, kind, _ in _LISTS]
    return pa.schema(columns, metadata=batch)


def open_stream(stream_schema: Any) -> bytes:
    return bytes(stream_schema.serialize().to_pybytes())


def record_batch(rows: Sequence[Row], stream_schema: Any) -> bytes:
    """One message with these rows."""
    columns = [pa.array([value(row) for row in rows], type=kind) for _, kind, value in _SCALARS]
    offsets = pa.array(np.concatenate(([0], np.cumsum([len(row.sample.token_ids) for row in rows]))).astype(np.int32))
    for _, kind, part in _LISTS:
        values = np.concatenate([part(row.sample) for row in rows])
        columns.append(pa.ListArray.from_arrays(offsets, pa.array(values, type=kind)))
    return bytes(pa.RecordBatch.from_arrays(columns, schema=stream_schema).serialize().to_pybytes())
