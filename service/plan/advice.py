"""What to change: what holds a setting up, what it needs, and which knob helps most; by forms where they hold, by simulation where not."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from service.plan.errors import PlanError
from service.plan.forms import Forms, budget_for, concurrency_for, queue_for
from service.plan.results import Simulated
from service.plan.setting import LARGEST, MAX_BUDGET, Gate, QueueDrop, Setting
from service.plan.simulator import simulate

WAIT_GOAL = 0.05
"""A trainer that waits less is as good as busy."""
SIZING_GROUPS = 4000
"""Groups of each simulation of a search: waiting is then known within about a hundredth."""
SEARCHED = 20
"""Times the generators there are, up to which their number is searched by simulation: beyond, nothing else is near what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a setting needs.

    generators: so that the trainer waits at most `WAIT_GOAL`; None: no number does under this rule. budget: the smallest at which the gate
    holds nobody up; matched_budget: were the generators as fast as the trainer. capacity_groups: the gate's, which bounds the queue.
    queue_batches: what an evicting queue may hold for a mean staleness of the budget; None: even the smallest is above.
    concurrency_limit: rollouts in flight for the same; None: there is none, or it makes no difference. starts_per_s: of sandboxes,
    `starting` of them at once.
    """

    generators: int | None
    budget: int
    matched_budget: int
    capacity_groups: int | None
    queue_batches: float | None
    concurrency_limit: int | None
    sandboxes_mean: float
    sandboxes_max: int
    vcpus: float
    memory_gib: float
    starts_per_s: float
    starting: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One change, simulated. samples_gain: share of trained samples per second won; wait and staleness: the change, in their own units."""

    change: str
    simulated: Simulated
    samples_gain: float
    wait_change: float
    staleness_change: float


def bottleneck(setting: Setting, forms: Forms, simulated: Simulated) -> str:
    """One plain sentence: what holds the job up, and by how much."""
    wait, free_wait = simulated.wait_share, max(0.0, 1 - forms.rho)
    gated, lost = isinstance(setting.rule, Gate), wait - free_wait
    if lost > max(WAIT_GOAL, free_wait):
        if not isinstance(setting.rule, Gate):
            old = f"{simulated.discarded_share:.0%} of the groups are too old"
            return f"Age is the bottleneck: {old}, so the trainer waits {wait:.0%} of its time."
        budget, free = setting.rule.budget, budget_needed(setting, forms)
        cure = (
            f"from a budget of {free} on it holds nobody up"
            if free > budget
            else "stale work is run again, so raise the budget or shorten the tail"
        )
        return f"The gate is the bottleneck: with a budget of {budget} the trainer waits {wait:.0%} of its time; {cure}."
    if wait > WAIT_GOAL:
        rates = f"{forms.accepted:.3g} of the {forms.consumption:.3g} samples/s that the trainer could consume"
        rule = f"; {'the gate and ' if gated else ''}stale work make it {lost:.0%} worse" if lost > WAIT_GOAL else ""
        where = _where(setting, forms)
        return f"Generation is the bottleneck: it delivers {rates}, so the trainer waits {wait:.0%} of its time; {where}{rule}."
    if forms.rho > 1 + WAIT_GOAL:
        surplus = "the gate holds the rest back" if gated else f"{simulated.discarded_share:.0%} of the groups are discarded"
        return f"The trainer is the bottleneck: generators could deliver {forms.rho:.2f} times what it consumes; {surplus}."
    return f"Generators and trainer match (rho {forms.rho:.2f}): the trainer waits {wait:.0%} of its time."


def _where(setting: Setting, forms: Forms) -> str:
    """Where the time of a rollout goes, or its result."""
    if setting.acceptance < 0.6:
        return f"filters take {1 - setting.acceptance:.0%} of the groups"
    if forms.binding == "starts":
        return f"sandboxes wait for their start, of which {setting.max_starting} may go on at once"
    parts = {
        "sampling tokens": setting.lengths.mean / setting.sampling_rate,
        "sandbox starts": setting.sandbox_s,
        "tools": setting.tool_s,
        "the verifier": setting.verify_s,
    }
    part = max(parts, key=parts.__getitem__)
    return f"{parts[part] / forms.latency_s:.0%} of a rollout's time is {part}"


def budget_needed(setting: Setting, forms: Forms, *, matched: bool = False) -> int:
    """The smallest budget at which the gate holds nobody up; matched: with generators as fast as the trainer."""
    rate = forms.consumption if matched else min(forms.accepted, forms.consumption)
    running = forms.latency_s * rate / setting.acceptance  # those that a filter will take have places too
    versions, rho = setting.steps_per_version, 1.0 if matched else min(forms.rho, 1.0)
    return budget_for(concurrency=running, tail=forms.tail, batch=setting.batch * versions, rho=rho / versions)


def sizes(setting: Setting, forms: Forms, simulated: Simulated, *, groups: int = SIZING_GROUPS, seed: int = 0) -> Sizes:
    """What the setting needs; a search of simulations finds the generators."""
    budget = setting.rule.budget if isinstance(setting.rule, Gate) else budget_needed(setting, forms)
    steps = budget * setting.steps_per_version  # the forms know one version a step
    before = forms.latency_s * forms.tail * min(forms.accepted, forms.consumption) / setting.batch
    try:
        queue = queue_for(steps, before=before, rho=forms.rho)
    except PlanError:
        queue = None
    limit = concurrency_for(steps, tail=forms.tail * setting.acceptance, batch=setting.batch, rho=forms.rho, queue=1.0)
    if isinstance(setting.rule, Gate) and forms.rho >= 1:
        limit = 0.0  # whatever is in flight, the gate is full and the mean is the budget
    live = setting.sandbox_s + setting.tool_s > 0
    in_flight = simulated.in_flight_mean if live else 0.0
    starts_per_s = simulated.generated_samples_per_s if live else 0.0
    most = (setting.slots if setting.capacity is None else min(setting.slots, setting.capacity * setting.members)) if live else 0
    return Sizes(
        generators=generators_for(setting, forms, groups=groups, seed=seed),
        budget=budget_needed(setting, forms),
        matched_budget=budget_needed(setting, forms, matched=True),
        capacity_groups=setting.capacity,
        queue_batches=queue,
        concurrency_limit=math.floor(limit) if limit >= setting.members else None,
        sandboxes_mean=in_flight,
        sandboxes_max=most,
        vcpus=most * setting.sandbox_cpus,
        memory_gib=most * setting.sandbox_memory_mib / 1024,
        starts_per_s=starts_per_s,
        starting=starts_per_s * setting.sandbox_s,
    )


def generators_for(setting: Setting, forms: Forms, *, groups: int = SIZING_GROUPS, seed: int = 0) -> int | None:
    """The fewest generators, each with as many rollouts as now, with which the trainer waits at most `WAIT_GOAL`; None: no number does."""

    def enough(generators: int) -> bool:
        try:
            return simulate(setting.with_generators(generators), groups=groups, seed=seed).wait_share <= WAIT_GOAL
        except PlanError:  # nearly all that they make would be discarded
            return False

    match = setting.generators / forms.rho
    if match > SEARCHED * setting.generators:
        return math.ceil(match * (1 - WAIT_GOAL))
    low = 0
    for factor in (1.0, 1.1, 1.3):  # beyond 1: for the work that the gate discards
        high = math.ceil(match * factor)
        if enough(high):
            break
        low = high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def knobs(setting: Setting, simulated: Simulated, *, groups: int = SIZING_GROUPS, seed: int = 0) -> list[Knob]:
    """Changes that are within reach, each simulated with the same draws; what helps most comes first.

    While the trainer waits, that is what trains more samples; after that, what lowers staleness and costs at most a hundredth of them.
    """
    base = simulate(setting, groups=groups, seed=seed)
    found = []
    for change, other in _changes(setting):
        try:
            changed = simulate(other, groups=groups, seed=seed)
        except PlanError:  # beyond what can be simulated is beyond reach
            continue
        gain = changed.consumed_samples_per_s / base.consumed_samples_per_s - 1
        found.append(
            Knob(
                change=change,
                simulated=changed,
                samples_gain=gain,
                wait_change=changed.wait_share - base.wait_share,
                staleness_change=changed.staleness.mean - base.staleness.mean,
            )
        )
    if simulated.wait_share > WAIT_GOAL:
        return sorted(found, key=lambda knob: -knob.samples_gain)
    return sorted(found, key=lambda knob: (knob.samples_gain < -0.01, knob.staleness_change))


def _changes(setting: Setting) -> Iterator[tuple[str, Setting]]:
    more = min(LARGEST["generators"], max(setting.generators + 1, round(setting.generators * 1.25)))
    yield f"generators {setting.generators} -> {more}, as many rollouts on each", setting.with_generators(more)
    yield (
        "generators that sample 25 % faster",
        replace(setting, tokens_per_s=setting.tokens_per_s * 1.25, generator_tokens_per_s=_times(setting, 1.25)),
    )
    fewer = max(setting.members, round(setting.concurrency * 0.8))
    if fewer < setting.concurrency:
        yield f"concurrency {setting.concurrency} -> {fewer}", replace(setting, concurrency=fewer)
    match setting.rule:
        case Gate(budget=budget):
            if budget < MAX_BUDGET:
                yield f"staleness budget {budget} -> {budget + 1}", setting.with_budget(budget + 1)
            if budget:
                yield f"staleness budget {budget} -> {budget - 1}", setting.with_budget(budget - 1)
        case QueueDrop(batches=batches) if batches > 1:
            smaller = max(1.0, batches / 2)
            yield f"queue {batches:g} -> {smaller:g} batches", replace(setting, rule=QueueDrop(batches=smaller))
    cap = setting.lengths.quantile(0.95)
    if cap < setting.lengths.quantile(0.999):
        yield f"rollouts cut at {cap:.0f} tokens (their 95th percentile)", replace(setting, lengths=setting.lengths.capped(cap))
    larger = 2 * setting.groups_per_step
    if larger <= LARGEST["groups_per_step"]:
        wider = replace(setting, groups_per_step=larger, train_s=2 * setting.train_s)
        yield f"groups per step {setting.groups_per_step} -> {larger}, steps twice as long", wider
    yield "a trainer that is 25 % faster", replace(setting, train_s=setting.train_s / 1.25)
    if setting.sandbox_s + setting.tool_s > 0.05 * setting.times.mean_s:
        yield "sandbox starts and tools in half the time", replace(setting, sandbox_s=setting.sandbox_s / 2, tool_s=setting.tool_s / 2)
    if setting.max_starting is not None:
        yield (
            f"sandboxes starting at once {setting.max_starting} -> {2 * setting.max_starting}",
            replace(setting, max_starting=2 * setting.max_starting),
        )
    if setting.acceptance < 0.95:
        yield "half as many groups filtered (tasks nearer to the policy's level)", replace(setting, acceptance=(1 + setting.acceptance) / 2)
    if setting.update_s > 0.01 * setting.train_s:
        yield "weight updates in half the time", replace(setting, update_s=setting.update_s / 2)


def _times(setting: Setting, factor: float) -> float | None:
    return None if setting.generator_tokens_per_s is None else setting.generator_tokens_per_s * factor
