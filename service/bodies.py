"""A request's body: read under a bound, parsed strictly, validated off the loop when it is big.

JSON is RFC 8259 and UTF-8: no NaN, no infinities, no lone surrogates; the last of two equal keys counts.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from service.errors import InvalidError, RequestError, TooLargeError, UnsupportedMediaError
from service.problems import invalid

THREAD_BYTES = 256 * 1024
"""A body of this size takes some milliseconds to parse and validate; larger ones must not hold up the loop."""

MAX_DEPTH = 64
"""Levels of nesting; deeper ones serve nobody and break the encoders that the body meets later."""

BodyModel = TypeVar("BodyModel", bound=BaseModel)
Result = TypeVar("Result")


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The whole body, refused as soon as it is known to be too large.

    Raises:
        TooLargeError: more than `max_bytes`, declared or sent.
        UnsupportedMediaError: it says that it is something else than JSON.
    """
    too_large = TooLargeError(f"a body may have {max_bytes} bytes here; send the tasks in several requests")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    if size and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaError("send the body as JSON with the header 'Content-Type: application/json'")
    return b"".join(chunks)


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """Run `work` on a body of `size` bytes: in a thread if it would hold up the loop."""
    return await asyncio.to_thread(work) if size > THREAD_BYTES else work()


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; nothing sent is an empty object.

    Raises:
        RequestError: not JSON.
        InvalidError: not an object, or nested too deeply.
    """
    if not raw:
        return {}
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


def validated(model: type[BodyModel], value: dict[str, Any]) -> BodyModel:
    """`value` as `model`. Raises InvalidError with every wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error, value) from None
