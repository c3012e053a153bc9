"""The wire: any cut of a stream gives the same frames, nothing that is no frame is taken for one, nothing hostile is more than refused."""

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import frames
from sandboxes.channel_calls import Outgoing
from sandboxes.frames import Assembler, Frame, FrameParser, How, Kind, MalformedError, Output, Result, Run, Type

CHANNEL = 0x1122334455667788

PAYLOADS = st.binary(max_size=80) | st.sampled_from([frames.MAGIC * 9, bytes(64), b"RLW", frames.MAGIC[::-1]])
FRAMES = st.builds(
    Frame,
    st.integers(0, 255),
    st.integers(0, 255),
    st.just(CHANNEL) | st.integers(1, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    PAYLOADS,
)


def encoded(frame: Frame) -> bytes:
    return frames.encode(frame.type, frame.channel, frame.call, frame.payload, frame.flags)


def own(sent: list[Frame]) -> list[Frame]:
    return [frame for frame in sent if frame.channel == CHANNEL]


def fed(parser: FrameParser, stream: bytes, cuts: list[int]) -> list[Frame]:
    found, at = list[Frame](), 0
    for cut in [*cuts, len(stream)]:
        found += parser.feed(stream[at : at + cut])
        at += cut
    return found


CUTS = st.lists(st.integers(1, 60), max_size=60)


@given(sent=st.lists(FRAMES, max_size=8), zeros=st.integers(0, 40), cuts=CUTS)
def test_any_cut_gives_the_same_frames(sent: list[Frame], zeros: int, cuts: list[int]) -> None:
    stream = bytes(zeros).join(map(encoded, sent))
    parser = FrameParser(CHANNEL)
    assert fed(parser, stream, cuts) == own(sent)
    assert not parser.lost


@given(before=st.binary(max_size=200), sent=st.lists(FRAMES, min_size=1, max_size=5), cuts=CUTS)
def test_joining_in_the_middle_finds_the_next_own_frame(before: bytes, sent: list[Frame], cuts: list[int]) -> None:
    stream = before + b"".join(map(encoded, sent))
    assert fed(FrameParser(CHANNEL, lost=True), stream, cuts) == own(sent)


@given(sent=st.lists(FRAMES, min_size=1, max_size=5), data=st.data(), cuts=CUTS)
def test_a_flipped_byte_costs_its_frame_and_gives_no_wrong_one(sent: list[Frame], data: st.DataObject, cuts: list[int]) -> None:
    stream = bytearray(b"".join(map(encoded, sent)))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= data.draw(st.integers(1, 255))
    last = Frame(Type.PONG, 0, CHANNEL, 1, b"last")
    tail = encoded(last) + bytes(frames.MAX_PAYLOAD_BYTES + 32) + encoded(last)
    found = fed(FrameParser(CHANNEL), bytes(stream) + tail, cuts)
    assert found[-1] == last
    assert len(found) >= len(own(sent)), "no more than the one frame is missing"
    assert all(frame in sent or frame == last for frame in found)


@given(cut=st.integers(1, 31 + 40), cuts=CUTS)
def test_a_frame_cut_short_is_filled_up_by_the_preamble(cut: int, cuts: list[int]) -> None:
    short, hello = encoded(Frame(Type.STDIN, 0, 7, 1, bytes(range(1, 41)))), Frame(Type.HELLO, 0, CHANNEL, 0, b"h")
    stream = short[:cut] + frames.PREAMBLE + encoded(hello)
    assert fed(FrameParser(CHANNEL), stream, cuts) == [hello]


@given(stream=st.binary(max_size=400), cuts=CUTS)
def test_garbage_is_never_a_frame(stream: bytes, cuts: list[int]) -> None:
    assert fed(FrameParser(CHANNEL), stream, cuts) == []


def test_what_a_sandbox_prints_is_no_frame_of_ours() -> None:
    """It holds whole frames, right to their CRC; it cannot know the channel."""
    forged = encoded(Frame(Type.RESULT, 0, CHANNEL + 1, 5, b"forged"))
    true = Frame(Type.DATA, 0, CHANNEL, 5, forged * 3)
    assert FrameParser(CHANNEL).feed(encoded(true)) == [true]
    assert FrameParser(CHANNEL, lost=True).feed(encoded(true)[40:] + encoded(true)) == [true]


def test_a_parser_holds_one_frame_at_most() -> None:
    parser = FrameParser(CHANNEL)
    head = struct.pack("<4sBBHQQI", frames.MAGIC, 1, 0, 0, CHANNEL, 0, frames.MAX_PAYLOAD_BYTES)
    parser.feed(head + bytes(100))
    for _ in range(40):
        parser.feed(frames.MAGIC * 5000)
    assert parser._held <= frames.MAX_PAYLOAD_BYTES + 32


@given(payload=st.binary(max_size=300), size=st.integers(1, 64))
def test_a_message_comes_together(payload: bytes, size: int) -> None:
    pieces = [payload[start : start + size] for start in range(0, len(payload), size)] or [b""]
    parts = Assembler(300)
    for piece in pieces[:-1]:
        assert parts.add(Frame(Type.RESULT, frames.MORE, CHANNEL, 1, piece)) is None
    assert parts.add(Frame(Type.RESULT, 0, CHANNEL, 1, pieces[-1])) == payload


def test_a_message_longer_than_allowed_is_refused() -> None:
    parts, piece = Assembler(100), Frame(Type.RESULT, frames.MORE, CHANNEL, 1, bytes(60))
    parts.add(piece)
    with pytest.raises(MalformedError, match="100 bytes"):
        parts.add(piece)


@pytest.mark.parametrize("size", [0, 1, frames.MAX_PAYLOAD_BYTES, frames.MAX_PAYLOAD_BYTES + 1, 3 * frames.MAX_PAYLOAD_BYTES])
def test_a_long_message_spans_frames(size: int) -> None:
    sent = FrameParser(CHANNEL).feed(frames.encode_message(Type.RUN, CHANNEL, 3, b"x" * size, frames.DURABLE))
    assert b"".join(frame.payload for frame in sent) == b"x" * size
    assert [bool(frame.flags & frames.MORE) for frame in sent] == [True] * (len(sent) - 1) + [False]
    assert all(frame.flags & frames.DURABLE for frame in sent)


def test_run_on_the_wire() -> None:
    run = Run(kind=Kind.SESSION, argv=("bash", "é"), env={"A": "1=2"}, user="u", workdir="/w", session="s", timeout_ms=5, cap=6, flood=7)
    head = struct.pack("<BIIQ", 1, 5, 6, 7)
    strings = b"u\0/w\0s\0" + struct.pack("<I", 2) + "bash\0é\0".encode() + struct.pack("<I", 1) + b"A=1=2\0"
    assert frames.pack_run(run) == head + strings


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run(argv=("a\0b",)), id="nul-in-argv"),
        pytest.param(Run(argv=("a",), env={"A": "\0"}), id="nul-in-env"),
        pytest.param(Run(argv=("a",), workdir="/\0"), id="nul-in-workdir"),
        pytest.param(Run(argv=("\ud800",)), id="no-text"),
        pytest.param(Run(argv=("x" * frames.MAX_RUN_BYTES,)), id="too-long"),
    ],
)
def test_run_that_cannot_be_sent(run: Run) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the encoder's own words
        frames.pack_run(run)


OUTPUTS = st.builds(Output, st.integers(0, 2**64 - 1), st.binary(max_size=30), st.binary(max_size=30))


def packed_result(result: Result) -> bytes:
    out, err = result.stdout, result.stderr
    lengths = (out.printed, len(out.head), len(out.tail), err.printed, len(err.head), len(err.tail))
    head = struct.pack("<BBHiQQIIQII", result.how, result.flags, 0, result.code, round(result.seconds * 1e6), *lengths)
    return head + out.head + out.tail + err.head + err.tail


@given(how=st.sampled_from(How), flags=st.integers(0, 255), code=st.integers(-(2**31), 2**31 - 1), out=OUTPUTS, err=OUTPUTS)
def test_results_come_back(how: How, flags: int, code: int, out: Output, err: Output) -> None:
    result = Result(how, flags, code, 1.5, out, err)
    assert frames.unpack_result(packed_result(result)) == result


@given(payload=st.binary(max_size=120))
def test_a_result_with_hostile_lengths_is_refused_or_true(payload: bytes) -> None:
    try:
        result = frames.unpack_result(payload)
    except MalformedError:
        return
    kept = (*result.stdout[1:], *result.stderr[1:])
    assert b"".join(kept) == payload[48:]


@given(payload=st.binary(max_size=50))
def test_other_payloads_are_refused_or_true(payload: bytes) -> None:
    for size, unpack in ((30, frames.unpack_welcome), (36, frames.unpack_pong), (8, frames.unpack_u64)):
        if len(payload) == size:
            unpack(payload)
        else:
            with pytest.raises(MalformedError):
                unpack(payload)
    if len(payload) >= 2:
        frames.unpack_error(payload)
    else:
        with pytest.raises(MalformedError):
            frames.unpack_error(payload)


@given(size=st.integers(0, 1_500_000), steps=st.lists(st.integers(0, 300_000), max_size=12), again=st.integers(0, 12))
def test_stdin_is_sent_within_the_window_and_again_from_what_was_taken(size: int, steps: list[int], again: int) -> None:
    """A stand-in for the agent consumes so many bytes at a step, and once loses all that is on its way."""
    data = random.Random(size).randbytes(size)
    outgoing, received, consumed, ended = Outgoing(), bytearray(), 0, False
    outgoing.feed(data)
    outgoing.end()
    rounds = [*steps, *[frames.STDIN_WINDOW_BYTES] * (3 + size // frames.STDIN_WINDOW_BYTES)]
    for number, step in enumerate(rounds):
        on_the_way = outgoing.take()
        if number == again:
            outgoing.rewind()
            on_the_way = outgoing.take()
        for payload in on_the_way:
            (offset,), piece = struct.unpack("<Q", payload[:8]), payload[8:]
            assert offset <= len(received), "no gap"
            assert offset + len(piece) <= consumed + frames.STDIN_WINDOW_BYTES
            ended = ended or not piece
            received += piece[len(received) - offset :]
        consumed = min(consumed + step, len(received))
        outgoing.allow(consumed + frames.STDIN_WINDOW_BYTES)
    assert received == data
    assert ended
