"""How many sandboxes of each kind to keep warm: pure rules over what was asked for lately.

A kind that was asked for once may never be asked for again (a task with an image of its own), so each begins with one warm sandbox, as a
probe, and gets up to twice as many as were used of it in its busiest moment. What nobody asked for in a whole window gets none.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

BURST_S = 5.0
"""Asks this close together are one burst: a group's rollouts arrive at once, and what is warm must meet them at once."""

_PROBES = 4
"""One place in so many is left to kinds of which nothing was used yet, or a new job could never show that it returns."""


@dataclass(slots=True)
class _Burst:
    number: int
    last: float
    asked: int = 0
    used: int = 0


class Demand:
    """What was asked for of one kind in the last `window_s` seconds. `now` is of any clock that does not go back."""

    def __init__(self, *, window_s: float) -> None:
        self._window_s = window_s
        self._bursts: deque[_Burst] = deque()

    def note(self, now: float, *, used_warm: bool) -> None:
        """One was asked for and given; `used_warm`: out of those kept warm."""
        number = int(now // BURST_S)
        if not self._bursts or self._bursts[-1].number != number:
            self._forget(now)
            self._bursts.append(_Burst(number, now))
        burst = self._bursts[-1]
        burst.last = now
        burst.asked += 1
        burst.used += used_warm

    def wanted(self, now: float) -> int:
        """How many to keep warm if there were room for all."""
        self._forget(now)
        asked = max((burst.asked for burst in self._bursts), default=0)
        used = max((burst.used for burst in self._bursts), default=0)
        return min(asked, 2 * used + 1)

    def proven(self, now: float) -> bool:
        """Whether any that was kept warm was used."""
        self._forget(now)
        return any(burst.used for burst in self._bursts)

    def _forget(self, now: float) -> None:
        while self._bursts and now - self._bursts[0].last >= self._window_s:
            self._bursts.popleft()


def shares(wanted: Sequence[int], size: int) -> list[int]:
    """`size` places dealt out one by one in turn, each kind until it has what it wants; the earlier ones get the odd places."""
    dealt = [0] * len(wanted)
    left = min(size, sum(wanted))
    while left > 0:
        for index, want in enumerate(wanted):
            if dealt[index] < want and left > 0:
                dealt[index] += 1
                left -= 1
    return dealt


def targets(demands: Sequence[Demand], size: int, now: float) -> list[int]:
    """How many to keep warm of each, `size` in all: shares for those that are used, what is left for the rest. Newest kinds last."""
    wanted = [demand.wanted(now) for demand in demands]
    proven = [index for index, demand in enumerate(demands) if demand.proven(now)]
    probes = [index for index in reversed(range(len(demands))) if index not in set(proven) and wanted[index]]
    kept_back = min(len(probes), max(1, size // _PROBES)) if size > 1 else 0
    dealt = dict(zip(proven, shares([wanted[index] for index in proven], size - kept_back), strict=True))
    left = size - sum(dealt.values())
    dealt |= zip(probes, shares([wanted[index] for index in probes], left), strict=True)
    return [dealt.get(index, 0) for index in range(len(demands))]
