"""A channel whose peer is no agent of ours any more: it ends its own calls, and nothing else."""

import asyncio
import errno
import struct
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from sandboxes import frames
from sandboxes.agent_sandbox import AgentSandbox
from sandboxes.base import SandboxContentError, SandboxError, SandboxLostError
from sandboxes.channel import Channel
from sandboxes.channel_attachment import Patience
from sandboxes.frames import Frame, Kind, Refusal, Run, Type
from sandboxes.line import Health

PATIENCE = Patience(connect_s=0.5, reconnect_s=0.5, tick_s=0.1, slack_s=0.5, kill_s=0.2)
MIB = 2**20

Answer = Callable[["HostileLine", Frame], Sequence[tuple[int, bytes, int]]]


class HostileLine:
    """Welcomes, then answers every frame with whatever `answer` says: (type, payload, flags) each."""

    id = "hostile"

    def __init__(self, answer: Answer, *, version: int = frames.VERSION) -> None:
        self._answer = answer
        self._version = version
        self.connections = 0

    async def connect(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> "HostileConnection":
        self.connections += 1
        return HostileConnection(self, received)

    def answers(self, frame: Frame) -> Sequence[tuple[int, bytes, int]]:
        if frame.type == Type.HELLO:
            return [(Type.WELCOME, struct.pack("<H16sQI", self._version, b"b" * 16, 0, 0), 0)]
        return self._answer(self, frame)

    async def health(self) -> Health:
        return Health(present=True, alive=True)

    async def remove(self) -> None:
        return

    async def snapshot(self, ttl_s: float) -> str:
        raise SandboxError("none")


class HostileConnection:
    def __init__(self, line: HostileLine, received: Callable[[bytes], None]) -> None:
        self._line = line
        self._received = received
        self._open = True

    def write(self, data: bytes) -> None:
        data = data.lstrip(b"\0")
        (channel,) = struct.unpack_from("<Q", data, 8)
        for frame in frames.FrameParser(channel).feed(data):
            for kind, payload, flags in self._line.answers(frame):
                asyncio.get_running_loop().call_soon(self._arrive, frames.encode(kind, channel, frame.call, payload, flags))

    def _arrive(self, data: bytes) -> None:
        if self._open:
            self._received(data)

    def close(self) -> None:
        self._open = False


def on(kind: Type, *answers: tuple[int, bytes, int]) -> Answer:
    return lambda line, frame: answers if frame.type == kind else ()


async def opened(line: HostileLine) -> AsyncIterator[Channel]:
    channel = Channel(line, patience=PATIENCE)
    await channel.open()
    yield channel
    await channel.aclose()


PART = (Type.RESULT, bytes(frames.MAX_PAYLOAD_BYTES), frames.MORE)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(on(Type.RUN, (Type.RESULT, b"", 0)), id="empty-result"),
        pytest.param(on(Type.RUN, (Type.RESULT, b"\xff" * 48, 0)), id="lengths-past-the-end"),
        pytest.param(on(Type.RUN, *[PART] * 100), id="endless-result"),
        pytest.param(on(Type.RUN, (Type.ERROR, b"", 0)), id="empty-error"),
        pytest.param(on(Type.RUN, (Type.ERROR, b"\xff\xff" + b"\xff" * 99, 0)), id="unknown-error"),
        pytest.param(on(Type.RUN, (Type.GIVEN, b"1", 0)), id="credit-that-is-none"),
        pytest.param(on(Type.RUN, (Type.DATA, b"x" * 100, 0), (200, b"", 0)), id="no-answer-at-all"),
        pytest.param(on(Type.RUN, (Type.PONG, b"", 0)), id="another-answer"),
        pytest.param(on(Type.RUN, (Type.PONG, bytes(32), 0)), id="another-answer-that-is-right"),
        pytest.param(on(Type.RUN, (Type.DONE, b"", 0)), id="done-with-nothing"),
    ],
)
async def test_nonsense_ends_the_call(answer: Answer) -> None:
    async for channel in opened(HostileLine(answer)):
        with pytest.raises(SandboxError):
            await channel.run(Run(argv=["true"], timeout_ms=500, cap=1000), stdin=b"")


async def test_an_agent_that_loses_every_stream_is_not_asked_without_pause() -> None:
    line = HostileLine(on(Type.RUN, (Type.LOST, b"", 0)))
    async for channel in opened(line):
        with pytest.raises(SandboxError):
            await channel.run(Run(argv=["true"], timeout_ms=500, cap=1000), stdin=b"")
    assert 2 <= line.connections <= 10


async def test_data_past_the_window_ends_the_call_and_is_not_held() -> None:
    line = HostileLine(on(Type.RUN, *[(Type.DATA, bytes(frames.MAX_PAYLOAD_BYTES), 0)] * 100))
    async for channel in opened(line):
        pieces = channel.data(Run(kind=Kind.READ, argv=["/f"], timeout_ms=500), lambda result: None)
        size, failed = len(await anext(pieces)), False
        await asyncio.sleep(0.1)
        try:
            async for piece in pieces:
                size += len(piece)
        except SandboxError:
            failed = True
        assert failed
        assert size <= 2 * MIB


async def test_credit_without_end_takes_no_more_than_there_is() -> None:
    line = HostileLine(on(Type.STDIN, (Type.GIVEN, struct.pack("<Q", 2**64 - 1), 0)))
    async for channel in opened(line):
        with pytest.raises(SandboxError, match="in time"):
            await channel.run(Run(argv=["cat"], timeout_ms=200), stdin=bytes(1 * MIB))


async def test_an_agent_of_another_version_is_none_of_ours() -> None:
    with pytest.raises(SandboxLostError, match="version 9"):
        await Channel(HostileLine(on(Type.RUN), version=9), patience=PATIENCE).open()


async def test_a_full_process_table_is_the_sandboxs_own_doing() -> None:
    line = HostileLine(on(Type.RUN, (Type.ERROR, struct.pack("<H", Refusal.NO_PROCESS) + b"fork", 0)))
    async for channel in opened(line):
        box = AgentSandbox(line, channel)
        result = await box.exec(["true"], timeout_s=1, max_output_bytes=100)
        assert (result.exit_code, result.start_errno) == (126, errno.EAGAIN)
        assert b"temporarily unavailable" in result.stderr
        with pytest.raises(SandboxContentError) as raised:
            await box.put({"/f": b""})
        assert raised.value.errno == errno.EAGAIN
        with pytest.raises(SandboxContentError):
            await box.get(["/f"], max_bytes=10)


async def test_a_full_journal_is_an_error() -> None:
    line = HostileLine(on(Type.RUN, (Type.ERROR, struct.pack("<H", Refusal.FULL) + b"full", 0)))
    async for channel in opened(line):
        with pytest.raises(SandboxError) as raised:
            await AgentSandbox(line, channel).exec(["true"], timeout_s=1, max_output_bytes=100)
        assert not isinstance(raised.value, SandboxContentError)
