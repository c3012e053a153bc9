"""The figures and the bottleneck sentence: reference cases, and what holds for all figures."""

import math
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.store import LUA
from service.throughput import AWAY_S, ENOUGH_WAIT, MAX_WINDOW_S, SLOT_S, Figures, Limit, Now, RolloutTime, Staleness, bottleneck, figures

IDLE = Now(in_flight_rollouts=0, queue_groups=0, capacity_groups=8, backlog_groups=100, staleness_budget=1, in_flight_cap=256)


def figures_of(*slots: dict[str, Any], trainer: dict[str, Any] | None = None, at: float = 1000.0, measured_s: float = 100.0) -> Figures:
    return figures(slots, trainer or {}, at=at, measured_s=measured_s, now=IDLE)


def rates(*, accepted: float, consumption: float, wait: float | None = None, **known: Any) -> Figures:
    """Figures of a job that makes and takes so many samples a second."""
    rho = accepted / consumption
    base = figures_of()
    waits = max(0.0, 1 - rho) if wait is None else wait
    return replace(
        base,
        **{
            "accepted_samples_per_s": accepted,
            "generated_samples_per_s": accepted,
            "consumption_samples_per_s": consumption,
            "rho": rho,
            "wait_fraction": waits,
            "time_s": RolloutTime(queue=1.0, sandbox=5.0, generate=90.0, tool=4.0, verify=1.0),
        }
        | known,
    )


def test_the_store_and_the_reader_mean_the_same_slots() -> None:
    text = (LUA / "rates.lua").read_text()
    slot_s, slots = map(int, re.findall(r"^local SLOT_S, SLOTS = (\d+), (\d+)$", text, re.MULTILINE)[0])
    assert (slot_s, slot_s * slots) == (SLOT_S, MAX_WINDOW_S)
    assert f"local AWAY_S = {AWAY_S:.0f} " in text


# --------------------------------------------------------------------------------------------------------------------- figures


def test_reference_case_r1_is_measured() -> None:
    """Three steps of 512 samples: 186.2 s of training after 76.4 s of waiting each, while 1.95 samples/s become ready."""
    step = {"at": 1, "steps": 1, "trained": 512, "waited_s": 76.4, "computed_s": 186.2}
    made = {"at": 2, "generated": 1536, "accepted": 1536}
    found = figures_of(step, step, step, made, measured_s=3 * 262.6)
    assert found.consumption_samples_per_s == pytest.approx(2.75, rel=0.001)
    assert found.consumed_samples_per_s == pytest.approx(1.95, rel=0.001)
    assert found.rho == pytest.approx(0.709, abs=0.001)
    assert found.wait_fraction == pytest.approx(0.291, abs=0.001)


def test_nothing_measured_is_null_not_zero() -> None:
    found = figures_of()
    measured = {field.name for field in fields(Figures) if getattr(found, field.name) is not None}
    rates_of_nothing = {"generated_samples_per_s", "accepted_samples_per_s"}
    counts = {"in_flight_rollouts", "queue_groups", "capacity_groups"}
    assert measured == {"window_s", "staleness", "time_s"} | rates_of_nothing | counts
    assert found.staleness == Staleness(mean=None, p50=None, p95=None, max=None, pre_queue_mean=None, in_queue_mean=None)
    assert found.time_s == RolloutTime(queue=None, sandbox=None, generate=None, tool=None, verify=None)


def test_staleness_of_leased_groups() -> None:
    first = {"leased": 18, "staleness": 18, "pre_queue": 9, "staleness:1": 18}
    second = {"leased": 2, "staleness": 10, "pre_queue": 3, "staleness:4": 1, "staleness:6": 1}
    found = figures_of(first, second).staleness
    assert found == Staleness(mean=1.4, p50=1, p95=4, max=6, pre_queue_mean=0.6, in_queue_mean=pytest.approx(0.8))


def test_where_time_goes_adds_up_to_the_latency() -> None:
    slot = {"generated": 4, "timed": 4, "latency_s": 400.0, "sandbox_s": 40.0, "generate_s": 240.0, "tool_s": 60.0, "verify_s": 20.0}
    found = figures_of(slot)
    assert found.time_s == RolloutTime(queue=10.0, sandbox=10.0, generate=60.0, tool=15.0, verify=5.0)
    assert found.mean_latency_s == 100.0


def test_filters_and_tail() -> None:
    """55 % of the groups are all-pass and dropped (R3); the longest of a group takes 1.5 times the mean."""
    slot = {"groups": 20, "zero_variance": 11, "accepted": 72, "refused": 88, "worked": 160, "work_s": 1600.0, "longest_s": 300.0}
    found = figures_of(slot)
    assert found.zero_variance_share == 0.55
    assert found.acceptance == pytest.approx(0.45)
    assert found.tail_multiplier == pytest.approx(1.5)


def test_what_is_turned_away_later_is_not_accepted() -> None:
    found = figures_of({"accepted": 16}, {"accepted": -24, "refused": 24})
    assert found.accepted_samples_per_s == 0.0
    assert found.acceptance == 0.0


@pytest.mark.parametrize(
    ("trainer", "wait"),
    [
        pytest.param({"doing": "waits", "at": 970.0, "waited_s": 10.0, "computed_s": 0.0}, 1.0, id="never-fed"),
        pytest.param({"doing": "waits", "at": 970.0, "waited_s": 0.0, "computed_s": 90.0}, 0.25, id="waits-now"),
        pytest.param({"doing": "computes", "at": 910.0, "waited_s": 10.0, "computed_s": 0.0}, 0.1, id="computes-now"),
        pytest.param({"doing": "waits", "at": 999.0 - AWAY_S, "waited_s": 10.0, "computed_s": 10.0}, 0.5, id="went-away"),
        pytest.param({"doing": "between", "at": 900.0, "waited_s": 0.0, "computed_s": 0.0}, None, id="between-steps"),
    ],
)
def test_the_step_that_runs_now_counts(trainer: dict[str, Any], wait: float | None) -> None:
    assert figures_of(trainer=trainer).wait_fraction == (None if wait is None else pytest.approx(wait))


# ------------------------------------------------------------------------------------------------------------------ the bottleneck

IN_SANDBOX = RolloutTime(queue=0.0, sandbox=30.0, generate=40.0, tool=25.0, verify=5.0)


@pytest.mark.parametrize(
    ("found", "now", "limit", "says"),
    [
        pytest.param(rates(accepted=1.95, consumption=2.75), IDLE, Limit.GENERATOR, ["1.95", "2.75", "29 %", "41 %"], id="R1"),
        pytest.param(rates(accepted=1.0, consumption=3.85), IDLE, Limit.GENERATOR, ["74 %", "285 %"], id="R2"),
        pytest.param(
            rates(accepted=1.35, consumption=2.75, generated_samples_per_s=3.0, acceptance=0.45),
            IDLE,
            Limit.FILTER,
            ["45 %", "51 %"],
            id="R3-filter-takes-what-would-be-enough",
        ),
        pytest.param(rates(accepted=0.1, consumption=2.0, acceptance=0.8), IDLE, Limit.GENERATOR, ["95 %"], id="filter-is-the-lesser"),
        pytest.param(rates(accepted=1.0, consumption=2.0, time_s=IN_SANDBOX), IDLE, Limit.SANDBOX, ["60 %", "100 %"], id="sandboxes"),
        pytest.param(
            rates(accepted=1.0, consumption=2.0, gated_share=0.9), IDLE, Limit.GATE, ["90 %", "staleness_budget (1 now)", "50 %"], id="gate"
        ),
        pytest.param(
            rates(accepted=1.0, consumption=2.0, gated_share=0.9),
            replace(IDLE, staleness_budget=None, capacity_groups=None),
            Limit.GATE,
            ["queue_groups"],
            id="no-budget-full-queue",
        ),
        pytest.param(rates(accepted=1.0, consumption=2.0), replace(IDLE, backlog_groups=0), Limit.TASKS, ["submit tasks"], id="no-tasks"),
        pytest.param(
            rates(accepted=1.0, consumption=2.0, capped_share=0.8), IDLE, Limit.GENERATOR, ["256 rollouts", "80 %"], id="in-flight-cap"
        ),
        pytest.param(rates(accepted=2.5, consumption=2.0), IDLE, Limit.TRAINER, ["rho 1.25", "20 % of generation"], id="trainer"),
        pytest.param(
            rates(accepted=2.0, consumption=2.0, gated_share=0.9), IDLE, Limit.TRAINER, ["gate holds generation back"], id="trainer-by-gate"
        ),
        pytest.param(rates(accepted=2.0, consumption=2.0), IDLE, Limit.BALANCED, ["waits 0 %"], id="balanced"),
        pytest.param(figures_of(), IDLE, Limit.UNKNOWN, ["Not measured"], id="nothing"),
        pytest.param(replace(figures_of(), wait_fraction=1.0, acceptance=0.0), IDLE, Limit.FILTER, ["0 % of what"], id="nothing-passes"),
        pytest.param(replace(figures_of(), wait_fraction=1.0), IDLE, Limit.GENERATOR, ["100 %"], id="waits-for-its-first-batch"),
    ],
)
def test_bottleneck(found: Figures, now: Now, limit: Limit, says: list[str]) -> None:
    named = bottleneck(found, now)
    assert named.limit is limit
    assert [part for part in says if part not in named.sentence] == [], named.sentence


SHARE = st.none() | st.floats(0, 1)
RATE = st.floats(0, 1e6)
SECONDS = st.none() | st.floats(0, 1e5)
FIGURES = st.builds(
    Figures,
    window_s=st.floats(0, 3600),
    generated_samples_per_s=RATE,
    accepted_samples_per_s=RATE,
    consumed_samples_per_s=st.none() | RATE,
    consumption_samples_per_s=st.none() | RATE,
    rho=st.none() | st.floats(0, 1e6),
    wait_fraction=SHARE,
    in_flight_rollouts=st.integers(0, 10**6),
    queue_groups=st.integers(0, 10**6),
    capacity_groups=st.none() | st.integers(0, 10**6),
    staleness=st.just(figures_of().staleness),
    time_s=st.builds(RolloutTime, queue=SECONDS, sandbox=SECONDS, generate=SECONDS, tool=SECONDS, verify=SECONDS),
    acceptance=SHARE,
    zero_variance_share=SHARE,
    tail_multiplier=st.none() | st.floats(1, 100),
    mean_latency_s=SECONDS,
    gated_share=SHARE,
    capped_share=SHARE,
)
NOW = st.builds(
    Now,
    in_flight_rollouts=st.integers(0, 10**6),
    queue_groups=st.integers(0, 10**6),
    capacity_groups=st.none() | st.integers(0, 10**6),
    backlog_groups=st.integers(0, 10**6),
    staleness_budget=st.none() | st.integers(0, 100),
    in_flight_cap=st.integers(1, 10**6),
)


@given(found=FIGURES, now=NOW)
def test_any_figures_make_one_plain_sentence(found: Figures, now: Now) -> None:
    named = bottleneck(found, now)
    assert re.fullmatch(r"[A-Z][^\n]*[^.]\.", named.sentence)
    assert not re.search(r"\b(nan|inf|None|-\d)", named.sentence)
    fed = found.wait_fraction is not None and found.wait_fraction < ENOUGH_WAIT
    assert (named.limit in (Limit.TRAINER, Limit.BALANCED)) is fed or found.wait_fraction is None


@given(
    generated=st.integers(0, 1000),
    refused=st.integers(0, 1000),
    turned_away=st.integers(0, 1000),
    waited_s=st.floats(0, 1e4),
    computed_s=st.floats(0, 1e4),
    ages=st.lists(st.integers(0, 50), max_size=50),
)
def test_shares_are_shares_and_quantiles_are_in_order(
    generated: int, refused: int, turned_away: int, waited_s: float, computed_s: float, ages: list[int]
) -> None:
    slots: list[dict[str, Any]] = [
        {"generated": generated, "accepted": generated, "refused": refused},
        {"accepted": -turned_away, "refused": turned_away},
        {"trained": 1, "waited_s": waited_s, "computed_s": computed_s},
        *({"leased": 1, "staleness": age, "pre_queue": age, f"staleness:{age}": 1} for age in ages),
    ]
    found = figures_of(*slots)
    assert found.acceptance is None or 0 <= found.acceptance <= 1
    assert found.wait_fraction is None or math.isclose(found.wait_fraction, waited_s / (waited_s + computed_s))
    staleness = found.staleness
    if ages:
        assert staleness.max == max(ages)
        assert staleness.p50 == sorted(ages)[math.ceil(len(ages) / 2) - 1]
        assert staleness.p50 <= (staleness.p95 or 0) <= staleness.max
