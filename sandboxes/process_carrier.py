"""One process sandbox: commands enter its namespaces from outside, requests go to its first process through two pipes."""

import asyncio
import fcntl
import os
import secrets
import shutil
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sandboxes import cgroups, guest, process_box
from sandboxes.base import SandboxError
from sandboxes.carrier import STDERR, STDOUT, Health, Running
from sandboxes.guest import Command
from sandboxes.process_box import Box

_MIB = 2**20
_READ_BYTES = 65_536
_PAUSE_S = 0.005
_LINGER_S = 2.0
_DIE_S = 10.0
JOIN = 'IFS=:; for group in $1; do echo $$ >"$group" || exit 125; done; unset IFS; shift; exec "$@"'
"""Joins the control groups before anything of the sandbox runs."""


class ProcessRunning:
    """A command that was started with nsenter."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def output(self) -> AsyncGenerator[tuple[int, bytes], None]:
        pieces: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue(maxsize=2)
        readers = [
            asyncio.ensure_future(_read(stream, number, pieces))
            for number, stream in ((STDOUT, self._process.stdout), (STDERR, self._process.stderr))
        ]
        open_streams = len(readers)
        try:
            while open_streams:
                number, data = await pieces.get()
                if data:
                    yield number, data
                else:
                    open_streams -= 1
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def feed(self, data: bytes) -> None:
        stdin = self._process.stdin
        if stdin is None:
            return
        try:
            stdin.write(data)
            await stdin.drain()
            stdin.close()
            await stdin.wait_closed()
        except (BrokenPipeError, ConnectionResetError):
            return  # the command ended, or closed its stdin

    async def exit_code(self) -> int | None:
        code = self._process.returncode
        return code if code is None or code >= 0 else 128 - code

    async def close(self) -> None:
        """nsenter waits for the command, so it ends with one that was killed; only a stuck one is killed itself, unreaped child and all."""
        try:
            async with asyncio.timeout(_LINGER_S):
                await self._ended()
        except TimeoutError:
            self._process.kill()
        self._process._transport.close()  # type: ignore[attr-defined]  # a child that holds the pipes would keep them open here
        await self._process.wait()

    async def _ended(self) -> None:
        """Process.wait, but without waiting for the pipes, which a child may hold."""
        while True:
            if self._process.returncode is not None:
                return
            self._process.send_signal(signal.SIGCONT)  # nsenter stops itself when its command is stopped, as a kill begins
            await asyncio.sleep(_PAUSE_S)


async def _read(stream: asyncio.StreamReader | None, number: int, pieces: "asyncio.Queue[tuple[int, bytes]]") -> None:
    while stream is not None:
        data = await stream.read(_READ_BYTES)
        await pieces.put((number, data))
        if not data:
            return


class ProcessCarrier:
    """A `Carrier` over one directory and its namespaces."""

    def __init__(self, box: Box, directory: Path, *, answer_s: float) -> None:
        self._box = box
        self._directory = directory
        self._answer_s = answer_s
        self._asking = asyncio.Lock()

    @property
    def id(self) -> str:
        return self._box.id

    async def start(self, command: Command) -> Running:
        pid = self._alive_pid()
        groups = ":".join(str(path) for path in cgroups.existing(self._box.key).procs)
        inside = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--", *command.argv]
        enter = ["nsenter", f"--target={pid}", "--user", "--mount", "--pid", "--ipc", "--uts", "--net"]
        limits = ["prlimit", "--core=0", f"--fsize={self._box.disk_mib * _MIB}", "--"]
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", JOIN, "sh", groups, *limits, *enter, "--", *inside,
            stdin=PIPE if command.stdin is not None else asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env={**self._box.env, **command.env},
            cwd="/",
            start_new_session=True,  # Ctrl-C at the worker is the worker's
        )  # fmt: skip
        return ProcessRunning(process)

    async def boot(self) -> None:
        """Hand the first process its program, and see it answer."""
        await self._asked(guest.PROGRAM, "ping")

    async def ask(self, *words: str) -> str:
        return await self._asked(b"", *words)

    async def health(self) -> Health:
        found = process_box.read_box(self._directory)
        if found is None or found.id != self._box.id:
            return Health(present=False, alive=False, detail="no such sandbox")
        if process_box.first_process(self._directory) is None:
            return Health(present=True, alive=False, by_itself=True, detail="its first process ended")
        return Health(present=True, alive=True)

    async def remove(self) -> None:
        """Kill the first process, which takes all others along, then the files. Finding nothing is the aim."""
        found = process_box.read_box(self._directory)
        if found is None or found.id != self._box.id:
            return
        pid = process_box.first_process(self._directory)
        (self._directory / "box.json").unlink(missing_ok=True)  # from here on it is nobody's lost sandbox
        await discard(self._directory, self._box.key, pid)

    def _alive_pid(self) -> int:
        pid = process_box.first_process(self._directory)
        if pid is None:
            raise SandboxError(f"sandbox {self.id}: its first process ended")
        return pid

    async def _asked(self, before: bytes, *words: str) -> str:
        nonce = secrets.token_hex(8)
        line = " ".join((words[0], nonce, *words[1:])) + "\n"
        try:
            async with asyncio.timeout(self._answer_s), self._asking, self._alone():
                return await self._exchange(before + line.encode(), nonce.encode())
        except TimeoutError as error:
            raise SandboxError(f"the first process of {self.id} did not answer within {self._answer_s:g} s") from error
        except OSError as error:
            raise SandboxError(f"the first process of {self.id} cannot be reached: {error}") from error

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """One request at a time, of all processes: the answers share one pipe."""
        file = os.open(self._directory / "in", os.O_RDWR | os.O_NONBLOCK)
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_PAUSE_S)
            yield
        finally:
            os.close(file)

    async def _exchange(self, request: bytes, nonce: bytes) -> str:
        reading = os.open(self._directory / "out", os.O_RDWR | os.O_NONBLOCK)
        writing = os.open(self._directory / "in", os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(writing, request)  # fits the pipe: requests are short and the program is far below its 64 KiB
            seen, pause = b"", 0.0005
            while True:
                try:
                    seen += os.read(reading, _READ_BYTES)
                except BlockingIOError:
                    self._alive_pid()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 0.02)
                *lines, seen = seen.split(b"\n")
                for each in lines:
                    if each.startswith(nonce + b" "):
                        return each[len(nonce) + 1 :].decode(errors="replace")
        finally:
            os.close(reading)
            os.close(writing)


async def discard(directory: Path, key: str, pid: int | None) -> None:
    """Kill `pid` and remove what a sandbox, or a failed start, left on disk and in control groups."""
    if pid is not None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        until = time.monotonic() + _DIE_S
        while process_box.exists(pid) and time.monotonic() < until:  # noqa: ASYNC110  the kernel tells nobody but its parent
            await asyncio.sleep(_PAUSE_S)
    await cgroups.existing(key).remove()
    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
