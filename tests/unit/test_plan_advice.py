"""What the planner says is in the way, is needed, and helps most."""

from dataclasses import replace

import pytest

from service.plan.advice import bottleneck, budget_needed, generators_for, knobs, sizes
from service.plan.forms import closed_forms
from service.plan.setting import Gate, QueueDrop, QueueMax, Rule, Setting
from service.plan.simulator import simulate
from tests.plan_settings import setting

PACE = Gate(budget=8, stale_policy="pace")


def job(rho: float, rule: Rule = PACE, sigma: float = 0.4, **more: object) -> Setting:
    return setting(concurrency=256, batch=256, rho=rho, sigma=sigma, rule=rule, generators=4, **more)


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        pytest.param(job(0.5), ("Generation is the bottleneck", "sampling tokens"), id="generation"),
        pytest.param(job(0.5, tool_s=3000.0), ("Generation is the bottleneck", "75% of a rollout's time is tools"), id="tools"),
        pytest.param(job(0.9, acceptance=0.4), ("Generation is the bottleneck", "filters take 60% of the groups"), id="filters"),
        pytest.param(job(0.9, sandbox_s=100.0, max_starting=10), ("wait for their start", "10 may go on at once"), id="starts"),
        pytest.param(job(1.5), ("The trainer is the bottleneck", "the gate holds the rest back"), id="trainer"),
        pytest.param(job(1.5, QueueDrop(batches=1)), ("The trainer is the bottleneck", "33% of the groups are discarded"), id="queue"),
        pytest.param(job(1.0, Gate(budget=0)), ("The gate is the bottleneck", "from a budget of 3 on"), id="gate"),
        pytest.param(job(1.2, QueueMax(max_staleness=1), 0.8), ("Age is the bottleneck", "of the groups are too old"), id="age"),
        pytest.param(job(0.6, Gate(budget=2), 0.8), ("Generation is the bottleneck", "stale work make it"), id="generation-and-gate"),
        pytest.param(job(1.03), ("Generators and trainer match",), id="matched"),
    ],
)
def test_the_bottleneck_in_a_sentence(planned: Setting, said: tuple[str, ...]) -> None:
    sentence = bottleneck(planned, closed_forms(planned), simulate(planned, groups=3_000))
    assert sentence.endswith(".")
    for part in said:
        assert part in sentence


def test_the_generators_it_names_are_enough_and_one_less_is_not() -> None:
    slow = job(0.5)
    needed = generators_for(slow, closed_forms(slow))
    assert needed is not None
    assert needed == pytest.approx(4 / 0.5, abs=1)
    waits = [simulate(slow.with_generators(n), groups=4_000).wait_share for n in (needed - 1, needed)]
    assert waits[0] > 0.05 >= waits[1]


def test_no_number_of_generators_makes_up_for_a_budget_that_is_too_small() -> None:
    held = job(0.8, Gate(budget=1))
    assert generators_for(held, closed_forms(held)) is None


def test_far_too_few_generators_are_counted_and_not_simulated() -> None:
    far = job(0.01)
    assert generators_for(far, closed_forms(far)) == pytest.approx(380, rel=0.03)


@pytest.mark.parametrize("acceptance", [1.0, 0.5])
@pytest.mark.parametrize("rho", [0.6, 1.0])
def test_the_budget_it_needs_holds_nobody_up(rho: float, acceptance: float) -> None:
    planned = job(rho / acceptance, acceptance=acceptance)
    needed = budget_needed(planned, closed_forms(planned))
    free = simulate(planned.with_budget(needed + 5), groups=4_000).wait_share
    assert simulate(planned.with_budget(needed), groups=4_000).wait_share <= free + 0.02
    assert simulate(planned.with_budget(needed - 2), groups=4_000).wait_share > free + 0.05


def test_sizes_of_queue_and_sandboxes() -> None:
    planned = job(1.25, Gate(budget=4, stale_policy="pace"), tool_s=100.0, sandbox_s=50.0, sandbox_cpus=2.0, sandbox_memory_mib=1024)
    forms, simulated = closed_forms(planned), simulate(planned, groups=2_000)
    found = sizes(planned, forms, simulated, groups=1_000)
    assert found.capacity_groups == 5 * 32
    assert found.sandboxes_max == 256
    assert (found.vcpus, found.memory_gib) == (512, 256)
    assert found.starting == pytest.approx(found.starts_per_s * 50)
    assert found.queue_batches is not None
    evicting = simulate(replace(planned, rule=QueueDrop(batches=found.queue_batches)), groups=4_000)
    assert evicting.staleness.mean == pytest.approx(4.0, abs=0.15)


def test_without_tools_there_are_no_sandboxes() -> None:
    planned = job(0.8)
    found = sizes(planned, closed_forms(planned), simulate(planned, groups=1_000), groups=1_000)
    assert found.sandboxes_max == found.vcpus == found.starts_per_s == 0


def test_the_most_rollouts_within_a_budget() -> None:
    planned = job(0.8)
    limit = sizes(planned, closed_forms(planned), simulate(planned, groups=1_000), groups=1_000).concurrency_limit
    assert limit is not None
    at_the_limit = replace(planned, concurrency=limit, train_s=planned.train_s * 256 / limit, rule=QueueDrop(batches=1))
    assert simulate(at_the_limit, groups=8_000).staleness.mean == pytest.approx(8.0, abs=0.2)


def test_more_generation_helps_a_trainer_that_waits_and_a_smaller_budget_one_that_does_not() -> None:
    waiting = knobs(job(0.5), simulate(job(0.5), groups=1_000), groups=1_000)
    assert waiting[0].change.startswith(("generators 4 -> 5", "generators that sample 25 %"))
    assert waiting[0].samples_gain == pytest.approx(0.25, abs=0.03)
    busy = knobs(job(1.5), simulate(job(1.5), groups=1_000), groups=1_000)
    assert busy[0].samples_gain > -0.01
    assert busy[0].staleness_change == min(knob.staleness_change for knob in busy if knob.samples_gain > -0.01)
    assert busy[0].staleness_change < -0.9


@pytest.mark.parametrize(
    ("more", "change"),
    [
        ({"acceptance": 0.5}, "half as many groups filtered"),
        ({"tool_s": 500.0}, "sandbox starts and tools in half the time"),
        ({"sandbox_s": 100.0, "max_starting": 5}, "sandboxes starting at once 5 -> 10"),
        ({"update_s": 400.0}, "weight updates in half the time"),
    ],
)
def test_each_trouble_has_its_knob(more: dict[str, float], change: str) -> None:
    planned = job(0.8, **more)
    found = {knob.change: knob for knob in knobs(planned, simulate(planned, groups=1_000), groups=1_000)}
    (knob,) = (knob for name, knob in found.items() if name.startswith(change))
    assert knob.samples_gain > 0.03
