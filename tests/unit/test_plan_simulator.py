"""The planner's simulator against published runs and against what must always hold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from service.plan.errors import PlanError
from service.plan.forms import closed_forms
from service.plan.presets import PRESETS
from service.plan.results import Reading
from service.plan.setting import Gate, QueueDrop, QueueMax, Rule, Setting
from service.plan.simulator import simulate
from tests.plan_settings import setting

GROUPS = 6_000


def test_the_long_response_run_waits_as_published() -> None:
    found = simulate(PRESETS["long-responses"].options.setting(), groups=GROUPS)
    assert found.wait_share == pytest.approx(0.30, abs=0.02)
    assert found.seconds / found.steps == pytest.approx(262.6, rel=0.02)
    assert found.consumed_samples_per_s == pytest.approx(1.95, abs=0.03)
    assert found.staleness.max <= 16


@pytest.mark.parametrize(
    ("preset", "wait"), [("tool-use", (0.72, 0.76)), ("sandbox-scaling", (0.30, 0.60)), ("partial-rollouts", (0.57, 0.63))]
)
def test_the_other_published_runs_wait_as_published(preset: str, wait: tuple[float, float]) -> None:
    found = simulate(PRESETS[preset].options.setting(), groups=2_000)
    assert wait[0] <= found.wait_share <= wait[1]


@pytest.mark.parametrize(
    ("concurrency", "batch", "queue", "rho", "tail", "predicted", "measured"),
    [
        pytest.param(120, 240, 2, 0.63, 1.42, 1.34, 1.26, id="small-concurrency"),
        pytest.param(240, 120, 2, 0.92, 1.43, 3.86, 3.59, id="small-batch"),
        pytest.param(128, 128, 2, 1.07, 1.44, 3.29, 3.09, id="train-bound"),
        pytest.param(128, 128, 1, 1.14, 1.45, 2.24, 2.01, id="train-bound-short-queue"),
    ],
)
def test_runs_of_which_staleness_was_measured(
    concurrency: int, batch: int, queue: float, rho: float, tail: float, predicted: float, measured: float
) -> None:
    found = simulate(setting(concurrency=concurrency, batch=batch, rho=rho, tail=tail, rule=QueueDrop(batches=queue)), groups=GROUPS)
    assert found.staleness.mean == pytest.approx(measured, abs=0.3)
    assert found.staleness.mean == pytest.approx(predicted, abs=0.1)


@pytest.mark.parametrize(
    ("sigma", "rho", "form", "simulated"),
    [
        (0.28, 0.5, 1.957, 1.952),
        (0.28, 0.8, 2.257, 2.253),
        (0.28, 1.25, 2.866, 2.906),
        (0.28, 1.5, 2.471, 2.463),
        (0.5, 0.8, 2.695, 2.690),
        (0.5, 1.25, 3.216, 3.226),
        (0.8, 0.8, 3.393, 3.383),
        (0.8, 1.25, 3.774, 3.778),
    ],
)
def test_an_evicting_queue_is_as_stale_as_others_simulated(sigma: float, rho: float, form: float, simulated: float) -> None:
    queued = setting(concurrency=240, batch=240, rho=rho, sigma=sigma, rule=QueueDrop(batches=2))
    found = simulate(queued, groups=GROUPS)
    assert closed_forms(queued).staleness == pytest.approx(form, abs=0.02)
    assert found.staleness.mean == pytest.approx(simulated, abs=0.05)
    assert found.staleness.mean == pytest.approx(found.staleness.pre_queue_mean + found.staleness.in_queue_mean)
    assert found.wait_share == pytest.approx(max(0.0, 1 - rho), abs=0.02)
    assert found.discarded_share == pytest.approx(max(0.0, 1 - 1 / rho), abs=0.02)
    assert found.length_bias == pytest.approx(1.0, abs=0.02)


def test_the_mean_is_no_bound() -> None:
    found = simulate(setting(concurrency=240, batch=240, rho=0.8, sigma=0.8, rule=QueueDrop(batches=2)), groups=GROUPS)
    assert found.staleness.max > 4 * found.staleness.mean


@pytest.mark.parametrize(("budget", "wait"), [(1, 0.79), (2, 0.64), (4, 0.37)])
def test_a_gate_that_binds_has_its_budget_for_mean(budget: int, wait: float) -> None:
    gated = setting(concurrency=512, batch=256, rho=0.7, sigma=0.6, rule=Gate(budget=budget, stale_policy="pace"))
    found = simulate(gated, groups=GROUPS)
    assert found.staleness.mean == pytest.approx(budget, abs=0.02)
    assert found.staleness.max > 2 * budget
    assert found.wait_share == pytest.approx(wait, abs=0.015)


def test_a_queue_sized_for_a_budget_keeps_it_on_average() -> None:
    found = simulate(setting(concurrency=240, batch=240, rho=1.25, tail=1.457, rule=QueueDrop(batches=3.42)), groups=20_000)
    assert found.staleness.mean == pytest.approx(4.0, abs=0.02)


def test_cutting_by_age_favours_short_rollouts_and_evicting_does_not() -> None:
    tailed = setting(concurrency=240, batch=240, rho=1.25, sigma=0.8, rule=QueueMax(max_staleness=2))
    by_age = simulate(tailed, groups=GROUPS)
    evicting = simulate(replace(tailed, rule=QueueDrop(batches=1)), groups=GROUPS)
    stricter = simulate(replace(tailed, rule=QueueMax(max_staleness=1)), groups=GROUPS)
    assert by_age.length_bias == pytest.approx(0.84, abs=0.03)
    assert stricter.length_bias < by_age.length_bias
    assert evicting.length_bias == pytest.approx(1.0, abs=0.01)


def test_a_tighter_queue_is_less_stale() -> None:
    ages = [
        simulate(setting(concurrency=128, batch=128, rho=1.07, tail=1.44, rule=QueueDrop(batches=queue)), groups=GROUPS).staleness.mean
        for queue in (1, 2)
    ]
    assert ages[0] / ages[1] == pytest.approx(1 - 0.35, abs=0.1)


@pytest.mark.parametrize("policy", ["requeue", "drop", "pace"])
def test_matched_rates_under_a_budget_of_four_hardly_wait(policy: str) -> None:
    gated = setting(concurrency=256, batch=256, rho=1.0, sigma=0.3, rule=Gate(budget=4, stale_policy=policy))  # type: ignore[arg-type]
    assert simulate(gated, groups=GROUPS).wait_share < 0.05


def test_a_budget_of_zero_is_on_policy() -> None:
    found = simulate(setting(concurrency=240, batch=240, rho=1.0, sigma=0.5, rule=Gate(budget=0)), groups=2_000)
    assert found.staleness.max == 0
    assert found.discarded_share == 0
    assert found.wait_share == pytest.approx(
        closed_forms(setting(concurrency=240, batch=240, rho=1.0, sigma=0.5, rule=Gate(budget=0))).wait_fraction, abs=0.01
    )


# --------------------------------------------------------------------------------------------------------------- sandboxes, updates


def test_sandboxes_that_wait_for_their_start_make_rollouts_longer_and_no_more() -> None:
    crowded = setting(concurrency=240, batch=240, rho=0.7, sigma=0.5, rule=Gate(budget=8), sandbox_s=100, max_starting=10)
    found = simulate(crowded, groups=2_000)
    assert found.generated_samples_per_s == pytest.approx(10 / 100, rel=0.02)
    assert simulate(replace(crowded, max_starting=None), groups=2_000).generated_samples_per_s > 0.18


def test_full_generators_make_longer_rollouts_and_no_more() -> None:
    roomy = setting(concurrency=128, batch=256, rho=0.5, sigma=0.4, rule=Gate(budget=8), generators=2, generator_tokens_per_s=64.0)
    crowded = replace(roomy, concurrency=256)
    found, more = simulate(roomy, groups=2_000), simulate(crowded, groups=2_000)
    assert found.generated_samples_per_s == pytest.approx(0.128, rel=0.05)
    assert more.generated_samples_per_s == pytest.approx(0.128, rel=0.03)
    assert more.staleness.pre_queue_mean == pytest.approx(2 * found.staleness.pre_queue_mean, rel=0.1)
    assert simulate(crowded.scaled(2), groups=2_000).generated_samples_per_s == pytest.approx(0.256, rel=0.03)


def test_an_update_holds_rollouts_and_trainer_up() -> None:
    still = setting(concurrency=240, batch=240, rho=0.7, sigma=0.5, rule=Gate(budget=8))
    pausing = replace(still, update_s=300.0)
    found, before = simulate(pausing, groups=2_000), simulate(still, groups=2_000)
    assert found.seconds / found.steps == pytest.approx(before.seconds / before.steps + 300, rel=0.02)
    rarely = simulate(replace(pausing, steps_per_version=5), groups=2_000)
    assert rarely.seconds / rarely.steps == pytest.approx(before.seconds / before.steps + 60, rel=0.02)


def test_extra_members_shorten_the_tail() -> None:
    plain = setting(concurrency=240, batch=240, rho=0.7, sigma=0.8, rule=Gate(budget=8))
    redundant = replace(plain, extra_members=2)
    assert redundant.times.tail < 0.7 * plain.times.tail
    assert simulate(redundant, groups=2_000).staleness.pre_queue_mean < 0.8 * simulate(plain, groups=2_000).staleness.pre_queue_mean


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"acceptance": 0.5}, id="filters"),
        pytest.param({"steps_per_version": 3}, id="several-steps-a-version"),
        pytest.param({"update_s": 200.0}, id="updates"),
        pytest.param({"tool_s": 500.0, "tool_sigma": 1.0, "sandbox_s": 50.0, "verify_s": 20.0}, id="environment"),
        pytest.param({"extra_members": 1}, id="extra"),
        pytest.param({"max_sandboxes": 120}, id="sandbox-cap"),
    ],
)
def test_forms_and_simulation_agree(other: dict[str, float]) -> None:
    gated = replace(setting(concurrency=240, batch=240, rho=0.7, sigma=0.5, rule=Gate(budget=12, stale_policy="pace")), **other)  # type: ignore[arg-type]
    found, form = simulate(gated, groups=4_000), closed_forms(gated)
    assert form.staleness is not None
    assert found.staleness.mean == pytest.approx(form.staleness, abs=0.15)
    assert found.wait_share == pytest.approx(form.wait_fraction, abs=0.02)
    assert found.in_flight_mean == pytest.approx(form.in_flight, rel=0.03)


# --------------------------------------------------------------------------------------------------------------------- always


@st.composite
def settings(draw: st.DrawFn) -> Setting:
    group_size, groups_per_step = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    extra = draw(st.integers(0, 2))
    rule: Rule = draw(
        st.one_of(
            st.builds(
                Gate,
                budget=st.integers(0, 4),
                stale_policy=st.sampled_from(["requeue", "drop", "pace"]),
                max_requeues=st.integers(0, 2),
            ),
            st.builds(QueueDrop, batches=st.floats(1.0, 4.0)),
            st.builds(QueueMax, max_staleness=st.integers(0, 4)),
        )
    )
    return setting(
        concurrency=draw(st.integers(group_size + extra, 80)),
        batch=group_size * groups_per_step,
        group_size=group_size,
        rho=draw(st.floats(0.3, 3.0)),
        sigma=draw(st.floats(0.0, 1.2)),
        rule=rule,
        extra_members=extra,
        steps_per_version=draw(st.integers(1, 3)),
        acceptance=draw(st.floats(0.2, 1.0)),
        update_s=draw(st.sampled_from([0.0, 50.0])),
        sandbox_s=draw(st.sampled_from([0.0, 30.0])),
        max_starting=draw(st.sampled_from([None, 2])),
    )


@given(settings(), st.integers(0, 2**32 - 1))
@hypothesis_settings(deadline=None, max_examples=40)
def test_what_always_holds(planned: Setting, seed: int) -> None:
    found = simulate(planned, groups=200, seed=seed)
    ends = found.ends
    assert ends.begun == ends.trained + ends.filtered + ends.evicted + ends.stale + ends.out
    assert 0 <= found.wait_share < 1
    assert found.in_flight_mean <= planned.slots + 1e-6
    assert found.staleness.max >= found.staleness.p95 >= found.staleness.p50 >= 0
    if planned.capacity is not None:
        assert found.charged_max <= planned.capacity
        assert ends.out <= planned.capacity
    match planned.rule:
        case Gate(budget=bound, stale_policy="requeue" | "drop") | QueueMax(max_staleness=bound):
            assert found.staleness.max <= bound
    assert simulate(planned, groups=200, seed=seed) == found


def test_another_seed_is_another_run() -> None:
    queued = setting(concurrency=240, batch=240, rho=0.8, sigma=0.5, rule=QueueDrop(batches=2))
    assert simulate(queued, groups=1_000, seed=1) != simulate(queued, groups=1_000, seed=2)


def test_a_run_that_filters_nearly_all_is_given_up() -> None:
    with pytest.raises(PlanError, match="--acceptance"):
        simulate(setting(concurrency=16, batch=8, rho=0.8, sigma=0.5, rule=Gate(budget=1), acceptance=1e-4), groups=100)


def test_a_surplus_that_nothing_holds_back_is_no_plan() -> None:
    with pytest.raises(PlanError, match="--concurrency: generators make 30 times what the trainer consumes"):
        simulate(setting(concurrency=240, batch=240, rho=30, sigma=0.5, rule=QueueDrop(batches=2)))
    gated = setting(concurrency=240, batch=240, rho=30, sigma=0.5, rule=Gate(budget=2))
    assert simulate(gated, groups=1_000).wait_share == 0


def test_a_controller_sees_each_step_and_sets_what_may_be_in_flight() -> None:
    seen: list[Reading] = []

    def half(reading: Reading) -> int:
        seen.append(reading)
        return 120

    queued = setting(concurrency=240, batch=240, rho=0.8, sigma=0.5, rule=QueueDrop(batches=2))
    found = simulate(queued, groups=2_000, control=half)
    assert found.in_flight_mean == pytest.approx(120, abs=5)
    assert found.wait_share == pytest.approx(0.6, abs=0.05)
    assert [reading.version for reading in seen] == list(range(seen[0].version, seen[0].version + len(seen)))
    assert all(reading.step_s > 0 and 0 <= reading.waited_s <= reading.step_s for reading in seen)
