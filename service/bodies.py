"""A request's body: read under a bound, parsed strictly, validated off the loop when it is big.

JSON is RFC 8259 and UTF-8: no NaN, no infinities, no lone surrogates; the last of two equal keys counts.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from service.errors import BusyError, InvalidError, RequestError, TooLargeError, UnsupportedMediaError
from service.problems import invalid

THREAD_BYTES = 256 * 1024
"""A body of this size takes some milliseconds to parse and validate; larger ones must not hold up the loop."""

BUDGET_BODIES = 4
"""Bodies of the largest size that fit at once; a parsed one takes several times its bytes."""

READ_S = 120.0
"""64 MiB at 5 Mbit/s; a client that is slower holds memory for too long."""

SMALL_BYTES = 2**20
"""Every body but a list of tasks: a job's spec is read back at every call, and no other body has a use for more."""

MAX_BRACKETS = 2**20
"""Opening brackets in a body, those in texts too: a value costs up to fifty times its bytes, and making and freeing them all holds up the
loop whichever thread does it."""

MAX_DEPTH = 64
"""Levels of nesting; deeper ones serve nobody and break the encoders that the body meets later."""

BodyModel = TypeVar("BodyModel", bound=BaseModel)
Result = TypeVar("Result")


class Bodies:
    """The request bodies that a gateway holds: each at most `max_bytes`, all together at most `BUDGET_BODIES` times that."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._budget = BUDGET_BODIES * max_bytes
        self._held = 0

    @asynccontextmanager
    async def held(self, request: Request, *, small: bool = True) -> AsyncIterator[bytes]:
        """The whole body, counted while the block runs; refused as soon as it is known to be too much.

        Raises:
            TooLargeError: more than `max_bytes` (`small`: and `SMALL_BYTES`), declared or sent.
            BusyError: too much is held for others.
            RequestError: it did not arrive within `READ_S`.
            UnsupportedMediaError: it says that it is something else than JSON.
        """
        chunks: list[bytes] = []
        size, most = 0, min(SMALL_BYTES, self._max_bytes) if small else self._max_bytes
        self._check(_declared(request), most)
        try:
            try:
                async with asyncio.timeout(READ_S):
                    async for chunk in request.stream():
                        size += len(chunk)
                        self._held += len(chunk)
                        self._check(size, most)
                        chunks.append(chunk)
            except TimeoutError:
                raise RequestError(f"the body did not arrive within {READ_S:.0f} s") from None
            if size and _media_type(request) != "application/json":
                raise UnsupportedMediaError("send the body as JSON with the header 'Content-Type: application/json'")
            yield b"".join(chunks)
        finally:
            self._held -= size

    def _check(self, size: int, most: int) -> None:
        if size > most:
            raise TooLargeError(f"a body may have {most} bytes here; send tasks in several requests")
        if self._held > self._budget:
            raise BusyError("too many large bodies are being read; send this one again later", retry_after_s=1)


def _declared(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """Run `work` on a body of `size` bytes: in a thread if it would hold up the loop."""
    return await asyncio.to_thread(work) if size > THREAD_BYTES else work()


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; nothing sent is an empty object.

    Raises:
        RequestError: not JSON.
        InvalidError: not an object, or nested too deeply.
        TooLargeError: more than `MAX_BRACKETS` lists and objects.
    """
    if not raw:
        return {}
    if raw.count(b"[") + raw.count(b"{") > MAX_BRACKETS:
        raise TooLargeError(f"a body may have {MAX_BRACKETS} opening brackets here; send the tasks in several requests")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidError("the body must be a JSON object")
    if _deeper_than(value, MAX_DEPTH):
        raise InvalidError(f"the body is nested more than {MAX_DEPTH} levels deep; make it flatter")
    return value


def _deeper_than(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _inside(value: object) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def parse_as(model: type[BodyModel], raw: bytes) -> BodyModel:
    """`raw` as `model`.

    Raises:
        InvalidError: with every wrong field.
        RequestError: not JSON.
    """
    return validated(model, parse_object(raw))


async def read_as(model: type[BodyModel], raw: bytes) -> BodyModel:
    """As `parse_as`, off the loop if `raw` is large."""
    return await off_loop(len(raw), lambda: parse_as(model, raw))


def validated(model: type[BodyModel], value: dict[str, Any]) -> BodyModel:
    """`value` as `model`. Raises InvalidError with every wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error, value) from None
