"""A Docker engine of a test's own, that may be killed: dockerd over a containerd that outlives it, as on any host where both are services.

Their files lie in memory, in one folder; the machine's own engine is asked for the tests' image and for nothing else.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from tests.sandbox_backends import IMAGE, docker_host

START_S = 60.0
"""One that stops the containers it finds gives each 10 s to end."""
CONTAINERD = """version = 2
root = "{folder}/memory/containerd"
state = "{folder}/c"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{folder}/c.sock"
"""


def missing() -> str:
    """What stands in the way of a second engine here; empty: nothing."""
    for program in ("dockerd", "containerd", "docker"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return "" if os.geteuid() == 0 else "dockerd needs root"


class OwnDockerd:
    """`host` stays the same for all its lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._dockerd: asyncio.subprocess.Process | None = None
        self.host = f"unix://{folder}/d.sock"

    async def start(self, *, live_restore: bool) -> None:
        """Returns when it answers."""
        folder = self._folder
        (folder / "dockerd.json").write_text("{}")  # the machine's own settings are its own engine's
        self._dockerd = await self._spawn(
            "unshare", "--net",  # an engine without a bridge removes docker0, the machine's engine's
            "dockerd", f"--config-file={folder}/dockerd.json", f"--data-root={folder}/memory/docker", f"--exec-root={folder}/x",
            f"--pidfile={folder}/d.pid", f"--host={self.host}", f"--containerd={folder}/c.sock", f"--live-restore={live_restore}",
            "--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false",
        )  # fmt: skip
        async with asyncio.timeout(START_S):
            while await self._asked("version") is None:
                assert self._dockerd.returncode is None, self._log.read_text()[-2000:]
                await asyncio.sleep(0.1)

    async def kill(self) -> None:
        """As a crash does: at once, and its containers run on."""
        assert self._dockerd is not None
        self._dockerd.send_signal(signal.SIGKILL)
        await self._dockerd.wait()

    async def containers(self, *more: str) -> list[str]:
        """Names of all that exist; `more`: filters."""
        found = await self._asked("ps", "--all", "--format={{.Names}}", *(f"--filter={text}" for text in more))
        assert found is not None
        return found.split()

    async def top(self, container: str) -> str:
        """What runs in it; empty where nothing does."""
        return await self._asked("top", container) or ""

    @property
    def _log(self) -> Path:
        return self._folder / "engine.log"

    async def _spawn(self, *argv: str) -> asyncio.subprocess.Process:
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)

    async def _asked(self, *words: str) -> str | None:
        """The client's output; None where it failed."""
        client = await asyncio.create_subprocess_exec(
            "docker", "--host", self.host, *words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        out, _ = await client.communicate()
        return out.decode() if client.returncode == 0 else None

    async def load(self, image: str) -> None:
        """Copy it from the machine's engine."""
        source = ["--host", host] if (host := docker_host()) else []
        packed = self._folder / "memory" / "image.tar"
        saving = await self._spawn("docker", *source, "save", "--output", str(packed), image)
        assert await saving.wait() == 0
        assert await self._asked("load", "--input", str(packed)) is not None
        packed.unlink()


@asynccontextmanager
async def own_dockerd(folder: Path) -> AsyncIterator[OwnDockerd]:
    """Not started yet, but once, to be given the tests' image. Nothing of it is left."""
    memory = folder / "memory"
    memory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "rollway-test", memory], check=True)
    engine = OwnDockerd(folder)
    (folder / "containerd.toml").write_text(CONTAINERD.format(folder=folder))
    containerd = await engine._spawn("containerd", "--config", str(folder / "containerd.toml"))
    try:
        await engine.start(live_restore=True)
        await engine.load(IMAGE)
        await engine.kill()
        yield engine
    finally:
        end_all(folder)
        await containerd.wait()
        unmount_all(folder)


def end_all(folder: Path) -> None:
    """Every process of that engine, first those that would start others: each names the folder on its command line."""
    found = [process for process in psutil.process_iter() if any(str(folder) in word for word in command_line(process))]
    children = [child for process in found if "shim" in process.name() for child in process.children(recursive=True)]
    for process in [*found, *children]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([*found, *children], timeout=10)


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def unmount_all(folder: Path) -> None:
    """Also what containers had mounted, deepest first."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in reversed([point for point in points if point.startswith(f"{folder}/")]):
        subprocess.run(["umount", "--lazy", point], check=False)
