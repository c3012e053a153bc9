"""The tokenizer that renderers are handed: the model's own, called without the layers above it, checked against them when it is made.

One turn makes about 14 encode calls, most of them for short template strings: those come from a cache.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from service.plain_text import PlainText
from service.tiktoken_encoder import tiktoken_encoder

logger = logging.getLogger(__name__)

CACHED_CHARS = 64
"""Longer strings are rarely seen twice."""

CACHED_STRINGS = 4096

PROBES = (
    "",
    "\n",
    "user\nHello, world!",
    "def f(x):\n    return {'a': [1, 22, 333, 4444]}  # done\r\n\t\n\n",
    "  two spaces,   three, trailing  ",
    "\x00\x1c\x0b\x0c\x85\u1680\u180e\u2028\u3000\ufeff a\u0301 \ud7a3\u1100\u1161 ½²³٣ ǅ_ª",
    "Zażółć gęślą jaźń; e\u0301 é ﬁ Ⅷ K \u200b\u00a0 𝛼 \U0001f469\u200d\U0001f4bb 日本語 ไทย العربية",
    '<|im_start|>assistant\n<think>\n</think><tool_call>\n{"name": "x"}\n</tool_call><|im_end|>\n<|endoftext|><s></s>[INST]',
    "'s 'LL I'm can't 2026-11-29T14:00:00Z 0xFF 1e-9 https://example.org/a?b=c&d=%20",
)
"""Strings on which the direct calls must give the stock tokenizer's ids."""


class FastTokenizer:
    """Encodes and decodes like `stock` (a Hugging Face tokenizer), with untrusted text cut apart as `plain` marked it.

    Satisfies the `Tokenizer` protocol of the `renderers` package. Special tokens are never added, only recognised.
    fast: the probes allow to go past the stock calls.
    """

    def __init__(self, stock: Any, plain: PlainText) -> None:
        self._stock = stock
        self._raw: Tokenizer = stock.backend_tokenizer
        self._plain = plain
        self.name_or_path: str = stock.name_or_path
        self.unk_token_id: int | None = stock.unk_token_id
        self.eos_token_id: int | None = stock.eos_token_id
        self._tiktoken = tiktoken_encoder(self._raw)
        self._encode_long = self._fastest()
        self.fast = self._encode_long != self._by_stock
        self._encode_short = lru_cache(maxsize=CACHED_STRINGS)(lambda text: tuple(self._encode_long(text)))

    def _fastest(self) -> Callable[[str], list[int]]:
        """The fastest way to encode that gives the stock tokenizer's ids on all probes."""
        stock = [self._by_stock(probe) for probe in PROBES]
        for encode in (self._by_tiktoken, self._by_backend):
            if [encode(probe) for probe in PROBES] == stock:
                return encode
        logger.warning("tokenizer %s differs from its own backend on probe texts: using the slower stock calls", self.name_or_path)
        return self._by_stock

    def _by_tiktoken(self, text: str) -> list[int]:
        ids = self._tiktoken(text) if self._tiktoken else None
        return self._by_backend(text) if ids is None else ids

    def _by_backend(self, text: str) -> list[int]:
        return self._raw.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _by_stock(self, text: str) -> list[int]:
        ids: list[int] = self._stock.encode(text, add_special_tokens=False)
        return ids

    def _encode_piece(self, text: str) -> Sequence[int]:
        return self._encode_short(text) if len(text) <= CACHED_CHARS else self._encode_long(text)

    def encode(self, text: str, *_args: object, **_kwargs: object) -> list[int]:
        """Ids of `text`; added tokens in it are recognised unless they were marked as plain text."""
        if self._plain.sentinel not in text:
            return list(self._encode_piece(text))
        return [token for piece in self._plain.pieces(text) for token in self._encode_piece(piece)]

    def decode(self, token_ids: Sequence[int] | int, *_args: object, skip_special_tokens: bool = False, **_kwargs: object) -> str:
        """Text of the ids; those outside the vocabulary decode to nothing."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if ids and (min(ids) < 0 or max(ids) > _MAX_U32):
            ids = [token for token in ids if 0 <= token <= _MAX_U32]
        return self._raw.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            token = self._raw.token_to_id(tokens)
            return self.unk_token_id if token is None else token
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def known_ids(self, *tokens: str) -> list[int]:
        """Ids of those of `tokens` that the vocabulary has."""
        return [token_id for token in tokens if (token_id := self._raw.token_to_id(token)) is not None]

    def __len__(self) -> int:
        return self._raw.get_vocab_size(with_added_tokens=True)


_MAX_U32 = 2**32 - 1


def markers_of(stock: Any) -> list[str]:
    """The added tokens of a Hugging Face tokenizer as text, special or not."""
    return [token.content for token in stock.backend_tokenizer.get_added_tokens_decoder().values()]
