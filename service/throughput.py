"""How fast a job goes and what limits it: rates, waits, staleness and where time goes, over a sliding window. Pure.

Measured by the store's clock (service/lua/rates.lua). Its words:

* A sample is one rollout's trajectory here, as in the closed forms: a batch has groups x group_size of them.
* generated: ended with a trajectory. accepted: in a group that became ready, less what was turned away later. trained: acked.
* The trainer waits while a lease call of its has not got a batch (the pause before it asks again included, up to 60 s) and it holds none.
  It computes while it holds a batch, and from an ack to its next lease call (up to 10 min). So a trainer that prefetches waits only when
  it has nothing left to train on. Nothing to come (drained) is no wait. A step is what lies between two acks; one that ended without an ack
  is left out. Rates of the trainer are over the steps that ended in the window: whole ones, however short the window.
* Staleness is that of groups as they were leased, in policy versions: before they were ready, and in the queue.
* length of a rollout, for the tail: the seconds that it was worked on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SLOT_S = 5
"""As in service/lua/rates.lua."""

MAX_WINDOW_S = 3600
"""What is kept."""

AWAY_S = 60.0
"""As in service/lua/rates.lua."""

ENOUGH_WAIT = 0.05
"""A trainer that waits less is fed."""

AHEAD = 1.05
"""rho above which generators are faster than the trainer, beyond noise."""

MOST = 0.5
"""A share above which something is the rule and no exception."""

MUCH = 100.0
"""A gap above which its size says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Of groups as they were leased, in policy versions. p50, p95: from 64 on rounded down by at most 1/32."""

    mean: float | None
    p50: int | None
    p95: int | None
    max: int | None
    pre_queue_mean: float | None
    in_queue_mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTime:
    """Mean seconds of a rollout by what they went to; they add up to its latency.

    queue: waiting for a worker, or for a place at a generator; what failed attempts took.
    """

    queue: float | None
    sandbox: float | None
    generate: float | None
    tool: float | None
    verify: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A job over the last `window_s` seconds. None: not measured yet. See the module for the words."""

    window_s: float
    generated_samples_per_s: float
    accepted_samples_per_s: float
    consumed_samples_per_s: float | None
    """By the trainer, waits included."""
    consumption_samples_per_s: float | None
    """By the trainer while it computes."""
    rho: float | None
    """accepted / consumption."""
    wait_fraction: float | None
    """Of the trainer's time; the step that runs now included."""
    in_flight_rollouts: int
    queue_groups: int
    capacity_groups: int | None
    staleness: Staleness
    time_s: RolloutTime
    acceptance: float | None
    """accepted of all whose group was decided on."""
    zero_variance_share: float | None
    """Of complete groups."""
    tail_multiplier: float | None
    """E[longest of a group] / E[length]."""
    mean_latency_s: float | None
    """From dispatch to the end."""
    gated_share: float | None
    """Of the times that a worker asked for more than was pending: the gate held a group back."""
    capped_share: float | None
    """The same, held back by the cap on rollouts in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """What holds at the moment of asking. capacity_groups None: the gate is off. staleness_budget None: likewise."""

    in_flight_rollouts: int
    queue_groups: int
    capacity_groups: int | None
    backlog_groups: int
    staleness_budget: int | None
    in_flight_cap: int


def figures(slots: Sequence[Mapping[str, Any]], trainer: Mapping[str, Any], *, at: float, measured_s: float, now: Now) -> Figures:
    """Add up the slots of a window that began `measured_s` before `at`, and the step that the trainer is in."""
    sums: dict[str, float] = {}
    for slot in slots:
        for name, value in slot.items():
            sums[name] = sums.get(name, 0) + value
    seconds = max(1.0, measured_s)
    accepted = max(0.0, sums.get("accepted", 0.0))
    consumption = _ratio(sums.get("trained"), sums.get("computed_s"))
    waited_s, computed_s = _open_step(trainer, at)
    waited_s, computed_s = waited_s + sums.get("waited_s", 0.0), computed_s + sums.get("computed_s", 0.0)
    mean_latency_s = _ratio(sums.get("latency_s"), sums.get("timed"))
    return Figures(
        window_s=round(measured_s, 1),
        generated_samples_per_s=sums.get("generated", 0) / seconds,
        accepted_samples_per_s=accepted / seconds,
        consumed_samples_per_s=_ratio(sums.get("trained"), sums.get("waited_s", 0.0) + sums.get("computed_s", 0.0)),
        consumption_samples_per_s=consumption,
        rho=_ratio(accepted / seconds, consumption),
        wait_fraction=_ratio(waited_s, waited_s + computed_s),
        in_flight_rollouts=now.in_flight_rollouts,
        queue_groups=now.queue_groups,
        capacity_groups=now.capacity_groups,
        staleness=_staleness(sums),
        time_s=_time(sums, mean_latency_s),
        acceptance=_ratio(accepted, accepted + sums.get("refused", 0)),
        zero_variance_share=_ratio(sums.get("zero_variance", 0), sums.get("groups")),
        tail_multiplier=_ratio(_ratio(sums.get("longest_s"), sums.get("groups")), _ratio(sums.get("work_s"), sums.get("worked"))),
        mean_latency_s=mean_latency_s,
        gated_share=_ratio(sums.get("gated", 0), sums.get("asked")),
        capped_share=_ratio(sums.get("capped", 0), sums.get("asked")),
    )


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _open_step(trainer: Mapping[str, Any], at: float) -> tuple[float, float]:
    """Seconds waited and computed since the last ack."""
    waited_s, computed_s = float(trainer.get("waited_s", 0.0)), float(trainer.get("computed_s", 0.0))
    passed = max(0.0, at - float(trainer.get("at", at)))
    match trainer.get("doing"):
        case "waits" if passed <= AWAY_S:
            waited_s += passed
        case "computes":
            computed_s += passed
    return waited_s, computed_s


def _staleness(sums: Mapping[str, float]) -> Staleness:
    counts = {int(name.removeprefix("staleness:")): int(n) for name, n in sums.items() if name.startswith("staleness:")}
    mean, pre_queue = (_ratio(sums.get(name), sums.get("leased")) for name in ("staleness", "pre_queue"))
    return Staleness(
        mean=mean,
        p50=_quantile(counts, 0.5),
        p95=_quantile(counts, 0.95),
        max=max(counts, default=None),
        pre_queue_mean=pre_queue,
        in_queue_mean=None if mean is None or pre_queue is None else mean - pre_queue,
    )


def _quantile(counts: Mapping[int, int], q: float) -> int | None:
    """The least value that at least a share `q` of all do not exceed."""
    left = q * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 1e-9:
            return value
    return None


def _time(sums: Mapping[str, float], latency_s: float | None) -> RolloutTime:
    spent = {part: _ratio(sums.get(f"{part}_s"), sums.get("generated")) for part in ("sandbox", "generate", "tool", "verify")}
    queue = None if latency_s is None else max(0.0, latency_s - sum(value or 0.0 for value in spent.values()))
    return RolloutTime(queue=queue, **spent)


# ------------------------------------------------------------------------------------------------------------------ the bottleneck


class Limit(StrEnum):
    """What a job waits for."""

    GENERATOR = "generator"
    """The trainer could train faster than samples are made."""
    TRAINER = "trainer"
    """Samples are made faster than the trainer trains."""
    SANDBOX = "sandbox"
    """As `generator`, and most of a rollout's time goes to its sandbox."""
    FILTER = "filter"
    """As `generator`, and what is filtered out makes most of the difference."""
    GATE = "gate"
    """The trainer waits while the staleness budget holds rollouts back."""
    TASKS = "tasks"
    """The trainer waits, and nothing is queued."""
    BALANCED = "balanced"
    UNKNOWN = "unknown"
    """Not measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What limits a job, in one sentence with the size of the mismatch and what to change."""

    limit: Limit
    sentence: str


def bottleneck(found: Figures, now: Now) -> Bottleneck:
    """Name what limits the job."""
    wait = found.wait_fraction
    if wait is None and found.rho is not None:
        wait = max(0.0, 1 - found.rho)
    if wait is None:
        return Bottleneck(limit=Limit.UNKNOWN, sentence="Not measured yet: the trainer has not asked for a batch in this window.")
    if wait < ENOUGH_WAIT:
        return _fed(found, wait)
    limit, gap = _starved_by(found, now), _gap(found, wait)
    sentence = f"{limit.value.capitalize()}-bound: {_told(found, wait)}; {_cure(limit, found, now, _more(gap))}."
    return Bottleneck(limit=limit, sentence=sentence)


def _cure(limit: Limit, found: Figures, now: Now, more: str) -> str:
    """Why, and what to change. more: the generation that would feed the trainer."""
    match limit:
        case Limit.GATE:
            knob = "queue_groups" if now.staleness_budget is None else f"staleness_budget ({now.staleness_budget} now)"
            return f"the gate was full in {_percent(found.gated_share)} of cases: raise {knob}, or shorten the longest rollouts"
        case Limit.TASKS:
            return f"nothing is queued and {now.in_flight_rollouts} rollouts are out: submit tasks earlier"
        case Limit.FILTER:
            return f"{_percent(found.acceptance)} of what is generated may train: choose tasks by their solve rate, or add {more}"
        case Limit.SANDBOX:
            share = f"{_percent(_sandbox_share(found))} of a rollout's working time is its sandbox's"
            return f"{share}: speed up its start, tools and verifier, or add {more}"
        case _ if found.capped_share is not None and found.capped_share >= MOST:
            held = f"which was reached in {_percent(found.capped_share)} of cases"
            return f"add {more}, and first raise the cap of {now.in_flight_cap} rollouts in flight, {held}"
        case _:
            return f"add {more}"


def _fed(found: Figures, wait: float) -> Bottleneck:
    """The trainer is kept busy."""
    gated = found.gated_share is not None and found.gated_share >= MOST
    if not gated and (found.rho is None or found.rho <= AHEAD):
        return Bottleneck(limit=Limit.BALANCED, sentence=f"Balanced: {_told(found, wait)}.")
    cures = []
    if gated:
        cures.append(f"the gate holds generation back in {_percent(found.gated_share)} of cases")
    if found.rho is not None and found.rho > AHEAD:
        cures.append(f"{_percent(1 - 1 / found.rho)} of generation is to spare")
    told = f"Trainer-bound: {_told(found, wait)}; {' and '.join(cures)}: speed up the trainer, or give it some of the generators' share."
    return Bottleneck(limit=Limit.TRAINER, sentence=told)


def _starved_by(found: Figures, now: Now) -> Limit:
    if found.gated_share is not None and found.gated_share >= MOST:
        return Limit.GATE
    if now.backlog_groups == 0:
        return Limit.TASKS
    if found.acceptance is not None and found.acceptance < _filter_bound(found.rho):
        return Limit.FILTER
    return Limit.SANDBOX if (_sandbox_share(found) or 0.0) > MOST else Limit.GENERATOR


def _filter_bound(rho: float | None) -> float:
    """An acceptance below which the filters make most of the gap: 1 / acceptance is above the root of 1 / rho."""
    return MOST if rho is None or rho == 0 else min(1 - ENOUGH_WAIT, math.sqrt(rho))


def _sandbox_share(found: Figures) -> float | None:
    spent = found.time_s
    sandbox_s = (spent.sandbox or 0.0) + (spent.tool or 0.0) + (spent.verify or 0.0)
    return _ratio(sandbox_s, sandbox_s + (spent.generate or 0.0))


def _told(found: Figures, wait: float) -> str:
    """Both sides in numbers."""
    told = f"{_rate(found.accepted_samples_per_s)} samples/s that may train are generated"
    if found.consumption_samples_per_s is not None and found.rho is not None:
        told += f", the trainer can take {_rate(found.consumption_samples_per_s)} (rho {found.rho:.2f})"
        return f"{told}, so it waits {_percent(wait)} of its time"
    return f"{told}, and the trainer waits {_percent(wait)} of its time"


def _gap(found: Figures, wait: float) -> float | None:
    """By how much generation falls short of the trainer, as a share of itself; None: it makes nothing, or the trainer has had nothing."""
    if found.rho is not None and 0 < found.rho < 1:
        return 1 / found.rho - 1
    return wait / (1 - wait) if wait < 1 else None


def _percent(value: float | None) -> str:
    return "an unknown share" if value is None else f"{100 * value:.0f} %"


def _more(gap: float | None) -> str:
    if gap is None or gap > MUCH:
        return "far more generation"
    return f"{_percent(gap)} generation"


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.0f}" if samples_per_s >= 100 or samples_per_s < 1e-4 else f"{samples_per_s:.3g}"
