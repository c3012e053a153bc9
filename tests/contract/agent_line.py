"""A `Line` to a real agent in a PID namespace of its own, over its stdin and stdout, with every way a connection can fail at hand.

As with an engine's attach stream, all that attachers write arrives on one stdin, and each of them sees all of stdout.
"""

import asyncio
import contextlib
import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path
from typing import cast

from sandboxes import agent_binary
from sandboxes.base import SandboxError
from sandboxes.line import Health


class CutConnection:
    """A `Connection` that breaks after so many bytes written or received, where the line was told to."""

    def __init__(self, line: "AgentLine", received: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        self._line = line
        self._received = received
        self._lost = lost
        self._open = True
        self.bytes_received = 0
        self.bytes_written = 0

    def write(self, data: bytes) -> None:
        cut = self._line.cut_written
        whole = cut is None or len(data) <= cut
        if self._open:
            self.bytes_written += len(data)
            self._line.to_agent(data if whole else data[:cut])
            self._line.cut_written = None if cut is None or not whole else cut - len(data)
        if not whole:
            self._break_soon()

    def arrive(self, data: bytes) -> None:
        if not self._open:
            return
        cut = self._line.cut_received
        self.bytes_received += len(data)
        if cut is None or len(data) <= cut:
            self._line.cut_received = None if cut is None else cut - len(data)
            self._received(data)
            return
        self._line.cut_received = None
        if cut:
            self._received(data[:cut])
        self._break_soon()

    def end(self, reason: str) -> None:
        if self._open:
            self._open = False
            self._lost(reason)

    def close(self) -> None:
        self._open = False

    def _break_soon(self) -> None:
        lost, self._open = self._lost, False
        asyncio.get_running_loop().call_soon(lost, "cut by the test")


class AgentLine(asyncio.SubprocessProtocol):
    """Made by `start`. `cut_written` and `cut_received`: how many more bytes go through before the connection breaks; None: no cut."""

    id = "agent-under-test"

    def __init__(self) -> None:
        self.cut_written: int | None = None
        self.cut_received: int | None = None
        self.refuse_connections = False
        self.connections: list[CutConnection] = []
        self._transport: asyncio.SubprocessTransport | None = None
        self._ended = asyncio.Event()

    async def start(self, *arguments: str) -> None:
        """Run the agent; it has ended when `stop` returned."""
        # its own namespaces: it kills every process it sees
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", str(agent_binary.path(platform.machine())), *arguments]
        loop = asyncio.get_running_loop()
        await loop.subprocess_exec(lambda: self, *command, env={"PATH": os.environ["PATH"], "HOME": "/root"})

    async def stop(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()
            await self._ended.wait()
            self._transport.close()

    @property
    def agent_pid(self) -> int:
        assert self._transport is not None
        pid = self._transport.get_pid()
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def signal_agent(self, number: signal.Signals) -> None:
        os.kill(self.agent_pid, number)

    def to_agent(self, data: bytes) -> None:
        assert self._transport is not None
        stdin = self._transport.get_pipe_transport(0)
        if stdin is not None and not stdin.is_closing():
            cast(asyncio.WriteTransport, stdin).write(data)

    # What a channel asks.

    async def connect(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> CutConnection:
        await asyncio.sleep(0)
        if self.refuse_connections or self._ended.is_set():
            raise SandboxError("no connection to be had")
        connection = CutConnection(self, received, lost)
        self.connections.append(connection)
        return connection

    async def health(self) -> Health:
        return Health(present=True, alive=not self._ended.is_set(), by_itself=self._ended.is_set(), detail="as the test has it")

    async def remove(self) -> None:
        await self.stop()

    async def snapshot(self, ttl_s: float) -> str:
        raise SandboxError("no snapshots here")

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            for connection in list(self.connections):
                connection.arrive(data)

    def process_exited(self) -> None:
        self._ended.set()
        for connection in list(self.connections):
            connection.end("the agent ended")
