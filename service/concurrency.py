"""How many rollouts a job has in flight, when it is left to us: samples of queue, staleness and generators' load in, a cap out. Pure.

Additive increase and multiplicative decrease, as links do it and as prime-rl does it by KV use: the cap grows while the trainer is hungry,
the generators have room and the cap is what binds; it shrinks when requests queue up in the engines, their KV cache is nearly full, or more
is ready than the trainer takes. What must always hold:

* lowest <= cap <= highest.
* After a change the next one waits for a turnover (the time that a rollout takes), when its effect can be seen; but for lost generators.
* A generator that is lost takes its share of the cap with it at once, and brings it back when it is back.
* Near the cap that last was too much, growth is careful: a step of CAREFUL, or of one group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

MAX_TURNOVER_S = 300.0
"""A job of hour-long rollouts shall not wait for hours."""

GROWTH = 1.25
QUEUE_CUT, FULL_CUT, REPEATED_CUT, SURPLUS_CUT = 0.9, 0.8, 0.5, 0.95

REPEATED = 3
"""Cuts in a row after which the next is deep: the load has changed, not the noise."""

ROOM = 0.6
"""KV use below which there is room for more."""

FULL = 0.9
"""KV use above which engines begin to retract requests."""

QUEUED = 0.1
"""Share of the running requests that may wait in the engines: more is no use to anybody."""

CAREFUL = 1.02

NEAR = 0.8
"""Of the cap that was too much; from there growth is careful."""

HUNGRY = 0.05
"""Share of its time that a trainer waits."""

BINDS = 0.85
"""In flight, as a share of the cap: below, something else holds back, and a higher cap would change nothing but a burst later."""

FORGET_AFTER = 20
"""Turnovers without a cut after which a higher cap than the one that was too much is tried faster."""

Reason = Literal["generators", "turnover", "full", "queued", "surplus", "stale", "grows", "settled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Rollouts in flight. group: those that come and go together. quickest_s: the least time between two changes."""

    lowest: int
    highest: int
    group: int
    quickest_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One generator, as it says itself; those behind a router are one. usage: of its KV cache, 0 to 1.

    None in its place: it does not answer, or gets no new work.
    """

    running: int
    waiting: int
    usage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A job at `at` (seconds). wait_fraction, staleness (mean), latency_s: since the last change; None: not measured."""

    at: float
    in_flight: int
    ready_groups: int
    step_groups: int
    wait_fraction: float | None
    staleness: float | None
    budget: int | None
    latency_s: float | None
    loads: Sequence[Load | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the next decision needs. too_much: the cap at the last cut; 0: none is known. cuts: for load, in a row. ready: groups, then."""

    cap: int
    changed_at: float
    generators: int
    too_much: int = 0
    cuts: int = 0
    ready: int = 0
    calm: int = 0
    """Turnovers since the last cut."""
    reason: Reason = "settled"


def first(bounds: Bounds, step_groups: int) -> int:
    """The cap of a job that has just begun: one batch in flight."""
    return clamp(step_groups * bounds.group, bounds)


def clamp(cap: float, bounds: Bounds) -> int:
    return max(bounds.lowest, min(bounds.highest, math.floor(cap)))


def begin(cap: int, sample: Sample) -> State:
    """The state of a job that has a cap and nothing else yet."""
    return State(cap=cap, changed_at=sample.at, generators=_well(sample))


def steer(state: State, sample: Sample, bounds: Bounds) -> State:
    """The next cap, and why."""
    cap, well = clamp(state.cap, bounds), _well(sample)
    if well != state.generators:
        return _generators_changed(replace(state, cap=cap), sample, bounds, well)
    if sample.at - state.changed_at < turnover_s(sample.latency_s, bounds):
        return replace(state, cap=cap, reason="turnover")
    ready_before, state = state.ready, replace(state, cap=cap, changed_at=sample.at, ready=sample.ready_groups)
    if (overload := _overload(sample)) is not None:
        return _cut(state, sample, bounds, overload)
    state = _calm(state)
    hungry = _hungry(sample)
    if not hungry and (surplus := _surplus(sample, ready_before)) is not None:
        return replace(state, cap=clamp(cap * SURPLUS_CUT, bounds), too_much=cap, calm=0, reason=surplus)
    if hungry and _has_room(sample) and sample.in_flight >= BINDS * cap:
        return replace(state, cap=clamp(_grown(cap, state.too_much, bounds), bounds), reason="grows")
    return replace(state, reason="settled")


def _calm(state: State) -> State:
    """A turnover without a cut. After many of them what was too much may not be so any more."""
    if state.calm < FORGET_AFTER:
        return replace(state, cuts=0, calm=state.calm + 1)
    return replace(state, cuts=0, calm=0, too_much=math.floor(state.too_much * GROWTH))


def turnover_s(latency_s: float | None, bounds: Bounds) -> float:
    """How long a change takes to be seen."""
    return min(max(latency_s or 0.0, bounds.quickest_s), MAX_TURNOVER_S)


def _well(sample: Sample) -> int:
    return sum(load is not None for load in sample.loads)


def _generators_changed(state: State, sample: Sample, bounds: Bounds, well: int) -> State:
    """With no generator left the cap stays: rollouts wait for one, and each has what it had."""
    if well == 0:
        return replace(state, reason="generators")
    share = well / state.generators if state.generators else 1.0
    return replace(
        state,
        cap=clamp(state.cap * share, bounds),
        too_much=math.floor(state.too_much * share),
        generators=well,
        changed_at=sample.at,
        cuts=0,
        calm=0,
        reason="generators",
    )


def _overload(sample: Sample) -> Literal["full", "queued"] | None:
    loads = [load for load in sample.loads if load is not None]
    if any(load.usage >= FULL for load in loads):
        return "full"
    running, waiting = (sum(getattr(load, name) for load in loads) for name in ("running", "waiting"))
    return "queued" if waiting > QUEUED * max(running, 1) else None


def _cut(state: State, sample: Sample, bounds: Bounds, why: Literal["full", "queued"]) -> State:
    """From what is in flight, if that is less than the cap allows: only that made the load."""
    factor = REPEATED_CUT if state.cuts >= REPEATED else FULL_CUT if why == "full" else QUEUE_CUT
    in_force = min(state.cap, max(sample.in_flight, bounds.group))
    return replace(state, cap=clamp(in_force * factor, bounds), too_much=in_force, cuts=state.cuts + 1, calm=0, reason=why)


def _hungry(sample: Sample) -> bool:
    """The trainer has waited, and less than a batch is ready: waits are over a while that has passed, the queue is of now."""
    return sample.ready_groups < sample.step_groups and (sample.wait_fraction is None or sample.wait_fraction >= HUNGRY)


def _surplus(sample: Sample, ready_before: int) -> Literal["surplus", "stale"] | None:
    """More than a batch beyond the next one waits, or staleness comes near the budget: both for nothing. A queue that falls is left to."""
    if sample.ready_groups > 2 * sample.step_groups:
        return "surplus" if sample.ready_groups >= ready_before else None
    near_the_budget = sample.budget and sample.staleness is not None and sample.staleness > NEAR * sample.budget
    return "stale" if near_the_budget else None


def _has_room(sample: Sample) -> bool:
    """The fullest has room: rollouts stay where they are."""
    return any(sample.loads) and all(load is None or load.usage < ROOM for load in sample.loads)


def _grown(cap: int, too_much: int, bounds: Bounds) -> int:
    careful, fast = (max(cap + bounds.group, math.floor(cap * factor)) for factor in (CAREFUL, GROWTH))
    near = math.floor(NEAR * too_much) if too_much else fast
    return max(careful, min(fast, near))
