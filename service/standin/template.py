"""Where turns begin in a prompt of ids: learned from the chat template itself, so that it holds for any renderer."""

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

Render = Callable[[list[dict[str, Any]]], list[int]]
"""Messages to ids, generation prompt included."""

USER = {"role": "user", "content": "x"}
ASSISTANT = {"role": "assistant", "content": "y"}


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt taken apart. before: ids up to the model's first turn, packed. turn: its finished turns. begun: ids of the open one."""

    before: bytes
    turn: int
    begun: list[int]


@dataclass(frozen=True, slots=True)
class Template:
    """header: ids that open each of the model's turns. opening: what a prompt ends with when the model is to speak; begins with header.
    end_id: what the model closes its turn with.
    """

    header: bytes
    opening: bytes
    end_id: int

    @classmethod
    def learn(cls, render: Render, *, markers: Collection[int], stop_token_ids: Sequence[int]) -> "Template":
        """Compare renderings that differ in one message. markers: ids of the tokenizer's added tokens."""
        asked, answered, repeated = render([USER]), render([USER, ASSISTANT, USER]), render([USER, USER])
        start = _common(asked, repeated)
        while start and asked[start - 1] in markers:
            start -= 1
        end = start + _common(asked[start:], answered[start:])
        header, rest = asked[start:end], answered[end:]
        end_id = next((token for token in rest if token in stop_token_ids), stop_token_ids[0])
        return cls(packed(header), packed(asked[start:]), end_id)

    def read(self, prompt: bytes) -> Reading:
        """`prompt`: little-endian int32 ids."""
        places = self._headers(prompt)
        if not places:
            return Reading(prompt, 0, [])
        last = prompt[places[-1] :]
        skipped = len(self.opening) if last.startswith(self.opening) else len(self.header)
        return Reading(prompt[: places[0]], len(places) - 1, array("i", last[skipped:]).tolist())

    def _headers(self, prompt: bytes) -> list[int]:
        places, at = [], prompt.find(self.header)
        while at >= 0:
            if at % 4 == 0:
                places.append(at)
            at = prompt.find(self.header, at + 1)
        return places


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two renderings begin with in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()
