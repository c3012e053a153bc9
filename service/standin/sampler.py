"""From a prompt of ids to the ids and log-probabilities that the stand-in will "sample": policy, template and cutter put together."""

import hashlib
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from service.standin.cuts import VARIANTS, Cutter, whole_text
from service.standin.lengths import rest_of
from service.standin.policy import Candidate, Chooser, Policy, Turns, choose, fitting
from service.standin.template import Template

LOGPROBS = 262_144
"""Made once, float32 values; each reply takes a run of them."""

MAX_TOKENS = LOGPROBS // 2
"""Of one reply; no policy's text comes near it."""

CACHED_PROMPTS = 8192


class NothingToSayError(Exception):
    """No rule of the policy fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """N tokens to come. stopped_by: the stop token or text that ends them, None where the length does."""

    ids: list[int]
    logprobs: list[float]
    stopped_by: int | str | None


class Sampler:
    """`vocab_size`: ids at or above it would end a real engine."""

    def __init__(self, tokenizer: Tokenizer, template: Template, policy: Policy, *, seed: int) -> None:
        self.vocab_size = tokenizer.get_vocab_size()
        self._template = template
        self._policy = policy
        self._cutter = Cutter(tokenizer, template.end_id, seed=seed)
        self._chooser = Chooser(seed)
        values = -np.random.default_rng(seed).exponential(0.6, LOGPROBS).astype(np.float32)
        self._logprobs: list[float] = values.tolist()
        self._turns = lru_cache(maxsize=CACHED_PROMPTS)(self._turns_for)

    def decode(self, ids: Sequence[int]) -> str:
        return self._cutter.decode(tuple(ids))

    def plan(self, prompt: "array[int]", sampling: Mapping[str, Any], *, max_tokens: int) -> Plan:
        """Choose what follows `prompt`, cut to `max_tokens`, to the first stop token and to the first stop text.

        Raises:
            NothingToSayError: the policy has no candidate for this turn.
        """
        data = prompt.tobytes()
        reading = self._template.read(data)
        seen = hashlib.blake2b(data, digest_size=16).digest()
        chance = self._chooser.chance(seen, greedy=sampling.get("temperature") == 0)
        begun = whole_text(self.decode(reading.begun)) if reading.begun else ""
        candidates = fitting(self._turns(reading.before), reading.turn, begun=begun, regex=sampling.get("regex"))
        if candidates:
            ids = self._said(choose(candidates, chance), reading.begun, begun, chance)
        elif begun and not sampling.get("regex"):
            ids = (self._template.end_id,)  # a turn that another model began: nothing to add
        else:
            raise NothingToSayError(f"the policy has no candidate for turn {reading.turn + 1} of this prompt")
        return self._stopped(ids[:max_tokens], sampling, chance)

    def _said(self, candidate: Candidate, begun_ids: list[int], begun: str, chance: random.Random) -> Sequence[int]:
        """What follows the ids that the turn already holds, `begun` in text."""
        if candidate.length:
            return rest_of(candidate.text, candidate.length, begun_ids, begun, chance, self._cutter.cut)
        variant = chance.randrange(VARIANTS)
        return self._cutter.resume(candidate.text, begun_ids, variant) if begun else self._cutter.cut(candidate.text, variant)

    def _turns_for(self, before: bytes) -> Turns:
        return self._policy.turns(self._cutter.decode_once(array("i", before).tolist()))

    def _stopped(self, ids: Sequence[int], sampling: Mapping[str, Any], chance: random.Random) -> Plan:
        heard = () if sampling.get("ignore_eos") else sampling.get("stop_token_ids") or ()
        stops = {*heard, self._template.end_id}
        end = next((index + 1 for index, token in enumerate(ids) if token in stops), 0)
        stopped_by: int | str | None = ids[end - 1] if end else None
        kept = list(ids[: end or MAX_TOKENS])
        given = sampling.get("stop") or []
        for text in [given] if isinstance(given, str) else given:
            at = self._reaches(kept, text)
            if at:
                kept, stopped_by = kept[:at], text
        start = chance.randrange(LOGPROBS - MAX_TOKENS)
        return Plan(ids=kept, logprobs=self._logprobs[start : start + len(kept)], stopped_by=stopped_by)

    def _reaches(self, ids: Sequence[int], text: str) -> int:
        """After how many of `ids` their text holds `text`; 0 if it never does."""
        if text not in self.decode(ids):
            return 0
        return next(count for count in range(1, len(ids) + 1) if text in self.decode(ids[:count]))
