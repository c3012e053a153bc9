"""Sandboxes as Docker containers whose first process is our agent, with safe defaults.

A start: the image, the shared parts of the engine (`docker_agent.py`), a container under the name that was chosen before, its attach
stream, the agent's first answer, its configuration, files and setup. What the engine cannot promise is said: without quotas of its storage
the agent watches what a sandbox writes (`disk_limits`); and no engine ends a container after `lifetime_s`: its owner does, or the sweep of
what nobody owns.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from sandboxes import docker_config, docker_disk
from sandboxes.agent_sandbox import AgentSandbox
from sandboxes.base import (
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
from sandboxes.docker_agent import EngineAgent
from sandboxes.docker_config import Host, ImageFacts
from sandboxes.docker_containers import Containers
from sandboxes.docker_engine import Engine, EngineError
from sandboxes.docker_images import Images
from sandboxes.docker_line import DockerLine
from sandboxes.docker_snapshots import Snapshots
from sandboxes.ownerless import ownerless
from sandboxes.shielding import to_the_end
from sandboxes.starting import Budget, StartLimits, furnish

logger = logging.getLogger(__name__)

_SPEC_FAULTS = ("unknown or invalid runtime", "unknown runtime")
"""In the engine's refusal to start a container: no later try can succeed."""
_EXIT_HARDEN = 71
"""The agent's exit code when it could not close the sandbox, as when it may not make a network namespace."""
_SHARED_GONE = ("cannot join network", "no such container", "/.rollway/agent", "no such file or directory")
"""In its refusal when the pause container, or the agent's volume, was removed behind our back."""


class DockerBackend:
    """A `SandboxBackend` over one engine.

    `answer_s` bounds every answer of the engine, `patience` those of the agents; `busy_pause_s` grows with every 429 of a registry.
    """

    name = "docker"

    def __init__(
        self,
        *,
        deployment_id: str,
        docker_host: str | None = None,
        limits: StartLimits | None = None,
        answer_s: float = 30.0,
        busy_pause_s: float = 3.0,
        patience: Patience = Patience(),
    ) -> None:
        self.limits = limits or StartLimits()
        self._patience = patience
        self._engine = Engine(docker_host, answer_s=answer_s)
        self._agent = EngineAgent(self._engine)
        self._images = Images(self._engine, busy_pause_s=busy_pause_s)
        self._containers = Containers(self._engine, deployment_id=deployment_id)
        self._snapshots = Snapshots(self._engine, deployment_id=deployment_id)
        self._deployment_id = deployment_id
        self._own_networks = True
        self._quota: bool | None = None
        self._probing = asyncio.Lock()

    async def __aenter__(self) -> "DockerBackend":
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
        docker_config.checked(spec, name)
        return await self._begun(spec, lambda: self._images.ensure(spec.image), name=name, fence=fence, furnished=True)

    async def restore(self, snapshot: str, spec: SandboxSpec, *, name: str, fence: int = 0) -> AgentSandbox:
        docker_config.checked(spec, name)
        found = await self._images.facts(snapshot)
        if found is None or not self._snapshots.owns(snapshot, found.labels):
            raise SandboxLostError(f"snapshot {snapshot} is gone, or past its time")
        facts = found

        async def known() -> ImageFacts:
            return facts

        return await self._begun(replace(spec, image=snapshot), known, name=name, fence=fence, furnished=False)

    async def _begun(
        self, spec: SandboxSpec, image: Callable[[], Awaitable[ImageFacts]], *, name: str, fence: int, furnished: bool
    ) -> AgentSandbox:
        async def make(facts: ImageFacts, budget: Budget) -> AgentSandbox:
            sandbox = await self._made(spec, facts, name=name, fence=fence, furnished=furnished)
            sandbox.start_seconds = budget.spent_s
            return sandbox

        def start() -> Awaitable[AgentSandbox]:
            return self.limits.start(name, within_s=spec.start_s, prepare=image, make=make)

        return await self._engine.outlasting(start, within_s=self._patience.reconnect_s)

    async def _made(self, spec: SandboxSpec, image: ImageFacts, *, name: str, fence: int, furnished: bool) -> AgentSandbox:
        """One try. It leaves nothing behind when it fails, whenever that is."""
        host = await self._host()
        config = docker_config.container(spec, name=name, deployment_id=self._deployment_id, image=image, host=host)
        unknown = started = False
        line: DockerLine | None = None
        sandbox: AgentSandbox | None = None
        try:
            line = await self._containers.create(config, name)
            await line.start()
            sandbox = await self._first_answer(line, name, fence)
            await _configure(sandbox, spec, image)
            if furnished:
                await furnish(sandbox, spec)
            started = True
            return sandbox
        except EngineError as error:
            unknown = error.status == 0
            raise self._start_error(name, error) from error
        finally:
            if not started:
                if sandbox is not None:
                    await sandbox.detach()
                if line is not None:
                    line.close()
                await to_the_end(self._containers.discard(name, config["Labels"], unknown=unknown))

    async def _first_answer(self, line: DockerLine, name: str, fence: int) -> AgentSandbox:
        try:
            return await self._attached(line, fence=fence)
        except SandboxLostError as error:
            if await line.exit_code() == _EXIT_HARDEN:
                self._give_up_own_networks(line.last_words)
            raise SandboxStartError(f"sandbox {name} did not start: {line.last_words or error}") from error

    def _give_up_own_networks(self, reason: str) -> None:
        if self._own_networks:
            logger.warning("sandboxes get their network namespaces from the engine from now on, which is slower: %s", reason)
        self._own_networks = False

    def _start_error(self, name: str, error: EngineError) -> SandboxStartError:
        text = str(error).lower()
        if any(words in text for words in _SHARED_GONE):
            self._agent.doubt()
        elif self._own_networks and error.status >= 400 and ("capabilit" in text or "sys_admin" in text):
            self._give_up_own_networks(str(error))
        elif error.status == 400 or any(words in text for words in _SPEC_FAULTS):
            return SandboxSpecError(f"sandbox {name} can never start: {error}{_cure(text)}")
        return SandboxStartError(f"sandbox {name} did not start: {error}")

    async def _host(self) -> Host:
        shared = await self._agent.ensure()
        async with self._probing:
            if self._quota is None:
                self._quota = await docker_disk.has_quota(self._engine, shared.image)
        return Host(agent_volume=shared.volume, pause=shared.pause if self._own_networks else None, quota=self._quota)

    async def disk_limits(self) -> str:
        """How `disk_mib` is kept on this engine: `quota: ...` or `watch: ...`, in one sentence."""
        return docker_disk.QUOTA if (await self._host()).quota else docker_disk.WATCH

    async def adopt(self, sandbox: Sandbox, spec: SandboxSpec, *, name: str, fence: int = 0) -> AgentSandbox:
        """See `PoolableBackend.adopt`. It is removed where this fails, unless it is another holder's by then."""
        docker_config.checked(spec, name)
        began = time.monotonic()
        line = self._containers.line(sandbox.id)
        doomed = True
        try:
            image = await self._images.ensure(spec.image)
            claimed = await self._claimed(line, spec, image, name=name, fence=fence, boot_id=sandbox.boot_id)
            claimed.start_seconds = time.monotonic() - began
            doomed = False
            return claimed
        except SandboxFencedError:
            doomed = False
            raise
        finally:
            if doomed:
                await to_the_end(line.remove())

    async def _claimed(
        self, line: DockerLine, spec: SandboxSpec, image: ImageFacts, *, name: str, fence: int, boot_id: str
    ) -> AgentSandbox:
        """Rename it while its agent is asked for a sign of life and told what it is for."""
        labels = docker_config.container_labels(spec, name=name, deployment_id=self._deployment_id, image=image)
        renaming = asyncio.create_task(self._containers.rename(line, name, labels))
        sandbox: AgentSandbox | None = None
        claimed = False
        try:
            sandbox = await self._attached(line, fence=fence, boot_id=boot_id)
            await _configure(sandbox, spec, image)
            await furnish(sandbox, spec)
            await asyncio.shield(renaming)
            claimed = True
            return sandbox
        finally:
            if not claimed:
                await to_the_end(_settled(renaming))
                if sandbox is not None:
                    await sandbox.detach()

    async def attach(self, sandbox_id: str, *, name: str | None = None, fence: int = 0, boot_id: str | None = None) -> AgentSandbox:
        found = await self._engine.outlasting(lambda: self._containers.find(sandbox_id), within_s=self._patience.reconnect_s)
        if found is None:
            raise SandboxLostError(f"sandbox {sandbox_id} is gone")
        if not self._containers.is_ours(found):
            raise SandboxLostError(f"container {sandbox_id} is not a sandbox of deployment {self._deployment_id}")
        if name not in (None, found["Name"].removeprefix("/")):  # asked before its agent is, which would fence its holder
            raise SandboxLostError(f"container {sandbox_id} is {found['Name'].removeprefix('/')}, not {name}")
        if not found["State"]["Running"]:
            raise SandboxLostError(f"sandbox {sandbox_id} is {found['State']['Status']}")
        return await self._attached(self._containers.line(found["Id"]), fence=fence, boot_id=boot_id)

    async def _attached(self, line: DockerLine, *, fence: int, boot_id: str | None = None) -> AgentSandbox:
        channel = Channel(line, fence=fence, boot_id=boot_id, patience=self._patience)
        await channel.open()
        return AgentSandbox(line, channel)

    async def forget_snapshot(self, snapshot: str) -> None:
        facts = await self._images.facts(snapshot)
        if facts is not None and self._snapshots.owns(snapshot, facts.labels):
            await self._snapshots.forget(snapshot)

    async def images(self) -> frozenset[str]:
        return await self._images.references()

    async def list(self) -> Sequence[SandboxInfo]:
        return await self._containers.list()

    async def sweep(
        self, *, keep: frozenset[str], older_than_s: float, keep_prefixes: tuple[str, ...] = (), only: frozenset[str] | None = None
    ) -> int:
        doomed = ownerless(await self.list(), keep=keep, older_than_s=older_than_s, keep_prefixes=keep_prefixes, only=only)
        results = await asyncio.gather(*(self._swept(info) for info in doomed))
        await self._snapshots.sweep()
        await self._agent.remove_older()
        return sum(results)

    async def _swept(self, info: SandboxInfo) -> bool:
        try:
            async with self.limits.removal():
                await to_the_end(self._containers.line(info.id).remove())
        except SandboxError as error:
            logger.warning("sweep left %s: %s", info.name, error)
            return False
        logger.info("sweep removed %s, %.0f s old", info.name, info.age_s)
        return True

    async def remove_snapshots(self) -> None:
        """Remove every snapshot of this deployment, whenever its time ends; one that is in use stays, for the sweep."""
        await self._snapshots.sweep(past_only=False)

    async def remove_shared(self) -> None:
        """Remove what all deployments share on this engine, as far as no sandbox uses it: it is made again at the next start."""
        await self._agent.remove_shared()

    async def ping(self) -> None:
        await self._engine.call("answer", "GET", "version")

    async def aclose(self) -> None:
        await self._images.aclose()
        await self._engine.aclose()


async def _configure(sandbox: AgentSandbox, spec: SandboxSpec, image: ImageFacts) -> None:
    user = spec.user or image.user
    await sandbox.configure(user=user, workdir=spec.workdir, env=spec.env, disk_mib=spec.disk_mib)


async def _settled(task: "asyncio.Task[None]") -> None:
    """Wait for its end, whatever that is."""
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.info("a claim that failed was not renamed either: %s", error)


def _cure(refusal: str) -> str:
    """What to change in the spec, where the engine's refusal (in lower case) tells it."""
    if cpus := re.search(r"range of cpus is from [\d.]+ to ([\d.]*\d)", refusal):
        return f"; set sandbox.cpus to at most {cpus.group(1)}, or use a larger machine"
    if "runtime" in refusal and "unknown" in refusal:
        return "; leave sandbox.runtime at 'default', or install that runtime in the engine"
    return ""
