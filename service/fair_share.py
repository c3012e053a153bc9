"""How jobs share workers: the next free slot goes to the job with the least in flight for its weight. No I/O."""

import heapq
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a job has of all workers. in_flight: rollouts that they hold."""

    in_flight: int = 0
    weight: float = 1.0


def shares(free: int, loads: Mapping[str, Load]) -> dict[str, int]:
    """How many of `free` slots each job is offered, those with the least first; jobs that come to nothing are left out.

    Slot by slot to the job that has the least per weight once it has it; of two that have the same, to the first in `loads`.
    """
    offered: dict[str, int] = {}
    waiting = [((load.in_flight + 1) / load.weight, place, job) for place, (job, load) in enumerate(loads.items())]
    heapq.heapify(waiting)
    for _ in range(free if waiting else 0):
        _, place, job = waiting[0]
        offered[job] = offered.get(job, 0) + 1
        load = loads[job]
        heapq.heapreplace(waiting, ((load.in_flight + offered[job] + 1) / load.weight, place, job))
    return offered


async def fill(free: int, loads: Mapping[str, Load], take: Callable[[str, int], Awaitable[int]]) -> int:
    """Have `take` take so many rollouts of a job, until no slot is free or no job has more; how many it took in all.

    What one job has no work for, the others may have.
    """
    willing = dict(loads)
    total = 0
    while offers := shares(free - total, willing):
        for job, n in offers.items():
            taken = await take(job, n)
            total += taken
            if taken < n:
                del willing[job]
            else:
                willing[job] = replace(willing[job], in_flight=willing[job].in_flight + taken)
    return total
