"""Journal entries to samples: the cases by their right answers, and a property against a model that works token by token."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import MisalignedTokensError
from service.journal import AnyEntry, Extended, Generated, Observed, Opened, Prompted, Replied, Scored, Stopped, pack_ids, pack_logprobs
from service.records import Outcome
from service.samples import build_samples, build_trajectory
from service.trajectories import Sample


def prompted(ids: list[int]) -> Prompted:
    return Prompted(at=0.0, token_ids=pack_ids(ids))


def extended(ids: list[int]) -> Extended:
    return Extended(at=0.0, token_ids=pack_ids(ids))


def generated(ids: list[int], logprobs: list[float], version: int = 1, **fields: Any) -> Generated:
    spans = fields.pop("spans", [(version, 0, 0, len(ids))])
    fields = {"finish": "stop", "generator": "g", "seconds": 0.5, **fields}
    return Generated(at=0.0, token_ids=pack_ids(ids), logprobs=pack_logprobs(logprobs), spans=spans, **fields)


def columns(sample: Sample) -> dict[str, list[Any]]:
    logprobs = [round(float(value), 4) for value in sample.logprobs]
    return {"ids": sample.token_ids.tolist(), "mask": sample.loss_mask.tolist(), "logprobs": logprobs, "versions": sample.versions.tolist()}


PROMPT = [1, 7, 3, 4, 2]
TOOL = [4, 15, 16, 3, 4, 2]


@pytest.mark.parametrize(
    ("entries", "ids", "mask"),
    [
        pytest.param(
            [
                prompted(PROMPT),
                generated([12, 8, 10, 13, 3], [-0.1, -1.2, -0.9, -0.2, -0.05]),
                extended(TOOL),
                generated([20, 21, 3], [-0.7] * 3),
            ],
            [[1, 7, 3, 4, 2, 12, 8, 10, 13, 3, 4, 15, 16, 3, 4, 2, 20, 21, 3]],
            [[0] * 5 + [1] * 5 + [0] * 6 + [1] * 3],
            id="case-001",
        ),
        pytest.param(
            [
                prompted(PROMPT),
                generated([8, 10, 3], [-0.5, -0.4, -4.605]),
                extended(TOOL),
                generated([20, 21], [-0.7, -0.6], finish="length"),
            ],
            [[1, 7, 3, 4, 2, 8, 10, 3, 4, 15, 16, 3, 4, 2, 20, 21]],
            [[0] * 5 + [1] * 3 + [0] * 6 + [1] * 2],
            id="case-002",
        ),
        pytest.param(
            [
                prompted(PROMPT),
                generated([22, 24, 23, 16, 3], [-0.1] * 5),
                prompted([1, 7, 3, 4, 2, 16, 3, 4, 1, 7, 3, 4, 2]),
                generated([20, 21, 3], [-0.2] * 3),
            ],
            [[1, 7, 3, 4, 2, 22, 24, 23, 16, 3], [1, 7, 3, 4, 2, 16, 3, 4, 1, 7, 3, 4, 2, 20, 21, 3]],
            [[0] * 5 + [1] * 5, [0] * 13 + [1] * 3],
            id="case-005",
        ),
        pytest.param(
            [prompted(PROMPT), generated([9, 3], [-0.4, -0.1]), extended(TOOL), generated([19, 3], [-0.2, -0.1])],
            [[1, 7, 3, 4, 2, 9, 3, 4, 15, 16, 3, 4, 2, 19, 3]],
            [[0] * 5 + [1] * 2 + [0] * 6 + [1] * 2],
            id="case-006",
        ),
        pytest.param([prompted(PROMPT)], [PROMPT], [[0] * 5], id="nothing-sampled"),
        pytest.param(
            [prompted(PROMPT), generated([9, 3], [-0.4, -0.1]), prompted([1, 2])],
            [[1, 7, 3, 4, 2, 9, 3]],
            [[0] * 5 + [1] * 2],
            id="last-sample-empty",
        ),
        pytest.param(
            [
                prompted(PROMPT),
                generated([8], [-0.5], finish="abort"),
                generated([], [], finish="abort", discarded=True),
                generated([9, 3], [-0.4, -0.1]),
            ],
            [[1, 7, 3, 4, 2, 9, 3]],
            [[0] * 5 + [1] * 2],
            id="sampled-anew",
        ),
        pytest.param([], [], [], id="not-begun"),
    ],
)
def test_ids_and_mask(entries: list[AnyEntry], ids: list[list[int]], mask: list[list[int]]) -> None:
    samples = build_samples(entries)
    assert [sample.token_ids.tolist() for sample in samples] == ids
    assert [sample.loss_mask.tolist() for sample in samples] == mask


def test_the_sampled_end_token_keeps_its_logprob() -> None:
    """case-002: the engine's own value, not 0.0."""
    (sample,) = build_samples([prompted(PROMPT), generated([8, 10, 3], [-0.5, -0.4, -4.605])])
    assert float(sample.logprobs[7]) == pytest.approx(-4.605)
    assert sample.prompt_len == 5


def test_each_token_knows_its_version() -> None:
    """case-059: a turn cut by a weight update goes on from its own ids."""
    first = generated([8, 10], [-0.5, -0.4], version=4, finish="abort")
    (sample,) = build_samples([prompted(PROMPT), first, generated([11, 16, 3], [-0.3, -0.2, -0.1], version=5)])
    assert columns(sample) == {
        "ids": [1, 7, 3, 4, 2, 8, 10, 11, 16, 3],
        "mask": [0] * 5 + [1] * 5,
        "logprobs": [0.0] * 5 + [-0.5, -0.4, -0.3, -0.2, -0.1],
        "versions": [-1] * 5 + [4, 4, 5, 5, 5],
    }


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        pytest.param(generated([20, 21], [-0.3]), "logprob_mismatch", id="case-003"),
        pytest.param(generated([20, 21], [-0.3, math.inf]), "non_finite_logprob", id="infinite"),
        pytest.param(generated([16, 3], [-0.4, -math.inf]), "non_finite_logprob", id="case-078"),
        pytest.param(generated([16, 3], [math.nan, -0.1]), "non_finite_logprob", id="nan"),
        pytest.param(generated([16, 3], [-0.4, -0.1], spans=[(1, 0, 0, 1)]), "cover 1 of 2", id="spans-too-short"),
        pytest.param(generated([16, 3], [-0.4, -0.1], spans=[(1, 0, 1, 2)]), "does not follow", id="spans-with-a-gap"),
        pytest.param(generated([16], [-0.4], spans=[(2**31, 0, 0, 1)]), "does not follow", id="version-too-large"),
        pytest.param(generated([-1], [-0.4]), "negative", id="negative-id"),
    ],
)
def test_what_does_not_fit_is_refused(entry: Generated, why: str) -> None:
    with pytest.raises(MisalignedTokensError, match=why):
        build_samples([prompted(PROMPT), entry])


def test_torn_bytes_and_a_missing_prompt_are_refused() -> None:
    with pytest.raises(MisalignedTokensError):
        build_samples([Prompted(at=0.0, token_ids=b"12345")])
    with pytest.raises(MisalignedTokensError):
        build_samples([generated([1], [-0.1])])


def test_a_trajectory_is_the_sum_of_its_journal() -> None:
    trajectory = build_trajectory(
        [
            Opened(at=0.0, attempt=2, worker="w", queued_s=1.5),
            prompted(PROMPT),
            generated([9, 3], [-0.4, -0.1], version=7),
            Replied(at=0.0, content="", calls=[]),
            Observed(at=0.0, call_id="c", name="bash", text="ok", seconds=0.25),
            Stopped(at=0.0, reason="answered"),
            Scored(at=0.0, reward=0.5, detail='{"passed": 1}', seconds=2.0),
        ],
        rollout_id="j0-g1-r2",
        index=2,
        outcome="completed",
        ready_s=3.0,
        metadata={"a": 1},
    )
    assert (trajectory.attempt, trajectory.outcome, trajectory.stop_reason) == (2, Outcome.COMPLETED, "answered")
    assert (trajectory.reward, trajectory.reward_detail, trajectory.turns) == (0.5, {"passed": 1}, 1)
    assert (trajectory.timing.queued_s, trajectory.timing.tool_s, trajectory.timing.verify_s, trajectory.timing.ready_s) == (
        1.5,
        0.25,
        2.0,
        3.0,
    )
    assert (trajectory.oldest_version, trajectory.newest_version, len(trajectory.samples)) == (7, 7, 1)


ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
logprob = st.floats(-50, 0, width=32)


@st.composite
def generations(draw: st.DrawFn) -> Generated:
    tokens = draw(ids)
    cuts = sorted({0, len(tokens), *draw(st.lists(st.integers(0, len(tokens)), max_size=2))})
    spans = [(draw(st.integers(0, 9)), 0, start, end) for start, end in pairwise(cuts)]
    logprobs = draw(st.lists(logprob, min_size=len(tokens), max_size=len(tokens)))
    return generated(tokens, logprobs, spans=spans, finish=draw(st.sampled_from(["stop", "abort"])), discarded=draw(st.booleans()))


steps = st.one_of(ids.map(prompted), ids.map(extended), generations())


def token_by_token(entries: list[AnyEntry]) -> list[list[tuple[int, int, float, int]]]:
    """(id, mask, logprob, version) of every token, the slow and obvious way."""
    samples: list[list[tuple[int, int, float, int]]] = []
    turn = 0
    for entry in entries:
        tokens = np.frombuffer(entry.token_ids, "<i4").tolist()  # type: ignore[union-attr]
        if isinstance(entry, Prompted):
            samples.append([])
        if not isinstance(entry, Generated):
            samples[-1] += [(token, 0, 0.0, -1) for token in tokens]
            turn = len(samples[-1])
        elif entry.discarded:
            del samples[-1][turn:]
        else:
            versions = [version for version, _, start, end in entry.spans for _ in range(start, end)]
            samples[-1] += zip(tokens, [1] * len(tokens), np.frombuffer(entry.logprobs, "<f4").tolist(), versions, strict=True)
    trained = [sample for sample in samples if any(mask for _, mask, _, _ in sample)]
    return trained or samples[:1]


@given(first=ids, rest=st.lists(steps, max_size=12))
def test_samples_equal_the_model_that_works_token_by_token(first: list[int], rest: list[AnyEntry]) -> None:
    entries = [prompted(first), *rest]
    samples = build_samples(entries)
    rows = [
        list(zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), sample.logprobs.tolist(), sample.versions.tolist(), strict=True))
        for sample in samples
    ]
    assert rows == token_by_token(entries)
    for sample in samples:
        assert not sample.loss_mask[: sample.prompt_len].any()
        assert (sample.token_ids.dtype, sample.loss_mask.dtype) == (np.int32, np.uint8)
        assert (sample.logprobs.dtype, sample.versions.dtype) == (np.float32, np.int32)
