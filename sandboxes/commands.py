"""Running commands in a sandbox, whatever the backend: output caps, time-outs that kill, sessions, files.

Must always hold: when `exec` returns with `timed_out`, or leaves by cancellation, no process of that command is alive.
"""

import asyncio
import logging
import re
import tarfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing

from sandboxes import archive, guest
from sandboxes.base import ExecResult, SandboxContentError, SandboxError, SandboxLostError, SandboxTooLargeError
from sandboxes.carrier import STDOUT, Carrier, Running
from sandboxes.guest import Command
from sandboxes.output import HeadTail
from sandboxes.shielding import to_the_end

logger = logging.getLogger(__name__)

TRANSFER_S = 300.0
"""Budget of one transfer of files."""

_FLOOD_BYTES = 256 * 2**20
"""A command that printed this much is killed: reading on only burns a core that other rollouts need."""
_FLOODED = "\n[killed: it printed more than {mib} MiB]\n"
_TRANSFER_ERROR_BYTES = 2000
_DRAIN_QUIET_S = 0.05
_DRAIN_S = 0.5
"""A child that outlives its command may hold the output open; what it wrote before is there within this."""
_PATHS_AT_ONCE = 400
_SESSION_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


class _FloodError(Exception):
    """The command printed more than `_FLOOD_BYTES`."""


class _Capture:
    """The two outputs of one command."""

    def __init__(self, cap: int, flood: int = _FLOOD_BYTES) -> None:
        self.out, self.err = HeadTail(cap), HeadTail(cap)
        self._flood = flood

    @property
    def total(self) -> int:
        return self.out.total + self.err.total

    async def read(self, running: Running) -> None:
        async with aclosing(running.output()) as pieces:
            async for stream, data in pieces:
                (self.out if stream == STDOUT else self.err).feed(data)
                if self.total > self._flood:
                    raise _FloodError


class CommandSandbox:
    """A `Sandbox` over a `Carrier`. `ooms` is how many processes were killed for memory so far; None when that is not known."""

    def __init__(self, carrier: Carrier, *, workdir: str, start_seconds: float, ooms: int | None = None) -> None:
        self._carrier = carrier
        self._workdir = workdir
        self.start_seconds = start_seconds
        self._ooms = ooms
        self._sessions: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def id(self) -> str:
        return self._carrier.id

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        max_output_bytes: int,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        session: str | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`. `workdir` is where a session begins; later calls of it stay where they are."""
        directory, env = workdir or self._workdir, env or {}
        try:
            if session is None:
                command = guest.command(argv, workdir=directory, env=env, stdin=stdin)
                return await self._run(command, timeout_s=timeout_s, cap=max_output_bytes, kill=command.tag)
            command = guest.session_command(_script(argv), session=_named(session), workdir=directory, env=env, stdin=stdin)
        except guest.ArgumentsTooLongError:
            return ExecResult(exit_code=126, stdout=b"", stderr=b"bash: Argument list too long\n", seconds=0.0)
        async with self._sessions[session]:
            return await self._run(command, timeout_s=timeout_s, cap=max_output_bytes, kill=guest.session_prefix(session))

    async def put(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        checked = [(archive.checked_path(path), content) for path, content in files.items()]
        for start in range(0, len(checked), _PATHS_AT_ONCE):
            some = dict(checked[start : start + _PATHS_AT_ONCE])
            packed = await asyncio.to_thread(archive.from_files, some, mode=mode)
            await self._transfer(guest.unpack_command(packed, replaced=list(some)), cap=_TRANSFER_ERROR_BYTES)

    async def put_tar(self, archive_bytes: bytes) -> None:
        try:
            safe = await asyncio.to_thread(archive.cleaned, archive_bytes)
        except tarfile.TarError as error:
            raise SandboxContentError(f"{self.id}: not a tar archive: {error}") from error
        await self._transfer(guest.unpack_command(safe), cap=_TRANSFER_ERROR_BYTES)

    async def get(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        checked = [archive.checked_path(path) for path in paths]
        result = await self._transfer(guest.pack_command(checked), cap=max_bytes, flood=max_bytes + _TRANSFER_ERROR_BYTES)
        if result.truncated:
            raise SandboxTooLargeError(f"{self.id}: {', '.join(paths)} are more than {max_bytes} bytes as a tar")
        return result.stdout

    async def kill_all(self) -> None:
        await self._carrier.ask("kill_all")

    async def poll(self) -> bool:
        return (await self._carrier.health()).alive

    async def destroy(self) -> None:
        await to_the_end(self._carrier.remove())

    async def _transfer(self, command: Command, *, cap: int, flood: int = _FLOOD_BYTES) -> ExecResult:
        result = await self._run(command, timeout_s=TRANSFER_S, cap=cap, kill=command.tag, flood=flood)
        if result.exit_code != 0 and not result.truncated:
            reason = "it ran out of time" if result.timed_out else result.stderr.decode(errors="replace").strip()[:500]
            raise SandboxContentError(f"{self.id}: the files could not be transferred: {reason or f'exit {result.exit_code}'}")
        return result

    async def _run(self, command: Command, *, timeout_s: float, cap: int, kill: str, flood: int = _FLOOD_BYTES) -> ExecResult:
        """Start, follow, end: by itself, by time, by flood or by cancellation; the last three kill what carries the tag `kill`."""
        capture, began = _Capture(cap, flood), time.monotonic()
        try:
            if self._ooms is None:
                self._ooms = int(await self._carrier.ask("oom"))
            running = await self._started(command)
            try:
                code, timed_out = await self._watched(running, command, capture, timeout_s=timeout_s, kill=kill)
            finally:
                await running.close()
            oom_killed = await self._oom_killed()
        except SandboxError as error:
            raise await self._diagnosed(error) from error
        return ExecResult(
            exit_code=code,
            stdout=capture.out.value(),
            stderr=capture.err.value(),
            seconds=time.monotonic() - began,
            timed_out=timed_out,
            truncated=capture.out.truncated or capture.err.truncated,
            oom_killed=oom_killed,
        )

    async def _started(self, command: Command) -> Running:
        try:
            return await self._carrier.start(command)
        except asyncio.CancelledError:
            await to_the_end(self._kill_left(command.tag, time.monotonic()))
            raise

    async def _watched(
        self, running: Running, command: Command, capture: _Capture, *, timeout_s: float, kill: str
    ) -> tuple[int | None, bool]:
        began = time.monotonic()
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await _ended(running, command.stdin, capture), False
        except TimeoutError:
            if not deadline.expired():
                raise
            await to_the_end(self._kill(kill, began))
            return None, True
        except _FloodError:
            await to_the_end(self._kill(kill, began))
            capture.err.feed(_FLOODED.format(mib=_FLOOD_BYTES // 2**20).encode())
            return 137, False
        except asyncio.CancelledError:
            await to_the_end(self._kill_left(kill, began))
            raise

    async def _kill_left(self, tag: str, began: float) -> None:
        """On the way out of a cancellation, which a second failure must not hide."""
        try:
            await self._kill(tag, began)
        except SandboxError as error:
            logger.warning("a cancelled command may still run in %s: %s", self.id, error)

    async def _kill(self, tag: str, began: float) -> None:
        await self._carrier.ask("kill", tag, str(int(time.monotonic() - began) + 1))

    async def _oom_killed(self) -> bool:
        """Whether the count rose since it was last seen; of commands that overlap, whichever asks first is told."""
        count = int(await self._carrier.ask("oom"))
        before, self._ooms = self._ooms, count
        return before is not None and count > before

    async def _diagnosed(self, error: SandboxError) -> SandboxError:
        """What really happened: the backend is asked before a sandbox is called lost."""
        health = await self._carrier.health()
        if health.alive:
            return error
        return SandboxLostError(f"sandbox {self.id} is gone ({health.detail or error})", by_command=health.by_itself)


async def _ended(running: Running, stdin: bytes | None, capture: _Capture) -> int:
    """The exit code, as soon as the command's own process ended."""
    work = [asyncio.ensure_future(capture.read(running))]
    if stdin is not None:
        work.append(asyncio.ensure_future(running.feed(stdin)))
    try:
        return await _exit_code(running, work[0], capture)
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def _exit_code(running: Running, reading: "asyncio.Future[None]", capture: _Capture) -> int:
    pause = 0.25
    while True:
        await asyncio.wait({reading}, timeout=pause)
        if reading.done():
            reading.result()
        code = await running.exit_code()
        if code is not None:
            await _drained(reading, capture)
            return code
        if reading.done():  # its outputs are closed and it lives, or the backend has not yet noticed its end
            pause = min(pause, 0.1) * 1.5
            await asyncio.sleep(pause / 10)
        else:
            pause = min(pause * 1.5, 1.0)


async def _drained(reading: "asyncio.Future[None]", capture: _Capture) -> None:
    until = time.monotonic() + _DRAIN_S
    while not reading.done() and time.monotonic() < until:
        seen = capture.total
        await asyncio.wait({reading}, timeout=_DRAIN_QUIET_S)
        if capture.total == seen:
            return


def _script(argv: Sequence[str]) -> str:
    if len(argv) != 3 or list(argv[:2]) != ["bash", "-c"]:
        raise ValueError("a session runs ['bash', '-c', script] only")
    return argv[2]


def _named(session: str) -> str:
    if not _SESSION_NAME.fullmatch(session):
        raise ValueError(f"session {session!r}: use at most 32 letters, digits, _ and -")
    return session
