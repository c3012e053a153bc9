"""Docker's multiplexed stream, in any cut: nothing lost, nothing reordered, nothing made up."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.docker_attach import NotAStreamError, StreamHeaders, attach
from sandboxes.docker_engine import Engine, EngineError
from sandboxes.docker_line import DockerLine
from tests.sandbox_backends import DEPLOYMENT, IMAGE, docker_host, has_engine, named

real = pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}")
PIECES = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=300)), max_size=12)


def framed(pieces: list[tuple[int, bytes]]) -> bytes:
    return b"".join(struct.pack(">BxxxI", stream, len(data)) + data for stream, data in pieces)


@given(pieces=PIECES, cuts=st.lists(st.integers(min_value=1, max_value=64), max_size=200))
def test_any_cut_gives_the_same_bytes(pieces: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data, headers = framed(pieces), StreamHeaders()
    seen: dict[int, bytes] = {1: b"", 2: b""}
    for cut in [*cuts, len(data) + 1]:
        for stream, piece in headers.feed(data[:cut]):
            seen[stream] += piece
        data = data[cut:]
    for stream in (1, 2):
        assert seen[stream] == b"".join(piece for number, piece in pieces if number == stream)


def test_what_arrives_is_not_held_back() -> None:
    headers = StreamHeaders()
    assert headers.feed(struct.pack(">BxxxI", 1, 10) + b"abc") == [(1, b"abc")]
    assert headers.feed(b"defghij") == [(1, b"defghij")]


def test_a_stream_that_is_none() -> None:
    with pytest.raises(NotAStreamError, match="stream 72"):
        StreamHeaders().feed(b"HTTP/1.1 500 oops\r\n")


@asynccontextmanager
async def started(script: str) -> AsyncIterator[tuple[Engine, DockerLine]]:
    """A container whose first process is a shell script of ours, attached before its start as a sandbox's is."""
    engine = Engine(docker_host(), answer_s=10)
    config = {"Image": IMAGE, "Entrypoint": ["bash", "-c", script], "OpenStdin": True, "HostConfig": {"NetworkMode": "none"}}
    made = await engine.call("create", "POST", "containers/create", params={"name": named()}, body=config)
    line = DockerLine(engine, made["Id"], deployment_id=DEPLOYMENT)
    try:
        await line.start()
        yield engine, line
    finally:
        line.close()
        await line.remove()
        await engine.aclose()


class Heard:
    """What a stream gave, and why it ended."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.reasons: list[str] = []
        self._news = asyncio.Event()

    def received(self, data: bytes) -> None:
        self.data += data
        self._news.set()

    def lost(self, reason: str) -> None:
        self.reasons.append(reason)
        self._news.set()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not done():
                await self._news.wait()
                self._news.clear()


@pytest.mark.docker
@real
async def test_bytes_go_both_ways_whole() -> None:
    sent, heard = os.urandom(4_000_000), Heard()
    async with started("exec cat") as (_, line):
        connection = await line.connect(heard.received, heard.lost)
        connection.write(sent)
        await heard.until(lambda: len(heard.data) >= len(sent))
        assert heard.data == sent
        connection.close()
        assert heard.reasons == [], "after a close nothing is called back"


@pytest.mark.docker
@real
async def test_the_first_process_says_why_it_ended() -> None:
    heard = Heard()
    async with started("read -r; printf 'no room: '$REPLY >&2; exit 7") as (_, line):
        connection = await line.connect(heard.received, heard.lost)
        connection.write(b"here\n")
        await heard.until(lambda: bool(heard.reasons))
        assert heard.reasons == ["no room: here"]
        assert await line.exit_code() == 7
        health = await line.health()
        assert (health.present, health.alive, health.by_itself) == (True, False, True)


@pytest.mark.docker
@real
async def test_what_ended_before_it_was_taken_over_is_told() -> None:
    async with started("echo cannot begin >&2; exit 1") as (_, line):
        while await line.exit_code() is None:
            await asyncio.sleep(0.05)
        with pytest.raises(EngineError, match="cannot begin"):
            await line.connect(lambda _: None, lambda _: None)


@pytest.mark.docker
@real
async def test_a_stream_ends_and_another_one_follows() -> None:
    async with started("exec cat") as (_, line):
        (await line.connect(lambda _: None, lambda _: None)).close()
        heard = Heard()
        connection = await line.connect(heard.received, heard.lost)
        connection.write(b"again")
        await heard.until(lambda: heard.data == b"again")


@pytest.mark.docker
@real
async def test_no_such_container() -> None:
    engine = Engine(docker_host(), answer_s=10)
    try:
        with pytest.raises(EngineError, match="No such container") as caught:
            await attach(engine, "0" * 64)
        assert caught.value.status == 404
    finally:
        await engine.aclose()
