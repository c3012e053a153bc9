"""A parsed turn as its journal entry: what was said, and the intent of every call in it. Pure but for the clock."""

import hashlib
import time

import msgspec

from service import journal
from service.calls import ParsedCall
from service.chat_model import Parsed
from service.progress import Progress

MAX_RAW_CHARS = 2000
"""Of a call that could not be understood, kept for people to read."""


def replied(parsed: Parsed, progress: Progress) -> journal.Replied:
    """The entry of the turn that `progress` holds. Sampled anew, the same turn has other call ids (P5)."""
    sampled = hashlib.blake2b(journal.pack_ids(progress.turn_ids()), digest_size=6).hexdigest()
    calls = [_call(call, f"call_{progress.turns}_{index}_{sampled}") for index, call in enumerate(parsed.calls)]
    return journal.Replied(at=time.time(), content=parsed.content, reasoning=parsed.reasoning, calls=calls)


def _call(call: ParsedCall, call_id: str) -> journal.Call:
    return journal.Call(
        id=call_id,
        name=call.name,
        arguments=None if call.arguments is None else msgspec.json.encode(call.arguments).decode(),
        error=call.error,
        raw="" if call.error is None else call.raw[:MAX_RAW_CHARS],
    )
