"""Bodies: bounded one by one and together, strict JSON."""

import asyncio
from collections.abc import Iterable

import pytest
from starlette.requests import Request
from starlette.types import Message

from service.bodies import BUDGET_BODIES, MAX_BRACKETS, Bodies, parse_object
from service.errors import BusyError, InvalidError, RequestError, TooLargeError, UnsupportedMediaError


def request(chunks: Iterable[bytes], *, media_type: str = "application/json", length: int | None = None) -> Request:
    headers = [(b"content-type", media_type.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    messages = iter([*({"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks), {"type": "http.request"}])

    async def receive() -> Message:
        return next(messages)

    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def read(bodies: Bodies, asked: Request) -> bytes:
    async with bodies.held(asked) as body:
        return body


async def test_a_body_is_whole() -> None:
    assert await read(Bodies(max_bytes=10), request([b"[1,", b"2]"])) == b"[1,2]"


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        pytest.param(request([b"x" * 6, b"x" * 6]), TooLargeError, id="sent"),
        pytest.param(request([], length=11), TooLargeError, id="declared"),
        pytest.param(request([b"x"], media_type="text/plain"), UnsupportedMediaError, id="not-json"),
    ],
)
async def test_what_is_refused(asked: Request, error: type[RequestError]) -> None:
    with pytest.raises(error):
        await read(Bodies(max_bytes=10), asked)


async def test_all_together_are_bounded_and_given_back() -> None:
    bodies = Bodies(max_bytes=10)
    enough = asyncio.Event()

    async def hold() -> None:
        async with bodies.held(request([b"x" * 10])):
            await enough.wait()

    async with asyncio.TaskGroup() as group:
        for _ in range(BUDGET_BODIES):
            group.create_task(hold())
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await read(bodies, request([b"x"]))
        enough.set()
    assert await read(bodies, request([b"x" * 10])) == b"x" * 10


@pytest.mark.parametrize(
    "raw", [b"{", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": "\\udc00"}', b"\xff", b'{"a": 1e999}', b"{'a': 1}"], ids=str
)
def test_what_is_not_json(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_object(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize("raw", [b"3", b"[]", b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}"], ids=["number", "list", "deep"])
def test_what_is_json_and_no_object_of_ours(raw: bytes) -> None:
    with pytest.raises(InvalidError):
        parse_object(raw)


def test_the_last_of_equal_keys_counts() -> None:
    assert parse_object(b'{"a": 1, "a": 2}') == {"a": 2}


@pytest.mark.parametrize("bracket", [b"[],", b"{},"])
def test_a_body_of_nothing_but_brackets_is_refused_before_it_is_parsed(bracket: bytes) -> None:
    with pytest.raises(TooLargeError):
        parse_object(b'{"tasks":[' + bracket * MAX_BRACKETS)
