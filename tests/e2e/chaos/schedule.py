"""What is done to the fleet, and when: drawn from a seed. Pure, so that a failed run's schedule can be printed and drawn again."""

import random
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What happens. kill: SIGKILL, and a start `seconds` later; pause: SIGSTOP, and SIGCONT `seconds` later; term: SIGTERM, and a start."""

    KILL_WORKER = "kill_worker"
    PAUSE_WORKER = "pause_worker"
    TERM_WORKER = "term_worker"
    KILL_GATEWAY = "kill_gateway"
    PAUSE_GATEWAY = "pause_gateway"
    TERM_GATEWAY = "term_gateway"
    KILL_GENERATOR = "kill_generator"
    TERM_GENERATOR = "term_generator"
    KILL_STORE = "kill_store"
    PAUSE_STORE = "pause_store"
    KILL_SANDBOX = "kill_sandbox"
    REMOVE_SANDBOX = "remove_sandbox"

    @property
    def verb(self) -> str:
        return self.partition("_")[0]

    @property
    def noun(self) -> str:
        return self.partition("_")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """at_s: after the start. place: which of the things of that noun, modulo how many there are. seconds: how long it is away."""

    at_s: float
    kind: Kind
    place: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.at_s:6.1f} s  {self.kind} {self.place} for {self.seconds:.1f} s"


WEIGHTS = {
    Kind.KILL_WORKER: 6,
    Kind.PAUSE_WORKER: 3,
    Kind.TERM_WORKER: 2,
    Kind.KILL_GATEWAY: 2,
    Kind.PAUSE_GATEWAY: 1,
    Kind.TERM_GATEWAY: 1,
    Kind.KILL_GENERATOR: 2,
    Kind.TERM_GENERATOR: 2,
    Kind.KILL_SANDBOX: 2,
    Kind.REMOVE_SANDBOX: 2,
}
"""Of what is drawn; the store's events have their own times."""

STORE = ((0.3, Kind.KILL_STORE), (0.55, Kind.PAUSE_STORE), (0.8, Kind.KILL_STORE))
"""In fractions of each `STORE_PERIOD_S`, or of the whole where that is shorter."""
STORE_PERIOD_S = 60.0
FIRST_S = 3.0
"""Until there is work to disturb."""


def draw(seed: int, *, seconds: float, gap_s: float, lease_s: float) -> list[Event]:
    """Events in order within `seconds`; on average one each `gap_s`. Pauses last longer than a worker's lease."""
    chance = random.Random(seed)
    events = [_event(chance, at_s, kind, lease_s) for at_s, kind in _store_times(seconds)]
    at_s = FIRST_S
    while (at_s := at_s + chance.expovariate(1 / gap_s)) < seconds:
        kind = chance.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        events.append(_event(chance, at_s, kind, lease_s))
    return sorted(events, key=lambda event: event.at_s)


def _store_times(seconds: float) -> list[tuple[float, Kind]]:
    period_s = min(seconds, STORE_PERIOD_S)
    return [(start * period_s + part * period_s, kind) for start in range(int(seconds // period_s)) for part, kind in STORE]


def _event(chance: random.Random, at_s: float, kind: Kind, lease_s: float) -> Event:
    if kind is Kind.PAUSE_WORKER:
        seconds = lease_s * chance.uniform(1.2, 1.6)
    elif kind.verb == "pause":
        seconds = chance.uniform(1.0, 5.0)
    else:
        seconds = chance.uniform(0.1, 2.0)
    return Event(at_s=at_s, kind=kind, place=chance.randrange(1000), seconds=seconds)
