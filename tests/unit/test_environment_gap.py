"""How far the policy went on since it wrote to the sandbox, and the rollout that begins anew because of it."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import journal
from service.journal import AnyEntry, Call
from service.progress import Environment, Progress
from service.records import JobSpec, Limits, ModelFields
from service.samples import build_trajectory
from workers.loop import BeginAnew, Extend, Freshness, Generate, Step, freshness, next_step

BASH = Call(id="c0", name="bash", arguments="{}")
BAD = Call(id="c0", name="bash", arguments=None, error="bad_json: x")
SUBMIT = Call(id="c0", name="submit", arguments="{}")
PROMPTED = journal.Prompted(at=0.0, token_ids=journal.pack_ids([1, 2, 3]))
EXTENDED = journal.Extended(at=0.0, token_ids=journal.pack_ids([1]))
SCORED = journal.Scored(at=0.0, reward=1.0, detail="{}", seconds=0.0)


def generated(*versions: int, lineage: int = 0, finish: str = "stop", discarded: bool = False) -> journal.Generated:
    """One token of each version."""
    ids = journal.pack_ids(range(len(versions)))
    spans = [(version, lineage, at, at + 1) for at, version in enumerate(versions)]
    logprobs = journal.pack_logprobs([-0.5] * len(versions))
    return journal.Generated(
        at=0.0, token_ids=ids, logprobs=logprobs, spans=spans, finish=finish, generator="g", seconds=0.0, discarded=discarded
    )


def called(*versions: int, call: Call = BASH, **fields: Any) -> list[AnyEntry]:
    """A turn with a call, answered."""
    observed = journal.Observed(at=0.0, call_id="c0", name=call.name, text="", submitted=call.name == "submit")
    return [generated(*versions, **fields), journal.Replied(at=0.0, content="", calls=[call]), observed, EXTENDED]


@pytest.mark.parametrize(
    ("entries", "gap"),
    [
        pytest.param([generated(3, 7)], 0, id="nothing-was-written"),
        pytest.param([*called(3), generated(5)], 2, id="the-version-moved-behind-a-call"),
        pytest.param([*called(3, 4), generated(5, 9)], 1, id="from-the-last-token-before-to-the-first-after"),
        pytest.param([*called(3), *called(8), generated(9)], 5, id="the-largest-of-all"),
        pytest.param([*called(3, call=BAD), generated(9)], 0, id="a-call-that-never-ran"),
        pytest.param([*called(3), *called(3, call=BAD), generated(9)], 6, id="it-keeps-what-ran-before"),
        pytest.param([*called(3, call=SUBMIT), generated(9)], 0, id="submit-writes-nothing"),
        pytest.param([*called(3), generated(9, lineage=1)], 0, id="another-lineage-is-no-distance"),
        pytest.param([*called(3), generated(6, discarded=True, finish="abort"), generated(8)], 5, id="what-was-discarded-came-not-next"),
        pytest.param([*called(5), generated(3)], 0, id="a-generator-that-is-behind"),
    ],
)
def test_the_gap(entries: list[AnyEntry], gap: int) -> None:
    assert Progress([PROMPTED, *entries]).environment.gap == gap
    journal_of_it = [PROMPTED, *entries, journal.Stopped(at=0.0, reason="answered"), SCORED]
    assert build_trajectory(journal_of_it, rollout_id="r", index=0, outcome="completed").environment_gap == gap


@given(st.lists(st.integers(0, 20), min_size=2, max_size=8).map(sorted))
def test_it_is_the_largest_step_of_a_version_that_only_rises(versions: list[int]) -> None:
    environment = Environment()
    for version in versions:
        for entry in called(version):
            environment.apply(entry)
    assert environment.gap == max(after - before for before, after in pairwise(versions))


CUT = [*called(3), generated(3, finish="abort")]


@pytest.mark.parametrize(
    ("entries", "now", "expected"),
    [
        pytest.param(called(3), Freshness(lineage=0, version=5, max_gap=2), Generate(max_new_tokens=40), id="at-the-bound"),
        pytest.param(called(3), Freshness(lineage=0, version=6, max_gap=2), BeginAnew(versions=3), id="beyond-it"),
        pytest.param(called(3), None, Generate(max_new_tokens=40), id="no-bound"),
        pytest.param(called(3, call=BAD), Freshness(lineage=0, version=9, max_gap=0), Generate(max_new_tokens=40), id="nothing-written"),
        pytest.param(CUT, Freshness(lineage=0, version=9, max_gap=0), Generate(max_new_tokens=39), id="a-turn-that-has-begun"),
        pytest.param(called(3)[:3], Freshness(lineage=0, version=9, max_gap=0), Extend(), id="in-a-turn"),
        pytest.param(called(3), Freshness(lineage=1, version=9, max_gap=0), Generate(max_new_tokens=40), id="a-dead-lineage"),
    ],
)
def test_what_follows(entries: list[AnyEntry], now: Freshness | None, expected: Step) -> None:
    limits = Limits(turns=9, tokens=100, turn_tokens=40)
    assert next_step(Progress([PROMPTED, *entries]), limits, context_tokens=1000, freshness=now) == expected


def test_a_rollout_begins_anew_at_most_max_requeues_times() -> None:
    model = ModelFields(tokenizer="t", context_tokens=100)
    job = JobSpec(name="j", model=model, generators=["http://g.example"], max_environment_gap=1, max_requeues=2)
    bounds = [freshness(job, attempt=attempt, lineage=0, version=7) for attempt in (1, 2, 3)]
    assert bounds == [Freshness(lineage=0, version=7, max_gap=1)] * 2 + [None]
    assert freshness(job.model_copy(update={"max_environment_gap": None}), attempt=1, lineage=0, version=7) is None
