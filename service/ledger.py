"""What became of every sampled token: the books of a job as the Lua steps keep them. Pure.

What must always hold: generated = delivered + discarded + standing, where standing is what rollouts have sampled whose group has not ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

KEPT = "kept"
DISCARDED = "discarded:"


@dataclass(slots=True)
class Entry:
    """Rollouts of one fate. lengths: upper bound (0, 1, 2, 4, 8...) -> rollouts with at most so many sampled tokens, and more than the
    bound below. Of tokens that a rollout gave up and went on, it is counted once, with the tokens that it gave up."""

    rollouts: int = 0
    tokens: int = 0
    lengths: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """`kept` was trained on; `discarded`: by reason."""

    kept: Entry
    discarded: dict[str, Entry]


def read_ledger(fields: Mapping[str, int]) -> Ledger:
    """From the fields `<entry>|<rollouts, tokens or bound>`."""
    entries: dict[str, Entry] = {}
    for name, value in fields.items():
        fate, _, what = name.rpartition("|")
        entry = entries.setdefault(fate, Entry())
        if what == "rollouts":
            entry.rollouts = value
        elif what == "tokens":
            entry.tokens = value
        else:
            entry.lengths[int(what)] = value
    for entry in entries.values():
        entry.lengths = dict(sorted(entry.lengths.items()))
    discarded = {fate.removeprefix(DISCARDED): entry for fate, entry in sorted(entries.items()) if fate.startswith(DISCARDED)}
    return Ledger(kept=entries.get(KEPT, Entry()), discarded=discarded)


def together(entries: Mapping[str, Entry]) -> Entry:
    """Their sum."""
    total = Entry()
    for entry in entries.values():
        total.rollouts += entry.rollouts
        total.tokens += entry.tokens
        for bound, rollouts in entry.lengths.items():
            total.lengths[bound] = total.lengths.get(bound, 0) + rollouts
    return total
