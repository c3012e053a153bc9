"""Sandboxes as Linux namespaces on this machine: a DEVELOPMENT backend for where no Docker engine can be had.

What holds: own user, mount, pid, network, ipc and uts namespaces, no capability, no new privileges, an unprivileged user of the
machine per sandbox, system directories read-only, limits through control groups where they can be written.
What does not: no seccomp filter stands between a command and the kernel, and no quota bounds a sandbox's files in sum.
Needs root and util-linux (unshare, nsenter, setpriv, prlimit).
"""

import asyncio
import logging
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from sandboxes import cgroups, docker_config, process_box
from sandboxes.base import (
    DEFAULT_ENV,
    Sandbox,
    SandboxError,
    SandboxInfo,
    SandboxLostError,
    SandboxSpec,
    SandboxSpecError,
    SandboxStartError,
)
from sandboxes.commands import CommandSandbox
from sandboxes.guest import BOOT, STATE_MIB
from sandboxes.process_box import Box
from sandboxes.process_carrier import JOIN, ProcessCarrier, discard
from sandboxes.shielding import to_the_end
from sandboxes.starting import furnish

logger = logging.getLogger(__name__)

IMAGES = frozenset({"host", "rollway-sandbox:1"})
"""There are no images here: both names mean this machine's own system directories, read-only."""

_ENTER_ROOT = Path(__file__).with_name("process_root.sh").resolve()
_TOOLS = ("unshare", "nsenter", "setpriv", "prlimit", "pivot_root", "mount")
_PAUSE_S = 0.005


class ProcessBackend:
    """A `SandboxBackend` over the namespaces of this machine, with one directory per sandbox below `root`."""

    name = "process"

    def __init__(self, *, deployment_id: str, root: Path, max_starting: int = 4, answer_s: float = 30.0) -> None:
        self._deployment_id = deployment_id
        self._root = root.absolute() / deployment_id
        self._answer_s = answer_s
        self._starting = asyncio.Semaphore(max_starting)
        logger.warning("PROCESS SANDBOXES: a development backend without seccomp and disk quotas; do not run models you do not trust in it")
        if missing := cgroups.unenforced():
            logger.warning("PROCESS SANDBOXES: control groups cannot be written here, NOT ENFORCED: %s", ", ".join(missing))

    async def __aenter__(self) -> "ProcessBackend":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, *, name: str) -> AsyncIterator[Sandbox]:
        yield await self.create(spec, name=name)

    async def create(self, spec: SandboxSpec, *, name: str) -> Sandbox:
        _checked(spec, name)
        deadline = asyncio.timeout(spec.start_s)
        try:
            async with deadline, self._starting:
                return await self._create(spec, name, time.monotonic())
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise SandboxStartError(f"sandbox {name} did not start within {spec.start_s:g} s") from error

    async def _create(self, spec: SandboxSpec, name: str, began: float) -> Sandbox:
        await self.ping()
        box = Box(
            name=name,
            nonce=secrets.token_hex(4),
            deployment_id=self._deployment_id,
            created=time.time(),
            workdir=spec.workdir,
            disk_mib=spec.disk_mib,
            env={**DEFAULT_ENV, **spec.env},
            labels=dict(spec.labels),
        )
        directory = await self._claimed(box)
        started = False
        try:
            await self._launch(box, directory, spec)
            carrier = ProcessCarrier(box, directory, answer_s=self._answer_s)
            sandbox = CommandSandbox(carrier, workdir=spec.workdir, start_seconds=0.0)
            await carrier.boot()
            await furnish(sandbox, spec)
            sandbox.start_seconds = time.monotonic() - began
            started = True
            return sandbox
        except SandboxStartError:
            raise
        except SandboxError as error:
            raise SandboxStartError(f"sandbox {name} did not start: {error} {process_box.last_words(directory)}") from error
        finally:
            if not started:
                await to_the_end(discard(directory, box.key, process_box.first_process(directory)))

    async def _claimed(self, box: Box) -> Path:
        """The directory of the name, empty and ours."""
        directory = self._root / box.name
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            found = process_box.read_box(directory)
            if found is not None and found.labels != box.labels:
                raise SandboxStartError(f"the name {box.name} is taken by a sandbox of another owner: it is left alone") from None
            await to_the_end(discard(directory, box.key, process_box.first_process(directory)))
            directory.mkdir(parents=True)
        box.write(directory)
        return directory

    async def _launch(self, box: Box, directory: Path, spec: SandboxSpec) -> None:
        (directory / "root").mkdir()
        for pipe in ("in", "out"):
            os.mkfifo(directory / pipe, 0o600)
        groups = cgroups.create(box.key, spec)
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", JOIN, "sh", ":".join(str(path) for path in groups.procs),
            "setsid", "--fork", "unshare", "--mount", "--pid", "--ipc", "--uts", "--net", "--fork",
            "sh", str(_ENTER_ROOT), str(directory), str(box.uid), spec.workdir, str(int(spec.read_only)), str(STATE_MIB),
            str(groups.memory or ""), "bash", "-c", BOOT, "rollway-init",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=box.env,
            cwd="/",
        )  # fmt: skip
        await process.wait()
        while not process_box.started(directory):  # noqa: ASYNC110  another process's file; the start budget ends this
            await asyncio.sleep(_PAUSE_S)
        process_box.remember_birth(directory)

    async def attach(self, sandbox_id: str) -> Sandbox:
        name, _, nonce = sandbox_id.partition("@")
        directory = self._root / name
        box = process_box.read_box(directory) if docker_config.valid_name(name) else None
        if box is None or box.nonce != nonce or process_box.first_process(directory) is None:
            raise SandboxLostError(f"sandbox {sandbox_id} is gone")
        return CommandSandbox(ProcessCarrier(box, directory, answer_s=self._answer_s), workdir=box.workdir, start_seconds=0.0)

    async def images(self) -> frozenset[str]:
        return frozenset(IMAGES)

    async def list(self) -> Sequence[SandboxInfo]:
        return [
            SandboxInfo(
                id=box.id,
                name=box.name,
                labels=box.labels,
                age_s=max(0.0, time.time() - box.created),
                alive=process_box.first_process(directory) is not None,
            )
            for directory, box in self._boxes()
        ]

    async def sweep(self, *, keep: frozenset[str], older_than_s: float) -> int:
        swept = 0
        for directory, box in self._boxes():
            if box.name not in keep and time.time() - box.created >= older_than_s:
                await to_the_end(ProcessCarrier(box, directory, answer_s=self._answer_s).remove())
                swept += 1
        return swept

    def _boxes(self) -> Sequence[tuple[Path, Box]]:
        found = [(directory, process_box.read_box(directory)) for directory in self._root.glob("*")]
        return [(directory, box) for directory, box in found if box is not None]

    async def ping(self) -> None:
        if os.geteuid() != 0:
            raise SandboxError("process sandboxes need root: run as root, or use the docker backend")
        if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
            raise SandboxError(f"process sandboxes need {', '.join(missing)}: apt-get install util-linux mount")

    async def aclose(self) -> None:
        """Nothing is held open."""


def _checked(spec: SandboxSpec, name: str) -> None:
    docker_config.checked(spec, name)
    if spec.image not in IMAGES:
        raise SandboxSpecError(f"image {spec.image!r}: process sandboxes have no images, use 'host'")
    if spec.network != "none":
        raise SandboxSpecError(f"network {spec.network!r}: process sandboxes offer 'none' only")
    if spec.runtime != "default":
        raise SandboxSpecError(f"runtime {spec.runtime!r}: process sandboxes offer 'default' only")
