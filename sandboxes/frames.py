"""The agent's wire format as bytes: frames, their parser, and what is in them (`agent/PROTOCOL.md`). Pure.

What must always hold: whatever bytes a parser is fed, in whatever pieces, it holds at most one frame of them, raises nothing, and gives
only frames whose CRC is right. What is unpacked is checked to the byte; a payload that is no such message is a `MalformedError`.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any, Final, NamedTuple

VERSION: Final = 1
MAGIC: Final = b"RLWY"
HEADER_BYTES: Final = 32
MAX_PAYLOAD_BYTES: Final = 65_536
MAX_RUN_BYTES: Final = 4 * 2**20
PREAMBLE: Final = bytes(HEADER_BYTES + MAX_PAYLOAD_BYTES)
"""Fills up a frame that an attacher before left cut short."""

MORE: Final = 1
DURABLE: Final = 2

STDIN_WINDOW_BYTES: Final = 1_048_576
STDIN_PIECE_BYTES: Final = MAX_PAYLOAD_BYTES - 8
DATA_WINDOW_BYTES: Final = 1_048_576

_HEAD = struct.Struct("<4sBBHQQI")
_CRC = struct.Struct("<I")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_HELLO = struct.Struct("<HQ")
_WELCOME = struct.Struct("<H16sQI")
_RUN = struct.Struct("<BIIQ")
_CONFIGURE = struct.Struct("<II")
_RESULT = struct.Struct("<BBHiQQIIQII")
_ERROR = struct.Struct("<H")
_PONG = struct.Struct("<QQQIII")
_CRC_AT = 28
_MAX_PIECES = 64
"""Of a frame that is not whole; smaller ones are put together on the way, since each costs memory of its own."""


class Type(IntEnum):
    """What a frame is. Below 64: from the attacher."""

    HELLO = 1
    RUN = 2
    STDIN = 3
    CREDIT = 4
    KILL = 5
    FORGET = 6
    KILL_ALL = 7
    PING = 8
    CONFIGURE = 9
    WELCOME = 65
    FENCED = 66
    RESULT = 67
    DATA = 68
    GIVEN = 69
    """The agent's CREDIT for STDIN."""
    ERROR = 70
    DONE = 71
    PONG = 72
    LOST = 73


class Kind(IntEnum):
    """What RUN does."""

    EXEC = 0
    SESSION = 1
    PACK = 2
    UNPACK = 3
    READ = 4
    WRITE = 5


class How(IntEnum):
    """How a call ended; says what its `code` is: an exit code, a signal, an errno."""

    EXITED = 0
    SIGNALLED = 1
    NOT_STARTED = 2


class Ended(IntEnum):
    """Bits of RESULT's flags."""

    TIMED_OUT = 1
    KILLED = 2
    OOM = 4
    DISK_FULL = 8
    FLOODED = 16
    SESSION_OVER = 32
    NO_WORKDIR = 64


class Refusal(IntEnum):
    """Codes of ERROR."""

    UNKNOWN = 1
    FULL = 2
    BAD_REQUEST = 3
    NO_USER = 4
    NO_PROCESS = 5
    TOO_LARGE = 6
    NO_SHELL = 7


class MalformedError(ValueError):
    """A payload that is not what its type says: the peer is not our agent, or no longer."""


class RunTooLongError(ValueError):
    """More arguments and environment than a message holds; no kernel would start it either."""


class Frame(NamedTuple):
    """One frame whose CRC was right."""

    type: int
    flags: int
    channel: int
    call: int
    payload: bytes


class Welcome(NamedTuple):
    version: int
    boot_id: str
    fence: int
    features: int


class Output(NamedTuple):
    """What was kept of one output: its first and its last bytes. `printed` is how many there were."""

    printed: int
    head: bytes
    tail: bytes


class Result(NamedTuple):
    how: int
    flags: int
    code: int
    seconds: float
    stdout: Output
    stderr: Output


class Pong(NamedTuple):
    oom_kills: int
    disk_bytes: int
    inodes: int
    alive: int
    kept: int
    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What RUN asks for. `timeout_ms` 0: none. `flood` 0: never. `cap`: bytes kept of each output."""

    kind: int = Kind.EXEC
    argv: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    session: str = ""
    timeout_ms: int = 0
    cap: int = 65_536
    flood: int = 0


class FrameParser:
    """Takes a stream in any pieces, gives the frames of one channel.

    It is `lost` from the first thing that is no frame to the next frame of its channel. One that joins a stream in its middle starts lost.
    While it is lost only its own channel counts, so that what a sandbox prints, which cannot know that number, is neither taken for a
    frame nor costs more than the search for four bytes.
    """

    def __init__(self, channel: int, *, lost: bool = False) -> None:
        self._channel = channel
        self._pieces: list[bytes] = []
        self._held = self._needed = 0
        self.lost = lost

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete with `data`."""
        self._pieces.append(data)
        self._held += len(data)
        if self._held < self._needed and len(self._pieces) < _MAX_PIECES:
            return []
        if len(self._pieces) > 1:
            data = b"".join(self._pieces)
        frames: list[Frame] = []
        at = self._parse(data, frames) if self._held >= self._needed else 0
        self._held -= at
        self._pieces = [data[at:]] if self._held else []
        self._needed = self._needed if self._held else 0
        return frames

    def _parse(self, data: bytes, frames: list[Frame]) -> int:
        """Append what is complete; where the rest begins, of which `_needed` bytes make sense to look at again."""
        at, end = 0, len(data)
        while at < end:
            if self.lost:
                at = _magic_from(data, at)
            elif data[at] == 0:
                at = end - len(data[at:].lstrip(b"\0"))
            if end - at < HEADER_BYTES:
                self._needed = HEADER_BYTES
                break
            magic, kind, flags, reserved, channel, call, length = _HEAD.unpack_from(data, at)
            if magic != MAGIC or reserved or length > MAX_PAYLOAD_BYTES or (self.lost and channel != self._channel):
                self.lost, at = True, at + 1
                continue
            stop = at + HEADER_BYTES + length
            if stop > end:
                self._needed = stop - at
                break
            payload = data[at + HEADER_BYTES : stop]
            if _CRC.unpack_from(data, at + _CRC_AT)[0] != zlib.crc32(payload, zlib.crc32(data[at : at + _CRC_AT])):
                self.lost, at = True, at + 1
                continue
            self.lost, at = False, stop
            if channel == self._channel:
                frames.append(Frame(kind, flags, channel, call, payload))
        return at


def _magic_from(data: bytes, at: int) -> int:
    """Where the magic, or what may become it with more bytes, stands next."""
    found = data.find(MAGIC, at)
    if found >= 0:
        return found
    for cut in (3, 2, 1):
        if data.endswith(MAGIC[:cut]) and len(data) - cut >= at:
            return len(data) - cut
    return len(data)


def encode(kind: int, channel: int, call: int = 0, payload: bytes = b"", flags: int = 0) -> bytes:
    """One frame. The payload is at most `MAX_PAYLOAD_BYTES`."""
    return b"".join(parts(kind, channel, call, payload, flags))


def parts(kind: int, channel: int, call: int, payload: bytes, flags: int = 0) -> tuple[bytes, bytes, bytes]:
    """One frame, not put together: large payloads are copied once, with all that goes out at once."""
    head = _HEAD.pack(MAGIC, kind, flags, 0, channel, call, len(payload))
    return head, _CRC.pack(zlib.crc32(payload, zlib.crc32(head))), payload


def encode_message(kind: int, channel: int, call: int, payload: bytes, flags: int = 0) -> bytes:
    """As many frames as the payload needs, all but the last with MORE."""
    if len(payload) <= MAX_PAYLOAD_BYTES:
        return encode(kind, channel, call, payload, flags)
    pieces = [payload[start : start + MAX_PAYLOAD_BYTES] for start in range(0, len(payload), MAX_PAYLOAD_BYTES)]
    frames = [encode(kind, channel, call, piece, flags | MORE) for piece in pieces[:-1]]
    return b"".join((*frames, encode(kind, channel, call, pieces[-1], flags)))


class Assembler:
    """Puts the frames of one message together. Holds at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, frame: Frame) -> bytes | None:
        """The whole message with its last frame, None before.

        Raises:
            MalformedError: it is longer than `limit`.
        """
        self._size += len(frame.payload)
        if self._size > self._limit:
            raise MalformedError(f"a message of more than {self._limit} bytes")
        if not frame.flags & MORE and not self._pieces:
            self._size = 0
            return frame.payload
        self._pieces.append(frame.payload)
        if frame.flags & MORE:
            return None
        whole = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        return whole


def pack_hello(fence: int) -> bytes:
    return _HELLO.pack(VERSION, fence)


def pack_run(run: Run) -> bytes:
    """
    Raises:
        ValueError: a NUL in a string, a string that is no text, more than `MAX_RUN_BYTES`.
    """
    env = [f"{name}={value}" for name, value in run.env.items()]
    payload = b"".join(
        (
            _RUN.pack(run.kind, run.timeout_ms, run.cap, run.flood),
            _strings((run.user, run.workdir, run.session)),
            _U32.pack(len(run.argv)),
            _strings(run.argv),
            _U32.pack(len(env)),
            _strings(env),
        )
    )
    if len(payload) > MAX_RUN_BYTES:
        raise RunTooLongError(f"a call of {len(payload)} bytes; at most {MAX_RUN_BYTES}")
    return payload


def pack_configure(*, disk_mib: int, inodes: int, user: str, workdir: str, env: Mapping[str, str]) -> bytes:
    """
    Raises:
        ValueError: a NUL in a string, or a string that is no text.
    """
    pairs = [f"{name}={value}" for name, value in env.items()]
    return b"".join((_CONFIGURE.pack(disk_mib, inodes), _strings((user, workdir)), _U32.pack(len(pairs)), _strings(pairs)))


def pack_stdin(offset: int, data: bytes | memoryview) -> bytes:
    return b"".join((_U64.pack(offset), data))


def pack_credit(count: int) -> bytes:
    return _U32.pack(count)


def pack_calls(calls: Sequence[int]) -> bytes:
    """The payload of FORGET; at most `MAX_PAYLOAD_BYTES // 8` calls."""
    return struct.pack(f"<{len(calls)}Q", *calls)


def unpack_welcome(payload: bytes) -> Welcome:
    version, boot_id, fence, features = _exactly(_WELCOME, payload)
    return Welcome(version, boot_id.hex(), fence, features)


def unpack_u64(payload: bytes) -> int:
    """FENCED's fence, and the place up to which STDIN may be sent."""
    return int(_exactly(_U64, payload)[0])


def unpack_pong(payload: bytes) -> Pong:
    return Pong(*_exactly(_PONG, payload))


def unpack_error(payload: bytes) -> tuple[int, str]:
    """The code and its text."""
    if len(payload) < _ERROR.size:
        raise MalformedError(f"an ERROR of {len(payload)} bytes")
    return _ERROR.unpack_from(payload)[0], payload[_ERROR.size :].decode(errors="replace")


def unpack_result(payload: bytes) -> Result:
    """
    Raises:
        MalformedError: its lengths are not those of its bytes.
    """
    if len(payload) < _RESULT.size:
        raise MalformedError(f"a RESULT of {len(payload)} bytes")
    how, flags, _, code, micros, printed, head, tail, printed_err, head_err, tail_err = _RESULT.unpack_from(payload)
    if len(payload) != _RESULT.size + head + tail + head_err + tail_err:
        raise MalformedError("a RESULT whose lengths are not those of its bytes")
    cuts = [_RESULT.size]
    for length in (head, tail, head_err, tail_err):
        cuts.append(cuts[-1] + length)
    kept = [payload[start:stop] for start, stop in pairwise(cuts)]
    return Result(how, flags, code, micros / 1e6, Output(printed, kept[0], kept[1]), Output(printed_err, kept[2], kept[3]))


def _strings(texts: Sequence[str]) -> bytes:
    """Each with a NUL behind it."""
    joined = "".join([f"{text}\0" for text in texts])
    packed = joined.encode(errors="surrogateescape")
    if packed.count(0) != len(texts):
        raise ValueError("a NUL in an argument or in the environment")
    return packed


def _exactly(layout: struct.Struct, payload: bytes) -> tuple[Any, ...]:
    if len(payload) != layout.size:
        raise MalformedError(f"a payload of {len(payload)} bytes where {layout.size} are due")
    return layout.unpack(payload)
