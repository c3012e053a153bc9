"""Text to ids that a tokenizer's own encoding would not give, yet that decode to the same text: as a model's sampled ids are.

Control markers (the tokenizer's added tokens) stay their one id; the text between them is cut at random places and each piece encoded.
"""

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from tokenizers import Tokenizer

VARIANTS = 16
"""Different cuts kept of one text; encoding each request anew would cost more than everything else."""

CACHED_TEXTS = 20_000
CACHED_OUTPUTS = 4096
MEAN_PIECE = 24
"""Characters between cuts, on average."""


class Cutter:
    """Cuts for one tokenizer. `end_id` closes every text."""

    def __init__(self, tokenizer: Tokenizer, end_id: int, *, seed: int) -> None:
        self._tokenizer = tokenizer
        self._end_id = end_id
        self._seed = seed
        markers = sorted((token.content for token in tokenizer.get_added_tokens_decoder().values()), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, markers)) + ")") if markers else None
        self.cut = lru_cache(maxsize=CACHED_TEXTS)(self._cut)
        self.decode = lru_cache(maxsize=CACHED_OUTPUTS)(self.decode_once)

    def _cut(self, text: str, variant: int) -> tuple[int, ...]:
        """The ids of `text` in its `variant`-th cut, the end token last."""
        chance = random.Random(f"{self._seed} {variant} {text}")
        pieces = [piece for part in self._parts(text) for piece in self._pieces(part, chance)]
        ids = tuple(token for encoded in self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False) for token in encoded.ids)
        if self.decode_once(ids) != text:  # a tokenizer whose pieces do not simply add up
            ids = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return (*ids, self._end_id)

    def _parts(self, text: str) -> list[str]:
        parts = self._split.split(text) if self._split else [text]
        return [part for part in parts if part]

    def _pieces(self, part: str, chance: random.Random) -> list[str]:
        if len(part) < 2 or (self._split and self._split.fullmatch(part)):
            return [part]
        places = {chance.randrange(1, len(part)) for _ in range(1 + len(part) // MEAN_PIECE)}
        edges = [0, *sorted(places), len(part)]
        return [part[start:end] for start, end in pairwise(edges)]

    def decode_once(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def resume(self, text: str, begun: Sequence[int], variant: int) -> tuple[int, ...]:
        """What follows `begun` in `text`: the rest of the cut that it is the beginning of, else the rest of the text, cut anew."""
        start = tuple(begun)
        for known in range(VARIANTS):
            ids = self.cut(text, known)
            if ids[: len(start)] == start:
                return ids[len(start) :]
        return self._cut(text[len(whole_text(self.decode_once(start))) :], variant)


def whole_text(decoded: str) -> str:
    """Without the replacement characters of a last character whose bytes are not all there."""
    return decoded.rstrip("\ufffd")
