"""What is done to the fleet, and when: drawn from a seed. Pure, so that a failed run's schedule can be printed and drawn again."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class Kind(StrEnum):
    """What happens. kill: SIGKILL, and a start `seconds` later; term: SIGTERM, and a start; pause: SIGSTOP, and SIGCONT `seconds` later.

    cut and silence: its network, which is a worker's or a gateway's way to the store, and everybody's to a generator (`chaos/links.py`).
    """

    KILL_WORKER = "kill_worker"
    PAUSE_WORKER = "pause_worker"
    TERM_WORKER = "term_worker"
    CUT_WORKER = "cut_worker"
    SILENCE_WORKER = "silence_worker"
    KILL_GATEWAY = "kill_gateway"
    PAUSE_GATEWAY = "pause_gateway"
    TERM_GATEWAY = "term_gateway"
    CUT_GATEWAY = "cut_gateway"
    SILENCE_GATEWAY = "silence_gateway"
    KILL_GENERATOR = "kill_generator"
    TERM_GENERATOR = "term_generator"
    CUT_GENERATOR = "cut_generator"
    SILENCE_GENERATOR = "silence_generator"
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
    """at_s: after the start. place: which of the things of that noun, modulo how many there are. seconds: how long it is away.

    point: the crash point at which the successor of a killed process ends too (`service/crash_points.py`); empty: nowhere.
    """

    at_s: float
    kind: Kind
    place: int
    seconds: float
    point: str = ""

    def __str__(self) -> str:
        doomed = f", the next one dies {self.point}" if self.point else ""
        return f"{self.at_s:6.1f} s  {self.kind} {self.place} for {self.seconds:.1f} s{doomed}"


DECK = {
    Kind.KILL_WORKER: 6,
    Kind.PAUSE_WORKER: 2,
    Kind.TERM_WORKER: 1,
    Kind.CUT_WORKER: 2,
    Kind.SILENCE_WORKER: 2,
    Kind.KILL_GATEWAY: 3,
    Kind.PAUSE_GATEWAY: 1,
    Kind.TERM_GATEWAY: 1,
    Kind.CUT_GATEWAY: 1,
    Kind.SILENCE_GATEWAY: 1,
    Kind.KILL_GENERATOR: 1,
    Kind.TERM_GENERATOR: 1,
    Kind.CUT_GENERATOR: 1,
    Kind.SILENCE_GENERATOR: 1,
    Kind.KILL_SANDBOX: 3,
    Kind.REMOVE_SANDBOX: 2,
}
"""Cards of each kind: a short run sees nearly all of them. The store's events have their own times."""

STORE = ((0.3, Kind.KILL_STORE), (0.55, Kind.PAUSE_STORE), (0.8, Kind.KILL_STORE))
"""In fractions of each `STORE_PERIOD_S`, or of the whole where that is shorter."""
STORE_PERIOD_S = 60.0
FIRST_S = 3.0
"""Until there is work to disturb."""


def draw(seed: int, *, seconds: float, gap_s: float, lease_s: float, points: Mapping[str, Sequence[str]]) -> list[Event]:
    """Events in order within `seconds`; on average one each `gap_s`. What stops a worker's renewals lasts longer than its lease.

    points: the crash points of the processes of each noun that has any; all are dealt before one comes again.
    """
    chance = random.Random(seed)
    events = [_event(chance, at_s, kind, lease_s) for at_s, kind in _store_times(seconds)]
    kinds = _dealt(chance, [kind for kind, cards in DECK.items() for _ in range(cards)])
    decks = {noun: _dealt(chance, named) for noun, named in points.items()}
    at_s = FIRST_S
    while (at_s := at_s + chance.expovariate(1 / gap_s)) < seconds:
        kind = next(kinds)
        point = next(decks[kind.noun]) if kind.verb == "kill" and kind.noun in decks else ""
        events.append(_event(chance, at_s, kind, lease_s, point))
    return sorted(events, key=lambda event: event.at_s)


def _dealt(chance: random.Random, cards: Sequence[T]) -> Iterator[T]:
    """All of them in some order, then all of them in another, for ever."""
    while True:
        yield from chance.sample(cards, len(cards))


def _store_times(seconds: float) -> list[tuple[float, Kind]]:
    period_s = min(seconds, STORE_PERIOD_S)
    return [(start * period_s + part * period_s, kind) for start in range(int(seconds // period_s)) for part, kind in STORE]


def _event(chance: random.Random, at_s: float, kind: Kind, lease_s: float, point: str = "") -> Event:
    if kind in (Kind.PAUSE_WORKER, Kind.SILENCE_WORKER):
        seconds = lease_s * chance.uniform(1.2, 1.6)
    elif kind.verb in ("pause", "silence", "cut"):
        seconds = chance.uniform(1.0, 5.0)
    else:
        seconds = chance.uniform(0.1, 2.0)
    return Event(at_s=at_s, kind=kind, place=chance.randrange(1000), seconds=seconds, point=point)
