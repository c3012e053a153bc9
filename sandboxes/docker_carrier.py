"""One container: commands over `exec`, requests to its first process over `attach`."""

import asyncio
import secrets
from collections.abc import AsyncGenerator

import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.execs import Exec
from aiodocker.stream import Stream

from sandboxes import guest
from sandboxes.base import SandboxLostError
from sandboxes.carrier import Health, Running
from sandboxes.docker_engine import Engine, EngineError
from sandboxes.guest import Command

_WRITE_BYTES = 65_536
_REMOVE_TRIES = 6
_REMOVE_PAUSE_S = 0.5
_NO_SHELL = ("executable file not found", "no such file or directory", "permission denied", "exec format error")
_NO_ROOM = "esource temporarily unavailable"
"""In the runtime's own words, when it could not start a command."""
_FROM_OUTSIDE = frozenset({0, 137, 143, 255})
"""Exit codes of a first process that was stopped from outside; its own commands cannot signal it."""


class DockerRunning:
    """A command that runs through `exec`."""

    def __init__(self, engine: Engine, exec_: Exec, stream: Stream) -> None:
        self._engine = engine
        self._exec = exec_
        self._stream = stream
        self._head = b""

    async def output(self) -> AsyncGenerator[tuple[int, bytes], None]:
        try:
            while message := await self._stream.read_out():
                self._head = self._head or message.data[:500]
                yield message.stream, message.data
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"the output of a command broke off: {error}", status=0) from error

    async def feed(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), _WRITE_BYTES):
                await self._stream.write_in(data[start : start + _WRITE_BYTES])
            self._half_close()
        except (aiohttp.ClientError, OSError, RuntimeError):
            return  # the command ended, or closed its stdin

    def _half_close(self) -> None:
        """End-of-file for the command's stdin, while its output goes on: aiodocker has no call for it."""
        response = self._stream._resp
        if response is not None and response.connection is not None and response.connection.transport is not None:
            response.connection.transport.write_eof()

    async def exit_code(self) -> int | None:
        async with self._engine.asked("inspect a command"):
            found = await self._exec.inspect()
        if found["Running"]:
            return None
        if found["Pid"] == 0:
            self._refuse_unstarted()
        return int(found["ExitCode"])

    def _refuse_unstarted(self) -> None:
        """No process came to be: the exit code and the text are the runtime's. A full process table is the command's own business.

        Raises:
            SandboxLostError: the shell that starts every command is gone, by the sandbox's own doing.
            EngineError: the runtime failed.
        """
        text = self._head.decode(errors="replace").strip()
        if any(words in text for words in _NO_SHELL):
            raise SandboxLostError(f"nothing can be started any more: {text}", by_command=True)
        if _NO_ROOM not in text:
            raise EngineError(f"the runtime could not start a command: {text or 'no reason given'}", status=0)

    async def close(self) -> None:
        _let_go(self._stream)


class DockerCarrier:
    """A `Carrier` over one container."""

    def __init__(self, engine: Engine, container_id: str) -> None:
        self._engine = engine
        self.id = container_id

    def _container(self) -> DockerContainer:
        return self._engine.docker.containers.container(self.id)

    async def start(self, command: Command) -> Running:
        async with self._engine.asked(f"start a command in {self.id[:12]}"):
            made = await self._container().exec(
                list(command.argv),
                stdin=command.stdin is not None,
                environment=dict(command.env),
                tty=False,
                user="0:0",
                workdir="/",  # the container's own may have been removed by a command, and then nothing would start
            )
            return DockerRunning(self._engine, made, await _opened(made))

    async def boot(self) -> None:
        """Hand the first process its program, and see it answer."""
        await self._asked(guest.PROGRAM, "ping")

    async def ask(self, *words: str) -> str:
        return await self._asked(b"", *words)

    async def _asked(self, before: bytes, *words: str) -> str:
        nonce = secrets.token_hex(8)
        line = " ".join((words[0], nonce, *words[1:])) + "\n"
        async with self._engine.asked(f"reach the first process of {self.id[:12]}"):
            stream = self._container().attach(stdin=True, stdout=True)
            try:
                await stream.write_in(before + line.encode())
                return await _answer(stream, nonce.encode())
            finally:
                _let_go(stream)

    async def health(self) -> Health:
        try:
            async with self._engine.asked(f"inspect {self.id[:12]}"):
                found = await self._container().show()
        except EngineError as error:
            if error.status != 404:
                raise
            return Health(present=False, alive=False, detail="no such container")
        state = found["State"]
        alive = state["Running"] and not state["Paused"]
        by_itself = not state["Running"] and (state["OOMKilled"] or state["ExitCode"] not in _FROM_OUTSIDE)
        return Health(present=True, alive=alive, by_itself=by_itself, detail=f"{state['Status']}, exit code {state['ExitCode']}")

    async def remove(self) -> None:
        """Force it away. 404 is the aim; 409 says that somebody else is at it; 5xx are tried again."""
        for attempt in range(1, _REMOVE_TRIES + 1):
            try:
                async with self._engine.asked(f"remove {self.id[:12]}"):
                    await self._container().delete(force=True, v=True)
            except EngineError as error:
                if error.status == 404:
                    return
                if attempt == _REMOVE_TRIES:
                    raise
                await asyncio.sleep(_REMOVE_PAUSE_S * attempt)


def _let_go(stream: Stream) -> None:
    """Close a stream for good. aiodocker's own close asserts a connection that may be gone, and one that waits for a reader stays open."""
    response = stream._resp
    connection = response.connection if response is not None else None
    transport = connection.transport if connection is not None else None
    stream._closed = True
    if response is not None:
        response.close()
    if transport is not None:
        transport.abort()


async def _opened(made: Exec) -> Stream:
    """The command's stream, which the caller closes; closed here where it does not come about."""
    stream = made.start(detach=False)
    entered = False
    try:
        await stream.__aenter__()
        entered = True
    finally:
        if not entered:
            _let_go(stream)
    return stream


async def _answer(stream: Stream, nonce: bytes) -> str:
    """The line that begins with `nonce`: every connection sees the answers to all, in pieces cut anywhere."""
    seen: bytes = b""
    while message := await stream.read_out():
        *lines, seen = (seen + message.data).split(b"\n")
        for line in lines:
            if line.startswith(nonce + b" "):
                return str(line[len(nonce) + 1 :], "utf-8", "replace")
        seen = seen[-4096:]  # nothing we wait for is longer
    raise EngineError("the first process ended", status=0)
