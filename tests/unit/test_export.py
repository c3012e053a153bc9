"""A batch's chunks as JSON and as Arrow: both say the same, whatever the groups and samples are."""

import dataclasses

import numpy as np
import orjson
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from service import arrow
from service.arrow import GroupHead
from service.export import JsonGroups, arrow_chunk
from service.records import Outcome
from service.trajectories import Sample, Timing, Trajectory

ARRAYS = ("token_ids", "loss_mask", "logprobs", "versions")


def sample(size: int, seed: int) -> Sample:
    draw = np.random.default_rng(seed)
    return Sample(
        token_ids=draw.integers(0, 150_000, size).astype(np.int32),
        loss_mask=draw.integers(0, 2, size).astype(np.uint8),
        logprobs=-draw.random(size).astype(np.float32),
        versions=draw.integers(-1, 9, size).astype(np.int32),
        prompt_len=min(3, size),
    )


def trajectory(group: GroupHead, index: int, sizes: list[int]) -> Trajectory:
    return Trajectory(
        rollout_id=f"{group.group_id}-r{index}",
        index=index,
        attempt=1,
        outcome=Outcome.COMPLETED,
        stop_reason="submitted",
        reward=None if index == 1 else index / 3,
        reward_detail={"passed": index, "text": "ü\n"},
        samples=tuple(sample(size, index) for size in sizes),
        turns=2,
        tool_calls=1,
        timing=Timing(queued_s=0.5, ready_s=1.25),
        oldest_version=0,
        newest_version=3,
        metadata={"nested": [1, {"x": None}]},
    )


members = st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=5)


@given(st.lists(members, min_size=1, max_size=4), st.integers(1, 4))
def test_both_forms_say_the_same(groups: list[list[list[int]]], chunk_size: int) -> None:
    heads = [
        GroupHead(group_id=f"j-g{n}", task_id=f"t{n}", staleness=n, requested_size=8, size=len(group)) for n, group in enumerate(groups)
    ]
    pairs = [(head, trajectory(head, i, sizes)) for head, group in zip(heads, groups, strict=True) for i, sizes in enumerate(group)]
    chunks = [pairs[start : start + chunk_size] for start in range(0, len(pairs), chunk_size)]

    form = JsonGroups()
    decoded = orjson.loads(b"".join([b'{"groups":[', *(form.chunk(chunk) for chunk in chunks), form.end()]))["groups"]
    assert [group["group_id"] for group in decoded] == [head.group_id for head in heads]
    assert [len(group["trajectories"]) for group in decoded] == [len(group) for group in groups]

    schema = arrow.schema({"batch_id": "b"})
    stream = arrow.open_stream(schema) + b"".join(arrow_chunk(chunk, schema) for chunk in chunks) + arrow.END_OF_STREAM
    table = pa.ipc.open_stream(stream).read_all()
    table.validate(full=True)
    rows = iter(table.to_pylist())
    for group in decoded:
        for shown in group["trajectories"]:
            for position, part in list(enumerate(shown["samples"])) or [
                (-1, {"token_ids": [], "loss_mask": [], "logprobs": [], "versions": [], "prompt_len": 0})
            ]:
                row = next(rows)
                assert (row["rollout_id"], row["sample_index"], row["reward"]) == (shown["rollout_id"], position, shown["reward"])
                assert orjson.loads(row["metadata"]) == shown["metadata"]
                assert row["timing"] == shown["timing"]
                assert all(np.array_equal(np.float32(row[name]), np.float32(part[name])) for name in ARRAYS)
    assert next(rows, None) is None


def test_rows_keep_a_trajectory_without_samples() -> None:
    head = GroupHead(group_id="j-g1", task_id="t", staleness=0, requested_size=1, size=1)
    [row] = arrow.rows_of(head, dataclasses.replace(trajectory(head, 0, []), reward=0.5))
    assert (row.sample_index, row.trajectory.reward, len(row.sample.token_ids)) == (-1, 0.5, 0)
