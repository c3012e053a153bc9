"""A real agent whose whole world is a directory of the test's: what its file calls do is looked at from outside."""

import asyncio
import io
import os
import platform
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandboxes import agent_binary
from sandboxes.channel import Channel
from sandboxes.channel_attachment import Patience
from sandboxes.frames import How, Kind, Result, Run
from tests.contract.agent_line import AgentLine

needs_agent = [
    pytest.mark.process,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None or not agent_binary.path(platform.machine()).exists(),
        reason="needs root, unshare and an agent for this machine",
    ),
]

SMALL_BYTES = 1_048_576
"""The size of the file system at `/small`."""

_ENTER = f"""
mount -t proc proc "$1/proc"
mount -t tmpfs -o size={SMALL_BYTES} tmpfs "$1/small"
exec chroot "$1" /agent
"""

Member = tuple[str, bytes, str | bytes]
"""Name, tarfile's type, and what a file holds or where a link leads."""


class RootedLine(AgentLine):
    """Its agent lives in `root`, in namespaces of its own."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    async def start(self, *arguments: str) -> None:
        for name in ("proc", "small", "usr/bin"):
            (self._root / name).mkdir(parents=True)
        (self._root / "bin").symlink_to("usr/bin")
        shutil.copy(agent_binary.path(platform.machine()), self._root / "agent")
        command = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "sh", "-ec", _ENTER, "sh", str(self._root), *arguments]
        await asyncio.get_running_loop().subprocess_exec(lambda: self, *command, env={"PATH": os.environ["PATH"]})


class FileCalls:
    """The agent's calls that move files, as they are on the wire."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.line = RootedLine(root)
        self.channel = Channel(self.line, patience=Patience(connect_s=5.0))

    async def start(self, *, user: str = "") -> None:
        await self.line.start()
        await self.channel.open()
        await self.channel.configure(user=user, workdir="/", env={})

    async def stop(self) -> None:
        await self.channel.aclose()
        await self.line.stop()

    async def write(self, path: str, content: bytes, mode: str = "644") -> Result:
        return await self.channel.run(_run(Kind.WRITE, path, mode), stdin=content)

    async def read(self, path: str) -> tuple[bytes, Result]:
        return await self._data(_run(Kind.READ, path))

    async def unpack(self, archive: bytes, *removed: str) -> Result:
        return await self.channel.run(_run(Kind.UNPACK, *removed), stdin=archive)

    async def pack(self, *paths: str) -> tuple[bytes, Result]:
        return await self._data(_run(Kind.PACK, *paths))

    async def packed(self, *paths: str) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
        """What `pack` gives, as Python reads it; the call ended well."""
        archive, result = await self.pack(*paths)
        assert failure(result) is None
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            return {member.name: (member, _content(tar, member)) for member in tar}

    async def _data(self, run: Run) -> tuple[bytes, Result]:
        results: list[Result] = []
        pieces = [piece async for piece in self.channel.data(run, results.append)]
        return b"".join(pieces), results[0]


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member) if member.isreg() else None
    return file.read() if file else b""


def _run(kind: Kind, *argv: str) -> Run:
    return Run(kind=kind, argv=argv, timeout_ms=30_000)


def failure(result: Result) -> tuple[int, str] | None:
    """Exit code and what the agent said; None where all went well. A crash fails the test."""
    assert result.how == How.EXITED, result
    said = result.stderr.head + result.stderr.tail
    assert (result.code == 0) == (said == b"")
    return (result.code, said.decode(errors="replace").rstrip("\n")) if result.code else None


def archive(members: Sequence[Member], *, form: int = tarfile.GNU_FORMAT, mode: int = 0o644, mtime: float = 1_000_000_000) -> bytes:
    """A tar as Python writes it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, kind, what in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.mtime = kind, mode, mtime
            if isinstance(what, bytes):
                member.size = len(what)
                tar.addfile(member, io.BytesIO(what))
            else:
                member.linkname = what
                tar.addfile(member)
    return buffer.getvalue()
