"""Throughput and staleness in closed form. Rates are samples per second, staleness is in policy versions, `queue` is in batches.

rho = accepted / consumption: below 1 the trainer waits, above 1 samples do. The staleness of a queue that evicts its oldest group is that
of Applied Compute (2026); under a gate that binds it is the budget itself, since group k begins when version k / batch - budget does.
"""

import math
from dataclasses import dataclass

from service.plan.errors import PlanError
from service.plan.setting import Gate, QueueDrop, QueueMax, Setting

EVEN = 1e-6
"""Rates this close are equal: then the queue wanders between empty and full, and no single form holds."""


def production(concurrency: float, latency_s: float) -> float:
    """Little's law: what so many rollouts in flight produce."""
    return concurrency / latency_s


def in_flight(rate: float, latency_s: float) -> float:
    """Little's law the other way round: rollouts in flight that this rate takes."""
    return rate * latency_s


def consumption(batch: int, train_s: float) -> float:
    """What a trainer consumes that never waits."""
    return batch / train_s


def wait_fraction(rho: float) -> float:
    return max(0.0, 1.0 - rho)


def step_wall(batch: int, accepted: float, consumed: float) -> float:
    return batch / min(accepted, consumed)


def pre_queue(*, concurrency: float, tail: float, batch: float, rho: float) -> float:
    """Mean staleness that a group has when it is ready."""
    return concurrency * tail / (batch * max(1.0, rho))


def in_queue(*, rho: float, queue: float) -> float:
    """Mean staleness that is added by the queue, which evicts its oldest. Equal rates: the middle of what holds on their two sides."""
    if abs(rho - 1.0) <= EVEN:
        return (1.0 + queue) / 2
    return rho if rho < 1.0 else (2 * queue + rho - 1.0) / (2 * rho)


def queue_for(budget: float, *, before: float, rho: float) -> float:
    """Batches the evicting queue may hold so that mean staleness is `budget`; `before` is the pre-queue part.

    Raises:
        PlanError: even the smallest queue is above the budget.
    """
    least = before + in_queue(rho=rho, queue=1.0)
    if budget < least - EVEN:
        raise PlanError(
            "staleness-budget", f"{budget:g} is below {least:.2f}, which no queue is: lower --concurrency or the tail, or raise it"
        )
    if rho <= 1.0 + EVEN:
        return 1.0  # it never holds more than about one batch
    return rho * (budget - before) + (1.0 - rho) / 2


def concurrency_for(budget: float, *, tail: float, batch: int, rho: float, queue: float) -> float:
    """The most rollouts in flight whose mean staleness is within `budget`; 0 or less: none."""
    return batch * max(1.0, rho) * (budget - in_queue(rho=rho, queue=queue)) / tail


def budget_for(*, concurrency: float, tail: float, batch: int, rho: float) -> int:
    """The smallest budget at which the gate holds nobody up."""
    return math.ceil(concurrency * tail / batch + min(rho, 1.0) - EVEN)


def gate_capacity(budget: int, groups_per_step: int, steps_per_version: int = 1) -> int:
    """Groups that may be out at once. It bounds the ready queue too."""
    return (budget + 1) * groups_per_step * steps_per_version


def gated_rate(*, capacity: int, groups_per_step: int, longest_s: float, step_s: float, acceptance: float = 1.0) -> float:
    """Groups per second of a gate that binds: each is charged while it runs, half a step until a batch is together, and while it trains;
    those that a filter takes, while they run."""
    return (capacity - groups_per_step / 2) / (longest_s / acceptance + step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """A setting in closed form.

    production, accepted: of generators that nothing holds up. binding: what bounds the rate: generation, starts, gate, trainer or both
    (generation and trainer alike). staleness: its mean; None where only a simulation tells.
    """

    latency_s: float
    tail: float
    production: float
    accepted: float
    consumption: float
    rho: float
    step_s: float
    wait_fraction: float
    in_flight: float
    staleness: float | None
    pre_queue: float | None
    in_queue: float | None
    binding: str


def closed_forms(setting: Setting) -> Forms:
    """All of them; the simulation is there for what they leave out."""
    times = setting.times
    slots = setting.slots - _fragments(setting)
    starts = math.inf
    if setting.max_starting and setting.sandbox_s:
        starts = setting.max_starting / setting.sandbox_s * setting.group_size / setting.members
    made = min(production(slots, times.held_s), starts)
    waits_s = slots / made - times.held_s  # in the line for a sandbox's start
    accepted, consumed = made * setting.acceptance, consumption(setting.batch, setting.train_s)
    rho = accepted / consumed
    longest_s, latency_s = times.longest_s + waits_s, times.mean_s + waits_s
    pause_s = setting.update_s / setting.steps_per_version
    step_s = step_wall(setting.batch, accepted, consumed) + pause_s
    binding = "both" if abs(rho - 1) <= EVEN else "trainer" if rho > 1 else "starts" if waits_s > EVEN else "generation"
    gate_s = _gate_step_s(setting, longest_s, waits_s, pause_s)
    if gate_s > step_s * (1 + EVEN):
        step_s, binding = gate_s, "gate"
    before, within, staleness = _staleness(setting, rho=rho, longest_s=longest_s, step_s=step_s - pause_s, binding=binding)
    busy = slots
    if isinstance(setting.rule, Gate):  # it holds back what would only pile up
        running_s = (times.held_s + waits_s) * step_s / (step_s - pause_s)
        busy = min(slots, in_flight(setting.batch / step_s / setting.acceptance, running_s))
    return Forms(
        latency_s=latency_s,
        tail=longest_s / latency_s,
        production=made,
        accepted=accepted,
        consumption=consumed,
        rho=rho,
        step_s=step_s,
        wait_fraction=max(0.0, step_s - pause_s - setting.train_s) / step_s,
        in_flight=busy,
        staleness=staleness,
        pre_queue=before,
        in_queue=within,
        binding=binding,
    )


def _fragments(setting: Setting) -> float:
    """Places that stay empty, since the gate starts a group only when there are places for all of it."""
    if not isinstance(setting.rule, Gate):
        return 0.0
    return min((setting.members - 1) / 2, setting.members * (1 - setting.times.held_s / setting.times.longest_s))


def _gate_step_s(setting: Setting, longest_s: float, waits_s: float, pause_s: float) -> float:
    """How long a step lasts at least, by the gate alone."""
    if setting.capacity is None:
        return 0.0
    if setting.capacity == setting.groups_per_step:  # on-policy: the step waits for the slowest of all
        return setting.times.slowest_s + waits_s + setting.train_s + pause_s
    train_s = (setting.train_s + pause_s) * (setting.steps_per_version + 1) / 2  # places come back with the version, not with the step
    step_s = math.inf
    for _ in range(30):  # updates make rollouts longer, and so the step
        running_s = longest_s if math.isinf(step_s) else longest_s * step_s / (step_s - pause_s)
        rate = gated_rate(
            capacity=setting.capacity,
            groups_per_step=setting.groups_per_step,
            longest_s=running_s,
            step_s=train_s,
            acceptance=setting.acceptance,
        )
        step_s = max(setting.groups_per_step / rate, pause_s + setting.train_s)
    return step_s


def _staleness(
    setting: Setting, *, rho: float, longest_s: float, step_s: float, binding: str
) -> tuple[float | None, float | None, float | None]:
    """Before the queue, in it, and in all. A gate that binds fixes the sum alone: rollouts begin in bursts. step_s: without updates."""
    before = longest_s / (step_s * setting.steps_per_version)
    match setting.rule:
        case QueueDrop(batches=batches):
            within = in_queue(rho=rho, queue=batches) / setting.steps_per_version
            return before, within, before + within
        case Gate(budget=budget, stale_policy=policy):
            within = min(rho, 1.0) / setting.steps_per_version
            filtered = before * (1 / setting.acceptance - 1)  # places of groups that never reach the trainer
            if binding in ("gate", "trainer", "both") or before + within + filtered > budget:
                even = setting.acceptance == 1 and (
                    policy == "pace" or 2 * before <= budget
                )  # nothing is filtered, and hardly anything stale
                return None, None, float(budget) if even or budget == 0 else None
            return before, within, before + within
        case QueueMax():
            return None, None, None
