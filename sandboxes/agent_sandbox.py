"""A sandbox whose first process is our agent: the one implementation of `Sandbox`. Backends give it a `Line`."""

import asyncio
import errno
import logging
import math
import os
import re
import tarfile
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager

from sandboxes import archive
from sandboxes.base import (
    INODES_PER_MIB,
    MAX_OUTPUT_BYTES,
    ExecResult,
    SandboxContentError,
    SandboxError,
    SandboxFencedError,
    SandboxLostError,
    SandboxSpecError,
    SandboxTooLargeError,
    SandboxUserError,
)
from sandboxes.channel import Channel, RefusedError, StreamLostError
from sandboxes.frames import Ended, How, Kind, Refusal, Result, Run, RunTooLongError
from sandboxes.line import Line
from sandboxes.output import joined
from sandboxes.shielding import to_the_end

logger = logging.getLogger(__name__)

TRANSFER_S = 300.0
"""Budget of one transfer of files."""
STREAM_S = 3600.0
"""Budget of one file that is read or written as a stream: whoever gives or takes the bytes may be slow."""

_FLOOD_BYTES = 256 * 2**20
"""A command that printed this much is killed: reading on only burns a core that other rollouts need."""
_FLOODED = f"\n[killed: it printed more than {_FLOOD_BYTES // 2**20} MiB]\n".encode()
_TRANSFER_ERROR_BYTES = 2000
_INLINE_BYTES = 65_536
"""Archives up to this size are made in the loop: a thread costs more."""
_PATHS_AT_ONCE = 1000
"""As many as a message to the agent holds, were all of them as long as paths can be."""
_GET_TRIES = 3
_OURS_S = 1.0
"""For the agent's word, before a removal, that no later lease holds it; one that is stuck must go all the same."""
_SESSION_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
_SHELLS = ("bash", "sh")
_MAX_TIMEOUT_MS = 2**32 - 1
_NOT_STARTED: Mapping[int, int] = {Refusal.NO_PROCESS: errno.EAGAIN, Refusal.TOO_LARGE: errno.E2BIG, Refusal.NO_SHELL: errno.ENOENT}
"""Refusals that are the command's own business."""


class AgentSandbox:
    """See `Sandbox`. Made by a backend, from a channel that is open."""

    def __init__(self, line: Line, channel: Channel, *, start_seconds: float = 0.0) -> None:
        self._line = line
        self._channel = channel
        self.start_seconds = start_seconds

    @property
    def id(self) -> str:
        return self._line.id

    @property
    def boot_id(self) -> str:
        return self._channel.boot_id

    async def configure(self, *, user: str | None, workdir: str, env: Mapping[str, str], disk_mib: int = 0) -> None:
        """What holds for every later call; makes `workdir`. `disk_mib`: what the agent itself watches over, 0 where the engine does.

        Raises:
            SandboxUserError: no such user.
            SandboxContentError: the directory cannot be made.
        """
        try:
            await self._channel.configure(user=user or "", workdir=workdir, env=env, disk_mib=disk_mib, inodes=disk_mib * INODES_PER_MIB)
        except RefusedError as error:
            if error.code == Refusal.NO_USER:
                raise SandboxUserError(f"no user {user!r} here: {error}") from error
            raise SandboxContentError(f"the working directory {workdir!r} cannot be made: {error}") from error

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        max_output_bytes: int,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        session: str | None = None,
        call_id: str | None = None,
    ) -> ExecResult:
        if not 0 <= max_output_bytes <= MAX_OUTPUT_BYTES:
            raise ValueError(f"max_output_bytes is {max_output_bytes}; it must be from 0 to {MAX_OUTPUT_BYTES}")
        if not argv:
            raise ValueError("argv is empty: its first element is the program")
        if session is not None and stdin is not None:
            raise ValueError("a session's command has no stdin of its own: write a file, or use a here-document")
        run = Run(
            kind=Kind.EXEC if session is None else Kind.SESSION,
            argv=argv if session is None else (argv[0], _script(argv)),
            env=_checked(env or {}),
            user=user or "",
            workdir=workdir or "",
            session="" if session is None else _named(session),
            timeout_ms=_milliseconds(timeout_s),
            cap=max_output_bytes,
            flood=_FLOOD_BYTES,
        )
        try:
            result = await self._channel.run(run, call_id=call_id, stdin=None if session is not None else stdin or b"")
        except RunTooLongError:
            return _not_started(argv[0], errno.E2BIG)
        except RefusedError as error:
            return _refused(argv[0], user, error)
        return _told(argv[0], result)

    def forget(self) -> None:
        self._channel.forget()

    async def put(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        checked = [(_path(path), content) for path, content in files.items()]
        for start in range(0, len(checked), _PATHS_AT_ONCE):
            some = dict(checked[start : start + _PATHS_AT_ONCE])
            small = sum(map(len, some.values())) <= _INLINE_BYTES and len(some) <= 16
            packed = archive.from_files(some, mode=mode) if small else await asyncio.to_thread(archive.from_files, some, mode=mode)
            await self._unpack(packed, replaced=list(some))

    async def put_tar(self, archive_bytes: bytes) -> None:
        try:
            safe = await asyncio.to_thread(archive.cleaned, archive_bytes)
        except tarfile.TarError as error:
            raise SandboxContentError(f"{self.id}: not a tar archive: {error}") from error
        await self._unpack(safe)

    async def get(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        run = _transfer(Kind.PACK, [_path(path) for path in paths])
        for left in reversed(range(_GET_TRIES)):
            try:
                with _refusals():
                    return await self._gathered(run, max_bytes)
            except StreamLostError:
                if not left:
                    raise
        raise AssertionError("a loop that returns or raises")

    async def read_file(self, path: str) -> AsyncIterator[bytes]:
        with _refusals():
            async with aclosing(self._channel.data(_transfer(Kind.READ, [_path(path)], STREAM_S), self._check)) as pieces:
                async for piece in pieces:
                    yield piece

    async def write_file(self, path: str, content: AsyncIterable[bytes], *, mode: int = 0o644) -> None:
        run = _transfer(Kind.WRITE, [_path(path), f"{mode:o}"], STREAM_S)
        with _refusals():
            self._check(await self._channel.run(run, stdin=content))

    async def snapshot(self, *, ttl_s: float) -> str:
        with self._channel.held():
            return await self._line.snapshot(ttl_s)

    async def kill_all(self) -> None:
        await self._channel.kill_all()

    async def poll(self) -> bool:
        return (await self._line.health()).alive

    async def ping(self) -> None:
        """Returns once its agent answers. Raises SandboxError."""
        await self._channel.ping()

    async def processes(self) -> int:
        return (await self._channel.ping()).processes

    async def detach(self) -> None:
        """Let go of it; it lives on."""
        await self._channel.aclose()

    async def destroy(self) -> None:
        try:
            await to_the_end(self._removed())
            await self._channel.aclose(SandboxLostError(f"sandbox {self.id} is gone: it was removed here"))
        finally:
            await self._channel.aclose()

    async def _removed(self) -> None:
        """Ask first whether it is still ours: who was presumed dead, and wakes up, must not remove what another goes on with."""
        try:
            async with asyncio.timeout(_OURS_S):
                await self._channel.ping()
        except SandboxFencedError:
            raise
        except (SandboxError, TimeoutError):
            logger.debug("%s is removed unasked: its agent does not answer", self.id)
        await self._line.remove()

    async def _unpack(self, packed: bytes, *, replaced: Sequence[str] = ()) -> None:
        with _refusals():
            self._check(await self._channel.run(_transfer(Kind.UNPACK, replaced), stdin=packed))

    async def _gathered(self, run: Run, max_bytes: int) -> bytes:
        gathered = bytearray()
        async with aclosing(self._channel.data(run, self._check)) as pieces:
            async for piece in pieces:
                gathered += piece
                if len(gathered) > max_bytes:
                    raise SandboxTooLargeError(f"{self.id}: {', '.join(run.argv)} are more than {max_bytes} bytes as a tar")
        return bytes(gathered)

    def _check(self, result: Result) -> None:
        """The end of a transfer.

        Raises:
            SandboxContentError: it failed.
        """
        if result.how == How.EXITED and result.code == 0 and not result.flags & (Ended.TIMED_OUT | Ended.KILLED | Ended.DISK_FULL):
            return
        reason = joined(*result.stderr).decode(errors="replace").strip()[:500]
        code: int | None = result.code if result.how != How.SIGNALLED and result.code > 1 else None
        if result.flags & Ended.DISK_FULL:
            reason, code = "its disk is full", errno.ENOSPC
        elif result.flags & Ended.TIMED_OUT:
            reason, code = "it ran out of time", errno.ETIMEDOUT
        elif result.how == How.SIGNALLED:
            reason = "killed for memory" if result.flags & Ended.OOM else "killed"
        elif not reason:
            reason = os.strerror(code) if code else f"exit {result.code}"
        raise SandboxContentError(f"{self.id}: {reason}", errno=code)


def _milliseconds(timeout_s: float) -> int:
    """At least one: 0 would be no limit."""
    return max(1, math.ceil(min(timeout_s * 1000, _MAX_TIMEOUT_MS)))


def _transfer(kind: Kind, argv: Sequence[str], timeout_s: float = TRANSFER_S) -> Run:
    return Run(kind=kind, argv=argv, timeout_ms=int(timeout_s * 1000), cap=_TRANSFER_ERROR_BYTES)


def _path(path: str) -> str:
    try:
        return archive.checked_path(path)
    except SandboxSpecError as error:
        raise SandboxContentError(str(error), errno=errno.EINVAL) from error


def _checked(env: Mapping[str, str]) -> Mapping[str, str]:
    for name in env:
        if not name or "=" in name:
            raise ValueError(f"{name!r} is no name of a variable")
    return env


def _script(argv: Sequence[str]) -> str:
    if len(argv) != 3 or argv[1] != "-c" or os.path.basename(argv[0]) not in _SHELLS:
        raise ValueError("a session runs [shell, '-c', script] only, and its shell is bash or sh")
    return argv[2]


def _named(session: str) -> str:
    if not _SESSION_NAME.fullmatch(session):
        raise ValueError(f"session {session!r}: use at most 32 letters, digits, _ and -")
    return session


@contextmanager
def _refusals() -> Iterator[None]:
    """A transfer for which there is no process left, say, is the sandbox's own doing."""
    try:
        yield
    except RefusedError as error:
        reason = _NOT_STARTED.get(error.code)
        if reason is None:
            raise
        raise SandboxContentError(f"{error}: {os.strerror(reason)}", errno=reason) from error


def _refused(program: str, user: str | None, error: RefusedError) -> ExecResult:
    if error.code == Refusal.NO_USER:
        raise SandboxUserError(f"no user {user!r} here: {error}") from error
    reason = _NOT_STARTED.get(error.code)
    if reason is None:
        raise error
    return _not_started(program, reason)


def _not_started(program: str, reason: int, seconds: float = 0.0, *, code: int | None = None) -> ExecResult:
    code = code or (127 if reason == errno.ENOENT else 126)
    text = f"{program}: {os.strerror(reason)}\n"
    return ExecResult(exit_code=code, stdout=b"", stderr=text.encode(errors="replace"), seconds=seconds, start_errno=reason)


def _told(program: str, result: Result) -> ExecResult:
    flags = result.flags
    if result.how == How.NOT_STARTED:
        if flags & Ended.NO_WORKDIR:
            return _not_started("working directory", result.code, result.seconds, code=126)
        return _not_started(program, result.code, result.seconds)
    timed_out = bool(flags & Ended.TIMED_OUT)
    code = result.code if result.how == How.EXITED else 128 + result.code
    out, err = result.stdout, result.stderr
    return ExecResult(
        exit_code=None if timed_out else 137 if flags & (Ended.FLOODED | Ended.DISK_FULL) else code,
        stdout=joined(*out),
        stderr=joined(*err) + (_FLOODED if flags & Ended.FLOODED else b""),
        seconds=result.seconds,
        timed_out=timed_out,
        truncated=len(out.head) + len(out.tail) < out.printed or len(err.head) + len(err.tail) < err.printed,
        oom_killed=bool(flags & Ended.OOM),
        disk_full=bool(flags & Ended.DISK_FULL),
    )
