"""The simulated trainer's figures: what counts as waiting, which steps count, what was discarded meanwhile."""

from typing import Any

import pytest

from service.trainer.figures import Step, discards, summarise
from service.trainer.options import Pace, TrainerError, TrainerOptions


def step(version: int = 1, *, wait_s: float = 1.0, staleness: tuple[int, ...] = (0, 1)) -> Step:
    return Step(version=version, wait_s=wait_s, train_s=2.0, publish_s=1.0, staleness=staleness, samples=8, tokens=400)


def test_shares_and_rates_are_of_the_whole_time() -> None:
    summary = summarise([step(), step(2, wait_s=5.0, staleness=(1, 3))], warm_up=0, version=2, discarded={})
    assert (summary.seconds, summary.wait_fraction, summary.publish_fraction) == (12.0, 0.5, pytest.approx(2 / 12))
    assert (summary.steps_per_s, summary.samples_per_s, summary.tokens_per_s) == pytest.approx((2 / 12, 16 / 12, 800 / 12))
    assert summary.staleness is not None
    assert (summary.staleness.mean, summary.staleness.max, summary.staleness.counts) == (1.25, 3, {0: 1, 1: 2, 3: 1})


def test_the_warm_up_is_left_out() -> None:
    steps = [step(wait_s=100.0, staleness=(9,)), step(2)]
    summary = summarise(steps, warm_up=1, version=2, discarded={})
    assert (summary.steps, summary.warm_up, summary.seconds) == (1, 1, 4.0)
    assert summary.staleness is not None
    assert summary.staleness.max == 1


def test_without_a_step_there_are_no_figures() -> None:
    summary = summarise([], warm_up=3, version=0, discarded={}, interrupted=True)
    assert (summary.steps, summary.warm_up, summary.steps_per_s, summary.staleness) == (0, 0, 0.0, None)


def test_what_was_discarded_before_is_not_counted() -> None:
    before: dict[str, Any] = {"requeued": 3, "cancelled": 0, "dropped": {"stale": 2}, "failed": {}}
    after: dict[str, Any] = {"requeued": 5, "cancelled": 1, "dropped": {"stale": 2, "zero_variance": 4}, "failed": {"task": 1}}
    assert discards(before, after) == {"requeued": 2, "cancelled": 1, "dropped: zero_variance": 4, "failed: task": 1}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        pytest.param({}, "--job", id="no-job"),
        pytest.param({"job": "j1", "steps": 3, "warm_up": 3}, "--warm-up", id="nothing-after-the-warm-up"),
        pytest.param({"job": "j1", "epochs": 2}, "--tasks", id="passes-over-nothing"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(TrainerError, match=named):
        TrainerOptions(url="http://127.0.0.1:1", pace=Pace(step_s=1.0), **options)
