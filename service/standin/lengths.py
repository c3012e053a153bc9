"""Turns of a drawn length: lognormal, as lengths of real rollouts roughly are.

A turn says its own length in its first words ("[237 tokens] ..."), and its ids follow from that length and the candidate's text alone. So a
turn that was cut off goes on to the length that was drawn for it, at any stand-in, which need remember nothing.
"""

import math
import random
import re
from collections.abc import Callable, Sequence

import msgspec

from service.standin.cuts import VARIANTS

FILLER = " and so it goes on,"
STATED = re.compile(r"\[(\d+) tokens\]")

Cut = Callable[[str, int], tuple[int, ...]]
"""A text and which of its cuts, to ids with the end token last."""


class Length(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of a turn, its end token counted. `sigma`: standard deviation of the logarithm; 0: always `mean`."""

    mean: float
    sigma: float = 0.0

    def problem(self) -> str | None:
        """What is wrong with it, if anything."""
        if not (math.isfinite(self.mean) and self.mean >= 1 and math.isfinite(self.sigma) and self.sigma >= 0):
            return "a length needs a mean of at least 1 token and a sigma of at least 0"
        return None

    def draw(self, chance: random.Random) -> int:
        return max(1, round(self.mean * math.exp(chance.gauss(0.0, self.sigma) - self.sigma**2 / 2)))


def ids_of(text: str, total: int, cut: Cut) -> tuple[int, ...]:
    """`total` ids: the length in words, `text` over and over, the end token."""
    variant = total % VARIANTS
    *opening, end = cut(f"[{total} tokens]", variant)
    *filler, _ = cut(text or FILLER, variant)
    repeats = max(0, total - 1 - len(opening)) // len(filler) + 1
    return (*(*opening, *filler * repeats)[: total - 1], end)


def rest_of(text: str, length: Length, begun: Sequence[int], begun_text: str, chance: random.Random, cut: Cut) -> tuple[int, ...]:
    """What follows the ids `begun` in a turn: up to the length that it states, up to a newly drawn one where it does not say."""
    stated = STATED.search(begun_text)
    total = int(stated[1]) if stated else len(begun) + length.draw(chance)
    return ids_of(text, max(total, len(begun) + 1), cut)[len(begun) :]
