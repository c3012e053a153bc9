"""A job's throughput as the store has it."""

from dataclasses import dataclass
from typing import Any

import msgspec

from service import keys
from service.jobs import JobCounts, JobRecord
from service.store import Store
from service.throughput import MAX_WINDOW_S, SLOT_S, Bottleneck, Figures, Now, bottleneck, figures

WINDOW_S = 600.0
"""Long enough for some steps of most trainers, short enough to follow a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """A job's figures, and what limits it."""

    figures: Figures
    bottleneck: Bottleneck


class Rates:
    """Reads what service/lua/rates.lua keeps. Every method raises UnavailableError when the store is away."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def throughput(self, record: JobRecord, counts: JobCounts, *, window_s: float = WINDOW_S) -> Throughput:
        """Over the last `window_s` seconds, at most MAX_WINDOW_S, or since the first dispatch.

        Raises:
            NotFoundError: the job is gone.
        """
        job = keys.JobKeys(record.job_id)
        reply = await self._store.evaluate(self._store.script("window"), job.all, [min(window_s, MAX_WINDOW_S)])
        if not reply:
            raise keys.missing(record.job_id)
        at, began, trainer, slots = float(reply[0]), reply[1], reply[2], [_map(raw) for raw in reply[3:]]
        first = at - at % SLOT_S - SLOT_S * (-(-window_s // SLOT_S) - 1)
        now = _now(record, counts)
        measured_s = at - max(first, float(began)) if began is not None else at - first
        found = figures(slots, _map(trainer) if trainer else {}, at=at, measured_s=measured_s, now=now)
        return Throughput(figures=found, bottleneck=bottleneck(found, now))


def _now(record: JobRecord, counts: JobCounts) -> Now:
    return Now(
        in_flight_rollouts=counts.in_flight_rollouts,
        queue_groups=counts.ready,
        capacity_groups=counts.capacity,
        backlog_groups=counts.backlog,
        staleness_budget=record.spec.staleness_budget,
        in_flight_cap=counts.in_flight_cap,
    )


def _map(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(raw)
    return found
