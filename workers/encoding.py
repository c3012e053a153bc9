"""Encoding off the event loop where a text is long."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

ENCODED_CHARS = 20_000
"""Texts up to this length are encoded on the loop: about 10 ms."""


async def off_loop(messages: Sequence[Mapping[str, Any]], encode: Callable[[], T]) -> T:
    """`encode()`, which encodes `messages`: in a thread where they are long: a megabyte takes a second, in which no lease is renewed."""
    size = sum(len(str(message.get("content"))) for message in messages)
    return await asyncio.to_thread(encode) if size > ENCODED_CHARS else encode()
