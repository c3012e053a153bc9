"""The planner's closed forms against published figures, and the rules of other systems against their own tests."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from service.plan import forms
from service.plan.errors import PlanError
from service.plan.gates import (
    SYSTEMS,
    areal_capacity,
    conventions,
    nemo_usable,
    prime_rl_oldest,
    verl_capacity,
    verl_required,
)
from service.plan.lengths import Lognormal, Measured, at_least, sigma_of_tail, tail_multiplier
from service.plan.setting import Gate, QueueDrop
from tests.plan_settings import setting

SIGMAS = st.floats(min_value=0.05, max_value=1.5)


def test_the_identities_of_throughput_give_the_published_wait() -> None:
    consumed, accepted = 2.75, 1.95
    rho = accepted / consumed
    assert forms.wait_fraction(rho) == pytest.approx(0.30, abs=0.01)
    assert 512 / consumed == pytest.approx(186.2, abs=0.05)
    assert forms.step_wall(512, accepted, consumed) == pytest.approx(262.6, abs=0.05)
    assert forms.consumption(512, 186.2) == pytest.approx(consumed, abs=0.001)


def test_littles_law_both_ways() -> None:
    assert forms.in_flight(forms.production(1536, 590.0), 590.0) == pytest.approx(1536)


@pytest.mark.parametrize(("tail", "expected"), [(1.5, 5.2), (2, 6.7), (2.5, 8.2), (3, 9.7)])
def test_staleness_of_the_long_response_run_by_its_tail(tail: float, expected: float) -> None:
    found = forms.pre_queue(concurrency=1536, tail=tail, batch=512, rho=0.71) + forms.in_queue(rho=0.71, queue=1)
    assert found == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    ("concurrency", "batch", "queue", "rho", "tail", "published"),
    [
        pytest.param(120, 240, 2, 0.63, 1.42, 1.34, id="small-concurrency"),
        pytest.param(240, 120, 2, 0.92, 1.43, 3.78, id="small-batch"),
        pytest.param(128, 128, 2, 1.07, 1.44, 3.25, id="train-bound"),
        pytest.param(128, 128, 1, 1.14, 1.45, 2.21, id="train-bound-short-queue"),
        pytest.param(240, 240, 2, 0.5, 1.457, 1.957, id="half"),
        pytest.param(240, 240, 2, 1.25, 1.457, 2.866, id="train-bound-1.25"),
        pytest.param(240, 240, 2, 1.5, 1.457, 2.471, id="train-bound-1.5"),
    ],
)
def test_staleness_behind_a_queue(concurrency: int, batch: int, queue: float, rho: float, tail: float, published: float) -> None:
    before = forms.pre_queue(concurrency=concurrency, tail=tail, batch=batch, rho=rho)
    assert before + forms.in_queue(rho=rho, queue=queue) == pytest.approx(published, abs=0.01)


def test_equal_rates_are_the_middle_of_their_two_sides() -> None:
    sides = [forms.in_queue(rho=rho, queue=3.0) for rho in (1 - 1e-5, 1 + 1e-5)]
    assert sides == pytest.approx([1.0, 3.0], abs=1e-3)
    assert forms.in_queue(rho=1.0, queue=3.0) == 2.0


def test_the_queue_that_a_budget_allows() -> None:
    assert forms.queue_for(4.0, before=1.457 / 1.25, rho=1.25) == pytest.approx(3.42, abs=0.005)
    assert forms.queue_for(4.0, before=1.457 / 1.5, rho=1.5) == pytest.approx(4.29, abs=0.005)
    assert forms.queue_for(8.0, before=1.457 / 1.25, rho=1.25) == pytest.approx(8.42, abs=0.005)
    assert forms.queue_for(4.0, before=1.457, rho=0.8) == 1.0
    with pytest.raises(PlanError, match="lower --concurrency"):
        forms.queue_for(1.0, before=1.457, rho=0.8)


@given(st.floats(1.05, 3.0), st.floats(0.2, 5.0), st.floats(0.0, 20.0))
@hypothesis_settings(deadline=None)
def test_the_inverse_forms_undo_the_forms(rho: float, before: float, above: float) -> None:
    budget = before + forms.in_queue(rho=rho, queue=1.0) + above
    queue = forms.queue_for(budget, before=before, rho=rho)
    assert before + forms.in_queue(rho=rho, queue=queue) == pytest.approx(budget)
    concurrency = forms.concurrency_for(budget, tail=1.5, batch=240, rho=rho, queue=1.0)
    found = forms.pre_queue(concurrency=concurrency, tail=1.5, batch=240, rho=rho) + forms.in_queue(rho=rho, queue=1.0)
    assert found == pytest.approx(budget)


def test_the_smallest_budget_that_holds_nobody_up() -> None:
    assert forms.budget_for(concurrency=240, tail=1.457, batch=240, rho=0.8) == 3
    assert forms.budget_for(concurrency=240, tail=1.0, batch=240, rho=1.0) == 2


@pytest.mark.parametrize(("budget", "wait"), [(1, 0.79), (2, 0.64), (4, 0.37)])
def test_a_gate_that_binds_in_closed_form(budget: int, wait: float) -> None:
    gated = setting(concurrency=512, batch=256, rho=0.7, sigma=0.6, rule=Gate(budget=budget, stale_policy="pace"))
    found = forms.closed_forms(gated)
    assert found.binding == "gate"
    assert found.staleness == budget
    assert found.wait_fraction == pytest.approx(wait, abs=0.02)


def test_who_binds() -> None:
    slow = setting(concurrency=240, batch=240, rho=0.8, sigma=0.3, rule=QueueDrop(batches=2))
    assert forms.closed_forms(slow).binding == "generation"
    assert forms.closed_forms(setting(concurrency=240, batch=240, rho=1.2, sigma=0.3, rule=QueueDrop(batches=2))).binding == "trainer"
    starts = setting(concurrency=240, batch=240, rho=0.8, sigma=0.3, rule=QueueDrop(batches=2), sandbox_s=100, max_starting=10)
    found = forms.closed_forms(starts)
    assert found.binding == "starts"
    assert found.production == pytest.approx(0.1)
    assert found.latency_s == pytest.approx(2400)  # Little: 240 in flight at 0.1 a second


def test_a_filter_takes_its_share_of_the_rate() -> None:
    easy = setting(concurrency=240, batch=240, rho=0.8, sigma=0.3, rule=QueueDrop(batches=2), acceptance=0.45)
    assert forms.closed_forms(easy).rho == pytest.approx(0.8 * 0.45)


# ------------------------------------------------------------------------------------------------------------------------ lengths


@pytest.mark.parametrize(("sigma", "tail"), [(0.0, 1.0), (0.28, 1.457), (0.5, 1.895), (0.8, 2.593)])
def test_tail_multipliers_of_groups_of_eight(sigma: float, tail: float) -> None:
    assert tail_multiplier(Lognormal(uncut_mean=123.0, sigma=sigma), 8) == pytest.approx(tail, rel=0.01)


@given(st.floats(1.0, 4.0), st.sampled_from([2, 8, 64]))
@hypothesis_settings(deadline=None, max_examples=20)
def test_the_sigma_of_a_tail_has_that_tail(tail: float, group_size: int) -> None:
    tail = min(tail, 1.8) if group_size == 2 else tail
    assert tail_multiplier(Lognormal(uncut_mean=5.0, sigma=sigma_of_tail(tail, group_size)), group_size) == pytest.approx(tail, abs=1e-3)


@given(SIGMAS, st.integers(1, 12), st.integers(0, 4))
@hypothesis_settings(deadline=None, max_examples=25)
def test_ordered_means_are_those_of_draws(sigma: float, k: int, beyond: int) -> None:
    lengths = Lognormal(uncut_mean=100.0, sigma=sigma, cap=400.0)
    drawn = np.sort(lengths.draw(np.random.default_rng(1), (40_000, k + beyond)), axis=1)
    assert lengths.ordered_mean(k, k + beyond) == pytest.approx(drawn[:, k - 1].mean(), rel=0.03)


@pytest.mark.parametrize("tail", [0.9, 2.0, float("nan")])
def test_no_pair_has_a_tail_beyond_two(tail: float) -> None:
    with pytest.raises(PlanError, match="--tail"):
        sigma_of_tail(tail, 2)


def test_measured_lengths_are_their_own_distribution() -> None:
    measured = Measured(np.array([4.0, 1.0, 3.0, 2.0]))
    assert measured.mean == 2.5
    assert measured.ordered_mean(2, 2) == pytest.approx((1 * 1 + 2 * 3 + 3 * 5 + 4 * 7) / 16)
    assert set(measured.draw(np.random.default_rng(0), (100,))) == {1.0, 2.0, 3.0, 4.0}
    assert measured.capped(2.0).mean == 1.75


def test_the_mean_of_a_cut_lognormal() -> None:
    lengths = Lognormal(uncut_mean=100.0, sigma=0.7)
    assert lengths.mean == pytest.approx(100.0, rel=1e-5)
    assert lengths.capped(100.0).mean < 90.0
    assert lengths.capped(100.0).quantile(0.99) == 100.0


@given(st.integers(1, 40), st.integers(1, 40))
@hypothesis_settings(deadline=None)
def test_at_least_is_a_distribution(k: int, more: int) -> None:
    n = k + more
    p = np.linspace(0.0, 1.0, 33)
    found = at_least(k, n, p)
    assert found[0] == 0.0
    assert found[-1] == 1.0
    assert np.all(np.diff(found) >= -1e-12)
    exact = sum(math.comb(n, j) for j in range(k, n + 1)) / 2**n
    assert found[16] == pytest.approx(exact)


# -------------------------------------------------------------------------------------------------------------- other systems' rules


@pytest.mark.parametrize(
    ("max_concurrent", "batch", "max_staleness", "version", "accepted", "running", "expected"),
    [
        (100, 4, 2, 0, 0, 0, 12),
        (100, 4, 2, 5, 0, 0, 32),
        (100, 32, 10, 0, 0, 0, 100),
        (10, 4, 2, 0, 0, 3, 7),
        (20, 4, 2, 0, 5, 0, 7),
        (5, 2, 10, 0, 0, 3, 2),
    ],
)
def test_areal(max_concurrent: int, batch: int, max_staleness: int, version: int, accepted: int, running: int, expected: int) -> None:
    found = areal_capacity(
        max_concurrent=max_concurrent, batch=batch, max_staleness=max_staleness, version=version, accepted=accepted, running=running
    )
    assert found == expected


def test_areal_with_too_many_running_is_below_zero() -> None:
    assert areal_capacity(max_concurrent=3, batch=2, max_staleness=1, version=0, running=10) < 0


def test_verl() -> None:
    assert verl_required(mini_batch=32, require_batches=4) == 128
    assert verl_capacity(mini_batch=32, require_batches=4, trigger_sync_step=4, threshold=0.5) == 768


def test_nemo() -> None:
    assert [nemo_usable(made_at=10, step=step, max_age=1) for step in (10, 11, 12)] == [True, True, False]
    assert forms.gate_capacity(1, 64) == 128


@pytest.mark.parametrize(("step", "max_off_policy"), [(1, 0), (10, 8), (3, 8)])
def test_prime_rl(step: int, max_off_policy: int) -> None:
    assert prime_rl_oldest(step=step, max_off_policy=max_off_policy) == (step - 1) - max_off_policy


@given(st.integers(0, 20), st.integers(1, 64), st.integers(1, 16))
@hypothesis_settings(deadline=None)
def test_one_budget_lets_as_many_groups_out_elsewhere(budget: int, groups_per_step: int, group_size: int) -> None:
    gated = setting(concurrency=1024, batch=groups_per_step * group_size, rho=1, sigma=0.3, group_size=group_size, rule=Gate(budget=budget))
    found = {row.system: row for row in conventions(gated)}
    groups = (budget + 1) * groups_per_step
    assert list(found) == list(SYSTEMS)
    assert found["rollway"].out == found["verl"].out == found["nemo"].out == groups
    assert found["areal"].out == groups * group_size
    assert found["prime-rl"].out is None
