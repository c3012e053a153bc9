"""An attacher for tests of the agent at the wire: plain blocking I/O on pipes or a socket, one frame at a time."""

import os
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandboxes.frames import (
    MAX_PAYLOAD_BYTES,
    PREAMBLE,
    Assembler,
    Frame,
    FrameParser,
    Kind,
    Result,
    Run,
    Type,
    Welcome,
    encode,
    encode_message,
    pack_calls,
    pack_hello,
    pack_run,
    pack_stdin,
    unpack_error,
    unpack_result,
    unpack_welcome,
)

AGENT = Path(os.environ.get("ROLLWAY_TEST_AGENT") or Path(__file__).parents[1] / f"sandboxes/agent/bin/agent-{os.uname().machine}")
ANSWER_S = 15.0


class AgentEnded(Exception):
    """The agent closed the stream."""


class Refused(Exception):
    """The agent answered ERROR."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Attacher:
    """One channel on a stream: `reads` and `writes` are descriptors that stay the caller's. All in `sharers` see all that is read."""

    def __init__(self, reads: int, writes: int, sharers: "list[Attacher]") -> None:
        self.channel = secrets.randbits(64) | 1
        self._reads = reads
        self._writes = writes
        self._parser = FrameParser(self.channel, lost=True)
        self._frames: list[Frame] = []
        self._sharers = sharers
        sharers.append(self)

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._writes, data) :]

    def send(self, kind: int, call: int = 0, payload: bytes = b"", flags: int = 0) -> None:
        self.write(encode_message(kind, self.channel, call, payload, flags))

    def receive(self, timeout_s: float = ANSWER_S) -> Frame:
        """
        Raises:
            AgentEnded: it closed the stream.
            TimeoutError: it says nothing.
        """
        until = time.monotonic() + timeout_s
        while not self._frames:
            if not select.select([self._reads], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the agent says nothing")
            data = os.read(self._reads, 2**20)
            if not data:
                raise AgentEnded
            for each in self._sharers:
                each._frames += each._parser.feed(data)
        return self._frames.pop(0)

    def waiting(self) -> list[Frame]:
        """What came and nobody asked for."""
        return self._frames

    def expect(self, kind: int) -> Frame:
        """The next frame, which is of this type. Raises Refused for an ERROR."""
        frame = self.receive()
        if frame.type == Type.ERROR and kind != Type.ERROR:
            raise Refused(*unpack_error(frame.payload))
        assert frame.type == kind, frame
        return frame

    def hello(self, fence: int = 0) -> Welcome:
        self.write(PREAMBLE + encode(Type.HELLO, self.channel, 0, pack_hello(fence)))
        return unpack_welcome(self.expect(Type.WELCOME).payload)

    def start(self, run: Run, call: int, *, stdin: bytes = b"", flags: int = 0) -> None:
        """RUN, and at most a window of stdin to its end."""
        self.send(Type.RUN, call, pack_run(run), flags)
        if run.kind == Kind.SESSION:
            return
        piece = MAX_PAYLOAD_BYTES - 8
        for at in range(0, len(stdin), piece):
            self.send(Type.STDIN, call, pack_stdin(at, stdin[at : at + piece]))
        self.send(Type.STDIN, call, pack_stdin(len(stdin), b""))

    def next_result(self) -> tuple[int, Result]:
        """The next RESULT, whose frames follow each other, and its call. CREDIT on the way is left out. Raises Refused for an ERROR."""
        whole, assembler = None, Assembler(2**30)
        while whole is None:
            frame = self.receive()
            if frame.type == Type.GIVEN:
                continue
            if frame.type == Type.ERROR:
                raise Refused(*unpack_error(frame.payload))
            assert frame.type == Type.RESULT, frame
            whole = assembler.add(frame)
        return frame.call, unpack_result(whole)

    def result(self, call: int) -> Result:
        """The next RESULT, which is this call's."""
        found, result = self.next_result()
        assert found == call
        return result

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", **more: Any) -> Result:
        """One call to its end, forgotten after."""
        call = secrets.randbits(63) + 1
        self.start(Run(argv=argv, **more), call, stdin=stdin)
        result = self.result(call)
        self.send(Type.FORGET, 0, pack_calls([call]))
        return result

    def session(self, script: str, *, shell: str = "bash", name: str = "main", **more: Any) -> Result:
        return self.run([shell, script], kind=Kind.SESSION, session=name, **more)


class PipedAgent:
    """An agent on pipes, as in a container; what attaches to it shares them. `first`: as process 1 of a namespace of its own."""

    def __init__(self, *arguments: str, first: bool = False) -> None:
        prefix = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child") if first else ()
        self.process = subprocess.Popen([*prefix, AGENT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._attachers: list[Attacher] = []

    def attacher(self) -> Attacher:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return Attacher(self.process.stdout.fileno(), self.process.stdin.fileno(), self._attachers)

    def let_go(self) -> None:
        """Its attachers so far hear of nothing any more."""
        self._attachers.clear()

    def close(self) -> int:
        """Its exit code, after the end of its stdin."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(ANSWER_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


class ListeningAgent:
    """An agent that serves connections to a socket which it inherited."""

    def __init__(self, directory: Path) -> None:
        self._path = str(directory / "agent.sock")
        self._sockets: list[socket.socket] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._path)
            listener.listen()
            fd = listener.fileno()
            self.process = subprocess.Popen([AGENT, "--listen", str(fd)], stdin=subprocess.DEVNULL, pass_fds=[fd])

    def attacher(self) -> Attacher:
        connection = socket.socket(socket.AF_UNIX)
        self._sockets.append(connection)
        connection.connect(self._path)
        return Attacher(connection.fileno(), connection.fileno(), [])

    def close(self) -> int:
        for each in self._sockets:
            each.close()
        self.process.terminate()
        try:
            return self.process.wait(ANSWER_S)
        finally:
            self.process.kill()
            self.process.wait()
