"""The life of groups as events: what closed forms leave out (percentiles, the worst group, stale work, starts that queue, pauses).

What always holds: a group that began ends trained, filtered, evicted or stale, or is in flight, ready or in the trainer's hands; the
charged ones never exceed the gate's capacity; under `requeue` and `drop` none is trained above the budget; the same seed is the same run.

Staleness is the policy version when the trainer takes the group, less the one at which its first rollout began. Members start in order as
places get free; the gate starts a group only with places for all of it, as the service does. While weights are updated every rollout
stands still, those in a tool too: a bound from above. A task that runs again draws new lengths.

Times of rollouts run on a clock that stops during updates, so that an update moves no event: `_paused` is how long it has stood.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from service.plan.errors import PlanError
from service.plan.results import Control, Ends, Reading, Simulated, Staleness
from service.plan.setting import Gate, QueueDrop, QueueMax, Setting, draw_times

WARM_UP = 0.2
"""Of the steps come before the window that is measured."""
MIN_STEPS = 50
MOST_STEPS_FOR_DEPTH = 2_000
"""Of a run that is long only because a deep queue takes its time to fill."""
MOST_ROLLOUTS = 40_000_000
"""Some minutes."""
_CHUNK = 2048
"""Groups drawn at a time."""
_MOST_BEGUN, _MOST_USABLE = 200, 40
"""Groups begun for each one to train, all and before filters, after which a run that filters or discards nearly all is given up."""
MOST_SURPLUS = 25
"""Times what the trainer consumes, beyond which a run without a gate would but throw away."""


class _Group:
    __slots__ = ("begun_at", "filtered", "left", "members", "ready_at", "requeues", "running", "tokens")

    def __init__(self, begun_at: int, requeues: int, left: int, members: list[tuple[float, float, float]], *, filtered: bool) -> None:
        self.begun_at = begun_at
        self.ready_at = 0
        self.requeues = requeues
        self.left = left
        """Rollouts that it still needs; 0 and below: it is over, whatever still runs."""
        self.running = 0
        self.members = members
        """Not yet started: latency, start time of its sandbox, tokens."""
        self.tokens = 0.0
        self.filtered = filtered


def simulate(setting: Setting, *, groups: int = 20_000, seed: int = 0, control: Control | None = None) -> Simulated:
    """Train `groups` groups, or more where steps are large or what is out takes long to fill; and measure all but the first fifth.

    Raises:
        PlanError: nearly everything is filtered or discarded, or the run would take too long.
    """
    steps = _steps(setting, groups)
    if steps * setting.groups_per_step * setting.members / setting.acceptance > MOST_ROLLOUTS:
        raise PlanError(
            "groups-per-step", f"{steps} steps of such size are too many rollouts to simulate; lower it, --group-size or --groups"
        )
    return _Run(setting, steps, np.random.default_rng(seed), control).to_the_end()


def _steps(setting: Setting, groups: int) -> int:
    """Enough for the warm-up to be twice what may be out, in steps."""
    times = setting.times
    rho = setting.slots * setting.acceptance * setting.train_s / (times.held_s * setting.batch)
    in_flight = setting.slots * times.tail / (setting.batch * max(1.0, rho)) + 1
    match setting.rule:
        case Gate(budget=budget):
            full = (budget + 1) * setting.steps_per_version
            in_flight = full if rho > 1 else min(in_flight, full)  # a trainer that is behind lets the queue fill
        case _ if rho > MOST_SURPLUS:
            raise PlanError(
                "concurrency", f"generators make {rho:.0f} times what the trainer consumes, and no gate holds them; correct a rate"
            )
        case QueueDrop(batches=batches) if rho > 1:
            in_flight += batches
        case QueueMax(max_staleness=bound) if rho > 1:
            in_flight += bound * setting.steps_per_version
    deep = min(MOST_STEPS_FOR_DEPTH, math.ceil(2 * in_flight / WARM_UP))
    return max(MIN_STEPS, math.ceil(groups / setting.groups_per_step), deep)


class _Run:
    """One simulation. Versions, times and counts are plain numbers here: a run has a million events."""

    def __init__(self, setting: Setting, steps: int, rng: np.random.Generator, control: Control | None) -> None:
        rule = setting.rule
        self._setting, self._control, self._rows = setting, control, _rows(setting, rng)
        self._batch, self._last_step, self._first_step = setting.groups_per_step, steps, math.ceil(steps * WARM_UP)
        self._whole = setting.members if isinstance(rule, Gate) else 1
        """Free places that it takes to begin a group."""
        self._slots = setting.slots
        self._capacity = setting.capacity or math.inf
        self._queue_limit = math.floor(rule.batches * self._batch) if isinstance(rule, QueueDrop) else math.inf
        self._oldest_first = not isinstance(rule, QueueDrop)
        self._too_old: float = math.inf
        self._stops_early, self._max_requeues = False, 0
        match rule:
            case QueueMax(max_staleness=bound):
                self._too_old = bound
            case Gate(budget=bound, stale_policy="requeue" | "drop" as policy):
                self._too_old, self._stops_early = bound, True
                self._max_requeues = rule.max_requeues if policy == "requeue" else 0
        self._starters = [0.0] * setting.max_starting if setting.max_starting and setting.sandbox_s else None

        self._now = self._paused = 0.0
        self._version = self._steps = self._number = 0
        self._events: list[tuple[float, int, _Group, float]] = []
        self._ready: list[tuple[int, int, _Group]] = []
        self._begun: deque[_Group] = deque()
        self._again: deque[int] = deque()
        self._opening: _Group | None = None
        self._in_flight = self._charged = self._uncharge = self._charged_max = 0
        self._train_end = math.inf
        self._counts = dict.fromkeys(("begun", "trained", "filtered", "evicted", "stale", "requeued", "done"), 0)
        self._wait_from = self._step_from = self._waited_s = 0.0
        self._taken_ages: list[int] = []
        self._window = _Window()

    def to_the_end(self) -> Simulated:
        limit = min(_MOST_BEGUN, _MOST_USABLE / self._setting.acceptance) * self._last_step * self._batch
        self._fill()
        while self._steps < self._last_step:
            if self._events and self._events[0][0] + self._paused <= self._train_end:
                self._rollout_ended()
            else:
                self._step_ended()
            if self._counts["begun"] > limit:
                raise PlanError("acceptance", "nearly all groups are filtered or discarded; raise --acceptance or the budget")
        return self._report()

    # -------------------------------------------------------------------------------------------------------------- rollouts

    def _fill(self) -> None:
        """Start rollouts while there are places: of the group that is opening, then of a new one if it may begin."""
        while self._in_flight < self._slots:
            group = self._opening
            if group is None:
                if self._charged >= self._capacity or self._in_flight + self._whole > self._slots:
                    return
                group = self._begin()
            latency, start, tokens = group.members.pop()
            if not group.members:
                self._opening = None
            at = self._now - self._paused
            if self._starters is not None:
                begins = max(at, self._starters[0])
                heapq.heapreplace(self._starters, begins + start)
                latency += begins - at
            group.running += 1
            self._moved(1)
            self._number += 1
            heapq.heappush(self._events, (at + latency + start, self._number, group, tokens))

    def _begin(self) -> _Group:
        members, filtered = next(self._rows)
        requeues = self._again.popleft() if self._again else 0
        group = _Group(self._version, requeues, self._setting.group_size, members, filtered=filtered)
        self._window.drawn += sum(tokens for _, _, tokens in members)
        self._window.drawn_members += len(members)
        self._counts["begun"] += 1
        self._charged += 1
        self._charged_max = max(self._charged_max, self._charged)
        if self._stops_early:
            self._begun.append(group)
        self._opening = group
        return group

    def _rollout_ended(self) -> None:
        finish, _, group, tokens = heapq.heappop(self._events)
        if group.left <= 0:
            return  # stopped before: its place was given back then
        self._now = finish + self._paused
        self._moved(-1)
        self._counts["done"] += 1
        group.running -= 1
        group.left -= 1
        group.tokens += tokens
        if group.left == 0:
            self._group_ended(group)
            self._take()
        self._fill()

    def _stop(self, group: _Group) -> None:
        """Nothing of it runs or starts any more."""
        group.left = 0
        self._moved(-group.running)
        group.running = 0
        if self._opening is group:
            self._opening = None

    # ---------------------------------------------------------------------------------------------------------------- groups

    def _group_ended(self, group: _Group) -> None:
        self._stop(group)
        if group.filtered:
            self._charged -= 1
            self._counts["filtered"] += 1
        elif self._version - group.begun_at > self._too_old:
            self._discard(group)
        else:
            group.ready_at = self._version
            self._queued()
            self._number += 1
            heapq.heappush(self._ready, (group.begun_at if self._oldest_first else 0, self._number, group))
            if len(self._ready) > self._queue_limit:
                heapq.heappop(self._ready)
                self._charged -= 1
                self._counts["evicted"] += 1

    def _discard(self, group: _Group) -> None:
        self._charged -= 1
        self._counts["stale"] += 1
        if group.requeues < self._max_requeues:
            self._counts["requeued"] += 1
            self._again.append(group.requeues + 1)

    # --------------------------------------------------------------------------------------------------------------- trainer

    def _take(self) -> None:
        if self._train_end < math.inf or len(self._ready) < self._batch:
            return
        self._queued()
        taken = [heapq.heappop(self._ready)[2] for _ in range(self._batch)]
        self._waited_s = self._now - self._wait_from
        self._taken_ages = [self._version - group.begun_at for group in taken]
        self._window.taken(taken, self._taken_ages, self._waited_s)
        self._uncharge += self._batch
        self._train_end = self._now + self._setting.train_s

    def _step_ended(self) -> None:
        self._now, self._train_end = self._train_end, math.inf
        self._steps += 1
        self._counts["trained"] += self._batch
        if self._steps % self._setting.steps_per_version == 0:
            self._bump()
        self._wait_from = self._now
        if self._steps == self._first_step:
            self._moved(0)
            self._queued()
            self._window = _Window(opened_at=self._now, moved_at=self._now, queued_at=self._now, counts=dict(self._counts))
        if self._control is not None:
            self._slots = max(self._setting.members, self._control(self._reading()))
        self._step_from = self._now
        self._fill()
        self._take()

    def _bump(self) -> None:
        """New weights. Staleness changes here only, so here is looked for what has become too old."""
        self._paused += self._setting.update_s
        self._now += self._setting.update_s
        self._version += 1
        self._charged -= self._uncharge
        self._uncharge = 0
        oldest = self._version - self._too_old
        if self._ready and self._ready[0][0] < oldest and self._oldest_first:
            self._queued()
            while self._ready and self._ready[0][0] < oldest:
                self._discard(heapq.heappop(self._ready)[2])
        while self._begun and self._begun[0].begun_at < oldest:
            group = self._begun.popleft()
            if group.left > 0:
                self._stop(group)
                self._discard(group)

    # --------------------------------------------------------------------------------------------------------------- measures

    def _moved(self, rollouts: int) -> None:
        self._window.rollout_s += self._in_flight * (self._now - self._window.moved_at)
        self._window.moved_at = self._now
        self._in_flight += rollouts

    def _queued(self) -> None:
        """The ready queue is about to change."""
        self._window.queue_s += len(self._ready) * (self._now - self._window.queued_at)
        self._window.queued_at = self._now
        self._window.queue_max = max(self._window.queue_max, len(self._ready))

    def _reading(self) -> Reading:
        return Reading(
            now_s=self._now,
            version=self._version,
            step_s=self._now - self._step_from,
            waited_s=self._waited_s,
            ready_groups=len(self._ready),
            in_flight=self._in_flight,
            staleness_mean=sum(self._taken_ages) / self._batch,
        )

    def _report(self) -> Simulated:
        self._moved(0)
        self._queued()
        seconds = self._now - self._window.opened_at
        counts, since = self._counts, self._window.counts
        evicted, stale, trained, requeued, done = (counts[k] - since[k] for k in ("evicted", "stale", "trained", "requeued", "done"))
        ends = {name: counts[name] for name in ("begun", "trained", "filtered", "evicted", "stale")}
        return Simulated(
            steps=self._steps - self._first_step,
            seconds=seconds,
            staleness=self._window.spread(),
            wait_share=self._window.waited_s / seconds,
            generated_samples_per_s=done / seconds,
            consumed_samples_per_s=trained * self._setting.group_size / seconds,
            queue_mean=self._window.queue_s / seconds,
            queue_max=self._window.queue_max,
            in_flight_mean=self._window.rollout_s / seconds,
            charged_max=self._charged_max,
            discarded_share=(evicted + stale) / (evicted + stale + trained),
            requeued=requeued,
            trained_tokens=self._window.tokens / (len(self._window.staleness) * self._setting.group_size),
            drawn_tokens=self._window.drawn / self._window.drawn_members,
            ends=Ends(**ends, out=self._charged - self._uncharge + (self._batch if self._train_end < math.inf else 0)),
        )


@dataclass(slots=True, kw_only=True)
class _Window:
    """Sums since `opened_at`, when the counts of the run were `counts`."""

    opened_at: float = 0.0
    moved_at: float = 0.0
    queued_at: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    rollout_s: float = 0.0
    queue_s: float = 0.0
    queue_max: int = 0
    waited_s: float = 0.0
    drawn: float = 0.0
    drawn_members: int = 0
    tokens: float = 0.0
    pre_queue: int = 0
    staleness: list[int] = field(default_factory=list)

    def taken(self, groups: list[_Group], ages: list[int], waited_s: float) -> None:
        self.waited_s += waited_s
        self.staleness += ages
        for group in groups:
            self.pre_queue += group.ready_at - group.begun_at
            self.tokens += group.tokens

    def spread(self) -> Staleness:
        ages = np.array(self.staleness)
        p50, p95 = np.percentile(ages, [50, 95]).tolist()
        mean, pre_queue = float(ages.mean()), self.pre_queue / len(ages)
        return Staleness(mean=mean, p50=p50, p95=p95, max=int(ages.max()), pre_queue_mean=pre_queue, in_queue_mean=mean - pre_queue)


def _rows(setting: Setting, rng: np.random.Generator) -> Iterator[tuple[list[tuple[float, float, float]], bool]]:
    """Groups without end: their rollouts as (latency but for the sandbox's start, that start, tokens), and whether a filter takes them."""
    shape = (_CHUNK, setting.members)
    while True:
        tokens = setting.lengths.draw(rng, shape)
        starts = draw_times(rng, shape, setting.sandbox_s, setting.sandbox_sigma)
        latencies = tokens / setting.sampling_rate + draw_times(rng, shape, setting.tool_s, setting.tool_sigma) + setting.verify_s
        filtered = rng.random(_CHUNK) >= setting.acceptance
        for row in zip(latencies.tolist(), starts.tolist(), tokens.tolist(), filtered.tolist(), strict=True):
            yield list(zip(*row[:3], strict=True)), row[3]
