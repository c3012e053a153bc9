"""Steers the rollouts in flight of adaptive jobs: one decision every few seconds, by whichever worker asks first, kept in the store.

What must always hold: a job's cap is decided by one caller at a time, from the state of the decision before; a decision that took so long
that another one began is dropped. Whoever dies in between costs a few seconds.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from service import keys
from service.concurrency import Bounds, Load, Sample, State, begin, steer
from service.jobs import JobCounts, JobRecord, Jobs
from service.rates import Rates
from service.records import JobSpec
from service.store import Argument, Store
from service.throughput import Figures

logger = logging.getLogger(__name__)

LOOK_BACK_S = 10.0, 600.0
"""Waits and staleness are looked at since the last change, so that they are of the cap as it is; at least and at most so long."""

Loads = Callable[[], Awaitable[Sequence[Load | None] | None]]
"""What the generators say now; None: they stand still for a weight update, from which nothing follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to decide once. state: of the decision before."""

    at: str
    state: State | None


class Steering:
    """Every method raises UnavailableError when the store is away, and NotFoundError when the job is gone."""

    def __init__(self, store: Store, jobs: Jobs, *, every_s: float) -> None:
        self._store = store
        self._jobs = jobs
        self._rates = Rates(store)
        self._every_s = every_s

    async def steer(self, record: JobRecord, loads: Loads) -> State | None:
        """Decide on the job's cap, if it is adaptive and nobody did for `every_s`; None: nothing was decided."""
        if record.spec.concurrency != "adaptive" or (claim := await self._claim(record.job_id)) is None:
            return None
        if (found := await loads()) is None:
            return None
        counts = await self._jobs.counts(record.job_id)
        figures = (await self._rates.throughput(record, counts, window_s=_since_change(claim))).figures
        sample = sample_of(record.spec, counts, figures, found, at=float(claim.at))
        before = claim.state or begin(counts.in_flight_cap, sample)
        state = steer(before, sample, bounds_of(record.spec, quickest_s=2 * self._every_s))
        if state.cap != counts.in_flight_cap:
            logger.info("job %s: %d rollouts in flight instead of %d (%s)", record.job_id, state.cap, counts.in_flight_cap, state.reason)
        return state if await self._decide(record.job_id, claim, state) else None

    async def _claim(self, job_id: str) -> Claim | None:
        reply = await self._store.script("steer")(keys.JobKeys(job_id), ["claim", self._every_s])
        if reply["status"] == "missing":
            raise keys.missing(job_id)
        if reply["status"] != "ok":
            return None
        return Claim(at=reply["claim"], state=msgspec.json.decode(reply["state"], type=State) if reply["state"] else None)

    async def _decide(self, job_id: str, claim: Claim, state: State) -> bool:
        args: list[Argument] = ["decide", claim.at, state.cap, msgspec.json.encode(state)]
        reply = await self._store.script("steer")(keys.JobKeys(job_id), args)
        return bool(reply["status"] == "ok")


def _since_change(claim: Claim) -> float:
    shortest_s, longest_s = LOOK_BACK_S
    return min(max(float(claim.at) - claim.state.changed_at, shortest_s), longest_s) if claim.state else longest_s


def bounds_of(spec: JobSpec, *, quickest_s: float) -> Bounds:
    """The spec's."""
    return Bounds(lowest=spec.least_in_flight, highest=spec.max_in_flight_rollouts, group=spec.members, quickest_s=quickest_s)


def sample_of(spec: JobSpec, counts: JobCounts, figures: Figures, loads: Sequence[Load | None], *, at: float) -> Sample:
    """The job as the controller sees it."""
    return Sample(
        at=at,
        in_flight=counts.in_flight_rollouts,
        ready_groups=counts.ready,
        step_groups=spec.groups_per_step,
        wait_fraction=figures.wait_fraction,
        staleness=figures.staleness.mean,
        budget=spec.staleness_budget,
        latency_s=figures.mean_latency_s,
        loads=loads,
    )
