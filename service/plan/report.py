"""A plan for people: tables and sentences; and for programs: one JSON object."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from service.plan.advice import WAIT_GOAL, Knob, Sizes
from service.plan.forms import EVEN, Forms
from service.plan.gates import Convention
from service.plan.results import Simulated
from service.plan.setting import Gate, QueueDrop, QueueMax, Rule, Setting

SHOWN_KNOBS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting of a comparison."""

    name: str
    forms: Forms
    simulated: Simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that the command found out. `measured`: what the job of --job reported itself."""

    setting: Setting
    forms: Forms
    simulated: Simulated
    bottleneck: str
    sizes: Sizes
    knobs: Sequence[Knob]
    compared: Sequence[Row] = ()
    elsewhere: Sequence[Convention] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)
    about: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values; infinities, which JSON has not, as null."""
        setting = {f.name: getattr(self.setting, f.name) for f in fields(self.setting) if f.name not in ("lengths", "rule")}
        setting["mean_tokens"], setting["rule"] = self.setting.lengths.mean, rule_text(self.setting.rule)
        document = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "setting"}
        return {"setting": _plain(setting)} | document


def _plain(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case str() | int() | bool() | None:
            return value
        case Mapping():
            return {name: _plain(inner) for name, inner in value.items()}
        case Sequence():
            return [_plain(inner) for inner in value]
    return _plain(asdict(value))


def show(plan: Plan, console: Console) -> None:
    """Print it."""
    for line in plan.about:
        console.print(line, style="dim", highlight=False)
    console.print(_overview(plan))
    console.print(plan.bottleneck, style="bold", highlight=False)
    if plan.knobs:
        console.print(f"\nWhat helps most: {plan.knobs[0].change} ({_effect(plan.knobs[0])}).", highlight=False)
        console.print(_knobs([knob for knob in plan.knobs if _matters(knob)][:SHOWN_KNOBS]))
    for line in _needs(plan):
        console.print(line, highlight=False)
    for line in _cautions(plan):
        console.print(line, style="yellow", highlight=False)
    if plan.compared:
        console.print(_compared(plan.compared))
    if plan.elsewhere:
        console.print(_elsewhere(plan.elsewhere))


def rule_text(rule: Rule) -> str:
    match rule:
        case Gate(budget=budget, stale_policy=policy):
            return f"gate, budget {budget}, {policy}"
        case QueueDrop(batches=batches):
            return f"queue of {batches:g} batches, oldest evicted"
        case QueueMax(max_staleness=bound):
            return f"no queue bound, staleness at most {bound}"


def _overview(plan: Plan) -> Table:
    forms, simulated, setting = plan.forms, plan.simulated, plan.setting
    ages = simulated.staleness
    table = Table(
        "",
        "closed form",
        "simulation",
        title=f"{setting.slots} rollouts in flight, {setting.batch} samples a step; {rule_text(setting.rule)}",
    )
    delivered = setting.batch / forms.step_s
    rows: list[tuple[str, float | None, float | None, str]] = [
        ("generators could deliver, accepted samples/s", forms.accepted, None, ".3g"),
        ("trainer could consume, samples/s", forms.consumption, None, ".3g"),
        ("rho (the one over the other)", forms.rho, None, ".3f"),
        ("trained, samples/s", delivered, simulated.consumed_samples_per_s, ".3g"),
        ("step, s", forms.step_s, simulated.seconds / simulated.steps, ".1f"),
        ("trainer waits", forms.wait_fraction, simulated.wait_share, ".1%"),
        ("staleness, mean", forms.staleness, ages.mean, ".2f"),
        ("  before the queue", forms.pre_queue, ages.pre_queue_mean, ".2f"),
        ("  in the queue", forms.in_queue, ages.in_queue_mean, ".2f"),
        ("staleness, p50 / p95 / max", None, None, ""),
        ("rollouts in flight", forms.in_flight, simulated.in_flight_mean, ".0f"),
        ("groups ready, mean", None, simulated.queue_mean, ".1f"),
        ("rollout, s", forms.latency_s, None, ".1f"),
        ("tail multiplier M", forms.tail, None, ".2f"),
        ("groups discarded", None, simulated.discarded_share, ".1%"),
        ("length of what is trained, to all", None, simulated.length_bias, ".3f"),
    ]
    for name, form, found, shape in rows:
        if not shape:
            table.add_row(name, "-", f"{ages.p50:.0f} / {ages.p95:.0f} / {ages.max}")
            continue
        table.add_row(name, _number(form, shape), _number(found, shape))
    for name, value in plan.measured.items():
        table.add_row(f"measured: {name}", "-", _number(value, ".3f"))
    return table


def _number(value: float | None, shape: str) -> str:
    return "-" if value is None else format(value, shape)


def _effect(knob: Knob) -> str:
    return f"{knob.samples_gain:+.1%} samples/s, wait {knob.simulated.wait_share:.0%}, mean staleness {knob.simulated.staleness.mean:.2f}"


def _matters(knob: Knob) -> bool:
    return abs(knob.samples_gain) > 0.005 or abs(knob.staleness_change) > 0.05


def _knobs(knobs: Iterable[Knob]) -> Table:
    table = Table("one change", "trained samples/s", "trainer waits", "staleness, mean", "p95")
    for knob in knobs:
        ages = knob.simulated.staleness
        staleness = f"{ages.mean:.2f} ({knob.staleness_change:+.2f})"
        table.add_row(knob.change, f"{knob.samples_gain:+.1%}", f"{knob.simulated.wait_share:.1%}", staleness, f"{ages.p95:.0f}")
    return table


def _needs(plan: Plan) -> Iterable[str]:
    sizes, setting = plan.sizes, plan.setting
    if sizes.generators is None:
        yield f"Generators: no number of them keeps the wait under {WAIT_GOAL:.0%} with this rule: raise the budget, or shorten the tail."
    else:
        yield f"Generators: {sizes.generators} keep the wait under {WAIT_GOAL:.0%} (now {setting.generators})."
    yield f"Budget: from {sizes.budget} on the gate holds nobody up; from {sizes.matched_budget} on with generators as fast as the trainer."
    if sizes.capacity_groups is not None:
        yield f"Queue: the gate lets {sizes.capacity_groups} groups out at once, so the ready queue never holds more."
    if sizes.queue_batches is not None:
        yield f"        A queue that evicts its oldest would hold {sizes.queue_batches:.2f} batches for a mean staleness of the budget."
    if sizes.concurrency_limit is not None:
        without = "" if sizes.capacity_groups is None else ", the gate left out"
        yield f"Concurrency{without}: up to about {sizes.concurrency_limit} rollouts in flight keep the mean within the budget."
    if sizes.sandboxes_max:
        yield (
            f"Sandboxes: {sizes.sandboxes_mean:.0f} on average, at most {sizes.sandboxes_max} "
            f"({sizes.vcpus:.0f} vCPU, {sizes.memory_gib:.0f} GiB); "
            f"{sizes.starts_per_s:.2f} starts per second{f', {sizes.starting:.1f} starting at once' if sizes.starting else ''}."
        )


def _cautions(plan: Plan) -> Iterable[str]:
    simulated = plan.simulated
    if abs(plan.forms.rho - 1) <= EVEN:
        yield "Rates are exactly equal: the queue wanders between empty and full, and the closed form is the middle; trust the simulation."
    if isinstance(plan.setting.rule, QueueDrop) or (isinstance(plan.setting.rule, Gate) and plan.setting.rule.stale_policy == "pace"):
        yield f"A mean is no bound: the worst of the simulated groups was {simulated.staleness.max} versions old."
    if simulated.discarded_share > 0.01 and isinstance(plan.setting.rule, Gate):
        yield f"The closed forms know no stale work, and {simulated.discarded_share:.0%} of the groups are discarded: trust the simulation."
    if simulated.length_bias < 0.99:
        yield f"What is trained is {1 - simulated.length_bias:.1%} shorter than what is sampled: discarding by age favours short rollouts."


def _compared(rows: Iterable[Row]) -> Table:
    table = Table(
        "setting",
        "rho",
        "waits (form)",
        "staleness (form)",
        "p95",
        "max",
        "samples/s",
        "in flight",
        "discarded",
        title="compared, simulated",
    )
    for row in rows:
        ages, simulated = row.simulated.staleness, row.simulated
        table.add_row(
            row.name,
            f"{row.forms.rho:.2f}",
            f"{simulated.wait_share:.1%} ({row.forms.wait_fraction:.0%})",
            f"{ages.mean:.2f} ({_number(row.forms.staleness, '.2f')})",
            f"{ages.p95:.0f}",
            f"{ages.max}",
            f"{simulated.consumed_samples_per_s:.3g}",
            f"{simulated.in_flight_mean:.0f}",
            f"{simulated.discarded_share:.1%}",
        )
    return table


def _elsewhere(rows: Iterable[Convention]) -> Table:
    table = Table("system", "parameter", "out at most", "too old", title="the same budget elsewhere")
    for row in rows:
        table.add_row(row.system, row.parameter, "-" if row.out is None else f"{row.out} {row.unit}", row.late)
    return table
