"""Sandboxes as Linux namespaces on this machine: a DEVELOPMENT backend for where no Docker engine can be had.

What holds: own user, mount, pid, network, ipc and uts namespaces, no capability, no new privileges, the agent's seccomp filter, an
unprivileged user of the machine per sandbox, system directories read-only, limits through control groups where they can be written, the
agent's watch over its files.
What does not: the system directories are the machine's own and can be read; the watch kills what fills the disk a moment after it did;
there is one user, root, no image, no network and no snapshot; nothing ends a sandbox after `lifetime_s` but its owner, or the sweep of what
nobody owns.
Needs root and util-linux (unshare, setpriv, pivot_root, mount).
"""

import asyncio
import logging
import os
import platform
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from sandboxes import agent_binary, cgroups, docker_config, process_box
from sandboxes.agent_sandbox import AgentSandbox
from sandboxes.base import (
    DEFAULT_ENV,
    Sandbox,
    SandboxError,
    SandboxFencedError,
    SandboxInfo,
    SandboxLostError,
    SandboxSpec,
    SandboxSpecError,
    SandboxStartError,
)
from sandboxes.channel import Channel
from sandboxes.channel_attachment import Patience
from sandboxes.ownerless import ownerless
from sandboxes.process_box import Box
from sandboxes.process_line import ProcessLine, discard
from sandboxes.shielding import to_the_end
from sandboxes.starting import Budget, StartLimits, furnish

logger = logging.getLogger(__name__)

IMAGES = frozenset({"host", "rollway-sandbox:1"})
"""There are no images here: both names mean this machine's own system directories, read-only."""

_ROOT_USER = frozenset({None, "", "root", "0", "0:0"})
_ENTER_ROOT = Path(__file__).with_name("process_root.sh").resolve()
_TOOLS = ("unshare", "setpriv", "pivot_root", "mount")
_JOIN = 'IFS=:; for group in $1; do echo $$ >"$group" || exit 125; done; unset IFS; shift; exec "$@"'
"""Joins the control groups before anything of the sandbox runs."""
_PAUSE_S = 0.005
_BEGIN_S = 10.0
"""For the start script to run at all."""


class ProcessBackend:
    """A `SandboxBackend` over the namespaces of this machine, with one directory per sandbox below `root`."""

    name = "process"

    def __init__(self, *, deployment_id: str, root: Path, limits: StartLimits | None = None, answer_s: float = 30.0) -> None:
        self.limits = limits or StartLimits()
        self._deployment_id = deployment_id
        self._root = root.absolute() / deployment_id
        self._answer_s = answer_s
        logger.warning("PROCESS SANDBOXES: a development backend on this machine's own system; do not run models you do not trust in it")
        if missing := cgroups.unenforced():
            logger.warning("PROCESS SANDBOXES: control groups cannot be written here, NOT ENFORCED: %s", ", ".join(missing))

    async def __aenter__(self) -> "ProcessBackend":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, *, name: str, fence: int = 0) -> AsyncIterator[AgentSandbox]:
        sandbox = await self.create(spec, name=name, fence=fence)
        try:
            yield sandbox
        finally:
            await sandbox.detach()

    async def create(self, spec: SandboxSpec, *, name: str, fence: int = 0) -> AgentSandbox:
        _checked(spec, name)

        async def make(prepared: None, budget: Budget) -> AgentSandbox:
            try:
                sandbox = await self._made(spec, name, fence)
            except OSError as error:
                raise SandboxError(f"sandbox {name} could not be made below {self._root}: {error}") from error
            sandbox.start_seconds = budget.spent_s
            return sandbox

        return await self.limits.start(name, within_s=spec.start_s, prepare=self.ping, make=make)

    async def _made(self, spec: SandboxSpec, name: str, fence: int) -> AgentSandbox:
        """One try. It leaves nothing behind when it fails, whenever that is."""
        box = Box(id=secrets.token_hex(8), deployment_id=self._deployment_id, created=time.time(), labels=dict(spec.labels))
        directory = await self._claimed(name, box)
        started = False
        try:
            await to_the_end(self._launched(box, directory, spec))
            sandbox = await self._furnished(box.id, spec, fence=fence, boot_id=None)
            started = True
            return sandbox
        finally:
            if not started:
                await to_the_end(discard(directory, box))

    async def adopt(self, sandbox: Sandbox, spec: SandboxSpec, *, name: str, fence: int = 0) -> AgentSandbox:
        """Make a bare sandbox of a pool the one that `spec` asks for: its name and labels, its holder, environment, files and setup.

        It must have been created with the same limits and workdir. It is removed where this fails.

        Raises:
            SandboxLostError: it died in the pool.
            SandboxSpecError, SandboxStartError: as `create`.
        """
        _checked(spec, name)
        began = time.monotonic()
        doomed = True
        try:
            await self._renamed(sandbox.id, name, spec.labels)
            claimed = await self._furnished(sandbox.id, spec, fence=fence, boot_id=sandbox.boot_id)
            doomed = False
        except SandboxFencedError:
            doomed = False
            raise
        finally:
            if doomed:
                await to_the_end(self._line(sandbox.id).remove())
        claimed.start_seconds = time.monotonic() - began
        return claimed

    async def _renamed(self, sandbox_id: str, name: str, labels: Mapping[str, str]) -> None:
        found = process_box.find(self._root, sandbox_id)
        if found is None:
            raise SandboxLostError(f"sandbox {sandbox_id} is gone")
        directory, box = found
        try:
            await self._vacated(name, labels)
            replace(box, labels=dict(labels)).write(directory)
            directory.rename(self._root / name)
        except OSError as error:
            raise SandboxStartError(f"sandbox {sandbox_id} could not be called {name}: {error}") from error

    async def _furnished(self, sandbox_id: str, spec: SandboxSpec, *, fence: int, boot_id: str | None) -> AgentSandbox:
        sandbox, whole = await self._attached(sandbox_id, fence=fence, boot_id=boot_id), False
        try:
            await sandbox.configure(user=None, workdir=spec.workdir, env=spec.env, disk_mib=spec.disk_mib)
            await furnish(sandbox, spec)
            whole = True
            return sandbox
        finally:
            if not whole:
                await sandbox.detach()

    async def _attached(self, sandbox_id: str, *, fence: int, boot_id: str | None) -> AgentSandbox:
        line = self._line(sandbox_id)
        channel = Channel(line, fence=fence, boot_id=boot_id, patience=Patience(connect_s=self._answer_s))
        await channel.open()
        return AgentSandbox(line, channel)

    async def _claimed(self, name: str, box: Box) -> Path:
        """The directory of the name, empty and ours."""
        await self._vacated(name, box.labels)
        directory = self._root / name
        directory.mkdir(parents=True, mode=0o700)
        box.write(directory)
        return directory

    async def _vacated(self, name: str, labels: Mapping[str, str]) -> None:
        """Remove the holder of a name whose create reply was lost.

        Raises:
            SandboxStartError: it is somebody else's.
        """
        directory = self._root / name
        if directory.exists():
            found = process_box.read_box(directory)
            if found is not None and found.labels != labels:
                raise SandboxStartError(f"the name {name} is taken by a sandbox of another owner: it is left alone")
            await to_the_end(discard(directory, found))

    async def _launched(self, box: Box, directory: Path, spec: SandboxSpec) -> None:
        """Start the first process, and see its number on disk: from there on `discard` reaches it, whoever calls that."""
        (directory / "root").mkdir()
        groups = cgroups.create(box.key, spec)
        with process_box.listening(directory) as socket, (directory / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", _JOIN, "sh", ":".join(str(path) for path in groups.procs),
                "setsid", "--fork", "unshare", "--mount", "--pid", "--ipc", "--uts", "--net", "--fork",
                "sh", str(_ENTER_ROOT), str(directory), str(box.uid), spec.workdir, str(int(spec.read_only)), str(spec.disk_mib),
                str(groups.oom_counter), str(agent_binary.path(platform.machine())), str(socket.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
                env=DEFAULT_ENV,
                cwd="/",
                pass_fds=(socket.fileno(),),
            )  # fmt: skip
            if (code := await process.wait()) != 0:
                raise SandboxError(f"the first process did not begin, exit code {code}: {process_box.last_words(directory)}")
        until = time.monotonic() + _BEGIN_S
        while not process_box.started(directory):
            if time.monotonic() > until:
                raise SandboxError(f"the first process did not begin within {_BEGIN_S:g} s: {process_box.last_words(directory)}")
            await asyncio.sleep(_PAUSE_S)

    async def attach(self, sandbox_id: str, *, name: str | None = None, fence: int = 0, boot_id: str | None = None) -> AgentSandbox:
        found = process_box.find(self._root, sandbox_id)
        if found is None or process_box.first_process(found[0]) is None:
            raise SandboxLostError(f"sandbox {sandbox_id} is gone")
        if name not in (None, found[0].name):  # asked before its agent is, which would fence its holder
            raise SandboxLostError(f"sandbox {sandbox_id} is {found[0].name}, not {name}")
        return await self._attached(sandbox_id, fence=fence, boot_id=boot_id)

    async def restore(self, snapshot: str, spec: SandboxSpec, *, name: str, fence: int = 0) -> Sandbox:
        raise SandboxError("process sandboxes have no snapshots: use the docker backend")

    async def forget_snapshot(self, snapshot: str) -> None:
        """There are none."""

    async def images(self) -> frozenset[str]:
        return frozenset(IMAGES)

    async def disk_limits(self) -> str:
        return "watch: the sandbox's agent looks at its files all the time, and kills what runs where they outgrow disk_mib"

    async def list(self) -> Sequence[SandboxInfo]:
        return [
            SandboxInfo(
                id=box.id,
                name=directory.name,
                labels=box.labels,
                age_s=max(0.0, time.time() - box.created),
                alive=process_box.first_process(directory) is not None,
            )
            for directory, box in process_box.boxes(self._root)
        ]

    async def sweep(
        self, *, keep: frozenset[str], older_than_s: float, keep_prefixes: tuple[str, ...] = (), only: frozenset[str] | None = None
    ) -> int:
        doomed = ownerless(await self.list(), keep=keep, older_than_s=older_than_s, keep_prefixes=keep_prefixes, only=only)
        for info in doomed:
            async with self.limits.removal():
                await to_the_end(self._line(info.id).remove())
        return len(doomed)

    async def ping(self) -> None:
        if os.geteuid() != 0:
            raise SandboxError("process sandboxes need root: run as root, or use the docker backend")
        if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
            raise SandboxError(f"process sandboxes need {', '.join(missing)}: apt-get install util-linux mount")

    async def aclose(self) -> None:
        """Nothing is held open."""

    def _line(self, sandbox_id: str) -> ProcessLine:
        return ProcessLine(self._root, sandbox_id, answer_s=self._answer_s)


def _checked(spec: SandboxSpec, name: str) -> None:
    docker_config.checked(spec, name)
    if spec.image not in IMAGES:
        raise SandboxSpecError(f"image {spec.image!r}: process sandboxes have no images, use 'host'")
    if spec.network != "none":
        raise SandboxSpecError(f"network {spec.network!r}: process sandboxes offer 'none' only")
    if spec.runtime != "default":
        raise SandboxSpecError(f"runtime {spec.runtime!r}: process sandboxes offer 'default' only")
    if spec.capabilities != "none":
        raise SandboxSpecError(f"capabilities {spec.capabilities!r}: process sandboxes offer 'none' only")
    if spec.user not in _ROOT_USER:
        raise SandboxSpecError(f"user {spec.user!r}: process sandboxes have one user, root")
