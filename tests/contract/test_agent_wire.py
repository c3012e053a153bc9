"""The agent at the wire: framing, attachers, fences, calls by id. Our own frames go in, whatever comes out is checked."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxes.frames import (
    DURABLE,
    MAX_RUN_BYTES,
    PREAMBLE,
    Ended,
    How,
    Kind,
    Refusal,
    Run,
    Type,
    encode,
    encode_message,
    pack_calls,
    pack_configure,
    pack_credit,
    pack_hello,
    pack_run,
    pack_stdin,
    unpack_pong,
    unpack_u64,
    unpack_welcome,
)
from tests.agent_attacher import AGENT, AgentEnded, Attacher, ListeningAgent, PipedAgent, Refused

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="users, kills and namespaces need root"),
    pytest.mark.skipif(not AGENT.exists(), reason=f"no agent for this machine: {AGENT}"),
]


@pytest.fixture
def agent() -> Iterator[PipedAgent]:
    made = PipedAgent()
    yield made
    assert made.close() == 0


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[ListeningAgent]:
    made = ListeningAgent(tmp_path)
    yield made
    assert made.close() == 0


@pytest.fixture
def attached(agent: PipedAgent) -> Attacher:
    attacher = agent.attacher()
    attacher.hello()
    return attacher


def _counted(path: Path) -> Run:
    """A call that says in a file that it ran."""
    return Run(argv=["sh", "-c", f"sleep 0.1; echo ran >> {path}; echo said"])


def _lines(count: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(1, count + 1))


def _running(attacher: Attacher) -> set[str]:
    return set(attacher.run(["ps", "-eo", "args"]).stdout.head.decode().splitlines())


# Attaching.


def test_each_boot_has_its_own_id(agent: PipedAgent) -> None:
    other = PipedAgent()
    first, again = agent.attacher().hello(), agent.attacher().hello()
    assert first.version == 1
    assert first.boot_id == again.boot_id != other.attacher().hello().boot_id
    assert other.close() == 0


@pytest.mark.parametrize("cut", [1, 5, 27, 31, 32, 33, 4_000, 40_000])
def test_a_frame_that_was_cut_short_does_not_swallow_the_next_attacher(agent: PipedAgent, cut: int) -> None:
    first = agent.attacher()
    first.hello()
    first.write(encode(Type.STDIN, first.channel, 1, pack_stdin(0, b"x" * 50_000))[:cut])
    second = agent.attacher()
    second.hello()
    assert second.run(["echo", "well"]).stdout.head == b"well\n"


def test_a_preamble_that_completes_a_cut_frame_still_counts_while_the_way_is_lost(agent: PipedAgent) -> None:
    first = agent.attacher()
    first.hello()
    ends_in_zeros = encode(Type.STDIN, first.channel, 1, pack_stdin(0, b"x" + bytes(100)))
    first.write(b"garbage" + bytes(8) + ends_in_zeros[:-50])
    second = agent.attacher()
    second.hello()
    assert second.run(["echo", "well"]).stdout.head == b"well\n"


def test_what_a_cut_payload_holds_is_no_frame(agent: PipedAgent) -> None:
    first = agent.attacher()
    first.hello()
    crafted = PREAMBLE[:20_000] + encode(Type.HELLO, 7, 0, pack_hello(2**63)) * 20
    first.write(encode(Type.STDIN, first.channel, 1, pack_stdin(0, crafted + b"x" * 10_000))[:-10])
    second = agent.attacher()
    assert second.hello().fence == 0


def test_garbage_is_told_once_and_ends_with_the_next_hello(attached: Attacher, agent: PipedAgent) -> None:
    attached.write(b"garbage" * 1000 + encode(Type.PING, attached.channel, 1))
    assert attached.expect(Type.LOST)
    attached.write(b"RLWYRLWY" + encode(Type.PING, attached.channel, 2))
    attached.hello()
    attached.send(Type.PING, 3)
    assert attached.expect(Type.PONG).call == 3


def test_a_lower_fence_is_refused_and_changes_nothing(agent: PipedAgent) -> None:
    holder, late = agent.attacher(), agent.attacher()
    holder.hello(fence=5)
    late.write(PREAMBLE + encode(Type.HELLO, late.channel, 0, pack_hello(4)))
    assert unpack_u64(late.expect(Type.FENCED).payload) == 5
    assert holder.run(["echo", "mine"]).stdout.head == b"mine\n"


def test_a_later_attacher_ends_the_one_before(agent: PipedAgent) -> None:
    old, new = agent.attacher(), agent.attacher()
    old.hello(fence=5)
    new.hello(fence=6)
    assert unpack_u64(old.expect(Type.FENCED).payload) == 6
    for call in range(3):
        old.send(Type.PING, call)
    new.send(Type.PING, 9)
    assert new.expect(Type.PONG).call == 9
    assert old.waiting() == []


def test_connections_to_a_socket_take_over_as_well(listening: ListeningAgent) -> None:
    attachers = []
    for number in range(7):
        attachers.append(listening.attacher())
        attachers[-1].hello(fence=number)
    assert attachers[-1].run(["echo", "last"]).stdout.head == b"last\n"
    assert unpack_u64(attachers[-2].expect(Type.FENCED).payload) == 6
    assert unpack_u64(attachers[0].expect(Type.FENCED).payload) == 1
    with pytest.raises(AgentEnded):  # four are served; of more the oldest are let go
        attachers[0].receive()


# Calls by id.


def test_asking_twice_runs_once(attached: Attacher, tmp_path: Path) -> None:
    attached.start(_counted(tmp_path / "runs"), 7, flags=DURABLE)
    attached.start(_counted(tmp_path / "runs"), 7, flags=DURABLE)
    first = attached.result(7)
    attached.start(_counted(tmp_path / "runs"), 7, flags=DURABLE)
    assert attached.result(7) == first
    assert first.stdout.head == b"said\n"
    assert (tmp_path / "runs").read_text() == "ran\n"


def test_a_result_is_kept_until_forgotten(attached: Attacher, tmp_path: Path) -> None:
    for _ in range(2):
        attached.start(_counted(tmp_path / "runs"), 7, flags=DURABLE)
        attached.result(7)
        attached.send(Type.FORGET, 0, pack_calls([7, 8]))
    assert (tmp_path / "runs").read_text() == "ran\nran\n"


def test_a_durable_call_goes_on_under_the_next_attacher(agent: PipedAgent, tmp_path: Path) -> None:
    first, second = agent.attacher(), agent.attacher()
    first.hello()
    first.start(_counted(tmp_path / "durable"), 7, flags=DURABLE)
    first.start(Run(argv=["sleep", "977"]), 8)
    second.hello()
    second.start(_counted(tmp_path / "durable"), 7, flags=DURABLE)
    assert second.result(7).stdout.head == b"said\n"
    assert (tmp_path / "durable").read_text() == "ran\n"
    assert "sleep 977" not in _running(second)
    second.send(Type.KILL, 8)
    with pytest.raises(Refused, match="no such call"):
        second.result(8)


def test_stdin_goes_on_where_the_last_attacher_left_it(agent: PipedAgent) -> None:
    first, second = agent.attacher(), agent.attacher()
    first.hello()
    first.send(Type.RUN, 7, pack_run(Run(argv=["cat"])), DURABLE)
    first.send(Type.STDIN, 7, pack_stdin(0, b"one "))
    second.hello()
    second.start(Run(argv=["cat"]), 7, stdin=b"one two", flags=DURABLE)
    assert second.result(7).stdout.head == b"one two"


def test_a_gap_in_stdin_is_refused(attached: Attacher) -> None:
    attached.send(Type.RUN, 7, pack_run(Run(argv=["cat"])))
    attached.send(Type.STDIN, 7, pack_stdin(5, b"late"))
    with pytest.raises(Refused) as refused:
        attached.result(7)
    assert refused.value.code == Refusal.BAD_REQUEST


def test_the_number_of_kept_results_is_bounded(attached: Attacher) -> None:
    nothing = Run(kind=Kind.UNPACK)
    for call in range(1, 1025):
        attached.start(nothing, call)
        attached.result(call)
    attached.start(nothing, 1025)
    with pytest.raises(Refused) as refused:
        attached.result(1025)
    assert refused.value.code == Refusal.FULL
    attached.send(Type.FORGET, 0, pack_calls(range(1, 1025)))
    attached.send(Type.PING)
    assert unpack_pong(attached.expect(Type.PONG).payload).kept == 0
    assert attached.run(["echo", "room"]).stdout.head == b"room\n"


# Messages.


def test_a_request_may_span_frames(attached: Attacher) -> None:
    words = [f"{number:04}" * 16_000 for number in range(8)]
    result = attached.run(["sh", "-c", 'for word; do echo "${#word}"; done', "sh", *words])
    assert result.stdout.head.split() == [b"64000"] * 8


def test_requests_that_span_frames_may_come_in_turns(attached: Attacher) -> None:
    runs = {call: Run(argv=["sh", "-c", 'echo "${#1}"', "sh", "x" * (80_000 + call)]) for call in (1, 2)}
    whole = {call: encode_message(Type.RUN, attached.channel, call, pack_run(run)) for call, run in runs.items()}
    first = 32 + 65_536
    attached.write(whole[1][:first] + whole[2][:first] + whole[1][first:] + whole[2][first:])
    printed = {call: int(result.stdout.head) for call, result in (attached.next_result() for _ in range(2))}
    assert printed == {1: 80_001, 2: 80_002}


def test_a_request_that_is_too_large_is_refused_once(attached: Attacher) -> None:
    attached.send(Type.RUN, 7, b"x" * (MAX_RUN_BYTES + 70_000))
    with pytest.raises(Refused) as refused:
        attached.result(7)
    assert refused.value.code == Refusal.TOO_LARGE
    assert attached.run(["echo", "well"]).stdout.head == b"well\n"


@pytest.mark.parametrize(
    "payload", [b"", b"\0" * 20, pack_run(Run(argv=[])), pack_run(Run(argv=["true"])) + b"x", pack_run(Run(argv=["x"]))[:-5]]
)
def test_a_request_that_is_none_is_refused(attached: Attacher, payload: bytes) -> None:
    attached.send(Type.RUN, 7, payload)
    with pytest.raises(Refused) as refused:
        attached.result(7)
    assert refused.value.code == Refusal.BAD_REQUEST


def test_results_wait_for_a_slow_reader(attached: Attacher) -> None:
    for call in range(1, 5):
        attached.start(Run(argv=["sh", "-c", "seq 1 200000; seq 1 100000 >&2"], cap=2**24), call, flags=DURABLE)
    attached.start(Run(argv=["sleep", "60"], timeout_ms=200), 5)
    time.sleep(1)  # nobody reads, and times are kept all the same
    results = dict(attached.next_result() for _ in range(5))
    assert all(each.stdout.head + each.stdout.tail == _lines(200_000) for call, each in results.items() if call < 5)
    assert all(each.stderr.head + each.stderr.tail == _lines(100_000) for call, each in results.items() if call < 5)
    assert results[5].flags == Ended.TIMED_OUT
    assert results[5].seconds < 0.9


def test_data_keeps_to_the_window(attached: Attacher, tmp_path: Path) -> None:
    content = os.urandom(3 * 2**20)
    (tmp_path / "file").write_bytes(content)
    attached.send(Type.RUN, 7, pack_run(Run(kind=Kind.READ, argv=[str(tmp_path / "file")])))
    got = b""
    while len(got) < 2**20:
        got += attached.expect(Type.DATA).payload
    with pytest.raises(TimeoutError):
        attached.receive(0.1)
    attached.send(Type.CREDIT, 7, pack_credit(2**22))
    while len(got) < len(content):
        got += attached.expect(Type.DATA).payload
    assert got == content
    assert attached.result(7).stdout.printed == len(content)


# A hostile or broken attacher.

_types = st.sampled_from([*Type, 0, 200])
_payloads = st.one_of(st.binary(max_size=200), st.binary(max_size=100).map(lambda tail: pack_run(Run(argv=["true"]))[:20] + tail))
_frames = st.tuples(_types, st.integers(0, 3), st.integers(0, 3), _payloads)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[PipedAgent]:
    made = PipedAgent(first=True)
    yield made
    made.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(_frames, max_size=8), cut=st.integers(0, 300), flip=st.none() | st.integers(0, 2**16), junk=st.binary(max_size=100))
def test_whatever_comes_the_next_hello_is_answered(
    fuzzed: PipedAgent, frames: list[tuple[int, int, int, bytes]], cut: int, flip: int | None, junk: bytes
) -> None:
    hostile = fuzzed.attacher()
    hostile.hello()
    stream = bytearray()
    for kind, flags, call, payload in frames:
        if kind != Type.HELLO or len(payload) < 10:
            stream += encode(kind, hostile.channel, call, payload, flags)
    if flip is not None and stream:
        stream[flip % len(stream)] ^= 1 << (flip % 8)
    hostile.write(bytes(stream[: len(stream) - cut]) + junk)
    next_one = fuzzed.attacher()
    next_one.hello()
    next_one.send(Type.PING, 5)
    while (frame := next_one.receive()).type != Type.PONG:
        pass
    assert frame.call == 5
    fuzzed.let_go()


# Configuring.


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """One that any user may enter, as pytest's are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_what_is_configured_holds_for_every_call(attached: Attacher, open_directory: Path) -> None:
    workdir = open_directory / "made" / "here"
    payload = pack_configure(disk_mib=0, inodes=0, user="nobody", workdir=str(workdir), env={"A": "1", "B": "2"})
    attached.send(Type.CONFIGURE, 3, payload)
    assert attached.expect(Type.DONE).call == 3
    result = attached.run(["sh", "-c", 'echo "$(pwd) $(id -un) $A $B $HOME"'], env={"B": "3"})
    assert result.stdout.head.decode().split() == [str(workdir), "nobody", "1", "3", "/nonexistent"]
    assert (workdir.owner(), workdir.parent.owner()) == ("nobody", "root")


def test_an_unknown_user_is_refused(attached: Attacher) -> None:
    attached.send(Type.CONFIGURE, 3, pack_configure(disk_mib=0, inodes=0, user="no-such", workdir="/", env={}))
    with pytest.raises(Refused) as refused:
        attached.expect(Type.DONE)
    assert refused.value.code == Refusal.NO_USER
    with pytest.raises(Refused) as refused:
        attached.run(["true"], user="no-such:0")
    assert refused.value.code == Refusal.NO_USER


def test_the_welcome_of_process_one_says_so() -> None:
    agent = PipedAgent(first=True)
    attacher = agent.attacher()
    attacher.write(PREAMBLE + encode(Type.HELLO, attacher.channel, 0, pack_hello(0)))
    assert unpack_welcome(attacher.expect(Type.WELCOME).payload).features & 8
    refused = attacher.run(["sh", "-c", "kill -9 1; kill -TERM 1; kill -INT 1; echo alive"])
    assert (refused.how, refused.stdout.head) == (How.EXITED, b"alive\n")
    supervisor = attacher.run(["sh", "-c", "setsid sleep 978 & kill -9 $PPID; sleep 979"])
    assert (supervisor.how, supervisor.code) == (How.SIGNALLED, 9)
    assert {"sleep 978", "sleep 979"}.isdisjoint(_running(attacher))
    assert not supervisor.flags & Ended.TIMED_OUT
    agent.close()
