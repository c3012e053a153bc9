"""What the stand-in says: candidate texts per turn, by what the prompt holds. Seeded: the nth time that a prompt is seen, the nth choice.

So a group's members, which have one prompt, differ, and a whole run can be repeated whatever order its requests come in.
"""

import json
import random
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from service.errors import InvalidError
from service.standin.lengths import Length

MAX_PROMPTS = 100_000
"""Prompts whose count is kept; the oldest is forgotten and its choices begin again."""


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing to say; chosen by weight among the candidates of its turn. With `length` the text is repeated or cut to a drawn number
    of tokens."""

    text: str = ""
    weight: float = 1.0
    length: Length | None = None


Turns = list[list[Candidate]]
"""Candidates of the first turn, of the second, ...; past the last turn the last one is used again."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`match`: text that the prompt holds before the model's first turn."""

    match: str
    turns: Turns


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`default` is for prompts that no rule matches; the first rule that matches is taken."""

    rules: list[Rule] = []
    default: Turns = []

    def turns(self, prompt_text: str) -> Turns:
        return next((rule.turns for rule in self.rules if rule.match in prompt_text), self.default)


def load_policy(path: Path) -> Policy:
    """Raises InvalidError where the file cannot be read or is no policy."""
    try:
        policy = msgspec.convert(json.loads(path.read_bytes()), Policy)
    except (OSError, ValueError) as error:
        raise InvalidError(f"policy {path}: {error}") from error
    for turns in [rule.turns for rule in policy.rules] + [policy.default]:
        for turn in turns:
            if not turn or min(candidate.weight for candidate in turn) < 0 or not sum(candidate.weight for candidate in turn) > 0:
                raise InvalidError(f"policy {path}: each turn needs candidates with weights of 0 or more, one of them above 0")
            problem = next((found for candidate in turn if candidate.length and (found := candidate.length.problem())), None)
            if problem:
                raise InvalidError(f"policy {path}: {problem}")
    return policy


def drawn_lengths(mean: float, sigma: float) -> Policy:
    """Turns that say nothing, at lognormal length. Raises InvalidError where there is no such distribution."""
    length = Length(mean=mean, sigma=sigma)
    if problem := length.problem():
        raise InvalidError(problem)
    return Policy(default=[[Candidate(length=length)]])


class Chooser:
    """Seeded choices among candidates."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def chance(self, prompt: bytes, *, greedy: bool) -> random.Random:
        """The randomness of this request: follows from the seed, the prompt and, unless greedy, from how often the prompt was seen."""
        if greedy:
            return random.Random(f"{self._seed} greedy {prompt.hex()}")
        count = self._seen.pop(prompt, 0)
        self._seen[prompt] = count + 1
        if len(self._seen) > MAX_PROMPTS:
            self._seen.popitem(last=False)
        return random.Random(f"{self._seed} {count} {prompt.hex()}")


def fitting(turns: Turns, turn: int, *, begun: str, regex: str | None) -> Sequence[Candidate]:
    """Candidates of a turn that go on from `begun` (what the turn already holds) and match `regex`, if one is asked for.

    One of a drawn length goes on from anything, and matches no `regex`.
    """
    if not turns:
        return []
    found = turns[min(turn, len(turns) - 1)]
    if regex is None:
        return [candidate for candidate in found if candidate.length or candidate.text.startswith(begun)]
    fixed = [candidate for candidate in found if not candidate.length and candidate.text.startswith(begun)]
    return [candidate for candidate in fixed if re.fullmatch(regex, candidate.text[len(begun) :])]


def choose(candidates: Sequence[Candidate], chance: random.Random) -> Candidate:
    weights = [candidate.weight for candidate in candidates]
    return chance.choices(candidates, weights if sum(weights) > 0 else None)[0]
