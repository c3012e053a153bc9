"""Sandboxes as Docker containers, with safe defaults.

What the engine cannot promise is said: without quotas of the storage driver `disk_mib` bounds every single file (and the tmpfs of a
read-only sandbox), not their sum; and no engine ends a container after `lifetime_s`, the sweep does. Engines of the 20.10 line report
the end of a command up to four seconds late while a background process of the command before still holds that one's output.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from sandboxes import docker_config
from sandboxes.base import Sandbox, SandboxError, SandboxInfo, SandboxLostError, SandboxSpec, SandboxSpecError, SandboxStartError
from sandboxes.commands import CommandSandbox
from sandboxes.docker_carrier import DockerCarrier
from sandboxes.docker_engine import Engine, EngineError
from sandboxes.docker_images import Images
from sandboxes.shielding import to_the_end
from sandboxes.starting import furnish

logger = logging.getLogger(__name__)

_SPEC_FAULTS = ("executable file not found", "no such file or directory", "unknown or invalid runtime", "unknown runtime", "network")
"""In the engine's refusal to start a container: no later try can succeed."""


class DockerBackend:
    """A `SandboxBackend` over one engine.

    `max_starting` bounds the starts in flight, `answer_s` every answer of the engine; `busy_pause_s` grows with every 429 of a
    registry.
    """

    name = "docker"

    def __init__(
        self,
        *,
        deployment_id: str,
        docker_host: str | None = None,
        max_starting: int = 4,
        answer_s: float = 30.0,
        busy_pause_s: float = 3.0,
    ) -> None:
        self._deployment_id = deployment_id
        self._engine = Engine(docker_host, answer_s=answer_s)
        self._images = Images(self._engine, busy_pause_s=busy_pause_s)
        self._starting = asyncio.Semaphore(max_starting)

    async def __aenter__(self) -> "DockerBackend":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, *, name: str) -> AsyncIterator[Sandbox]:
        yield await self.create(spec, name=name)

    async def create(self, spec: SandboxSpec, *, name: str) -> Sandbox:
        docker_config.checked(spec, name)
        deadline = asyncio.timeout(spec.start_s)
        try:
            async with deadline:
                return await self._create(spec, name)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise SandboxStartError(f"sandbox {name} did not start within {spec.start_s:g} s") from error

    async def _create(self, spec: SandboxSpec, name: str) -> Sandbox:
        """The image first: a pull of minutes holds no place that a start on another image could have."""
        asked_at = time.monotonic()
        try:
            image_env = await self._images.ensure(spec.image)
        except EngineError as error:
            raise _start_error(name, error) from error
        spent_s = time.monotonic() - asked_at
        async with self._starting:
            return await self._made_ready(spec, name, image_env, began=time.monotonic() - spent_s)

    async def _made_ready(self, spec: SandboxSpec, name: str, image_env: Mapping[str, str], *, began: float) -> Sandbox:
        config = docker_config.container(spec, name=name, deployment_id=self._deployment_id, image_env=image_env)
        started = False
        try:
            carrier = await self._started(config, name)
            sandbox = CommandSandbox(carrier, workdir=spec.workdir, start_seconds=0.0, ooms=0)
            await carrier.boot()
            await furnish(sandbox, spec)
            sandbox.start_seconds = time.monotonic() - began
            started = True
            return sandbox
        except EngineError as error:
            raise _start_error(name, error) from error
        finally:
            if not started:
                await to_the_end(self._discard(name, config["Labels"]))

    async def _started(self, config: Mapping[str, object], name: str) -> DockerCarrier:
        try:
            container_id = await self._made(config, name)
        except EngineError as error:
            if error.status != 409:
                raise
            await self._remove_own(name, config["Labels"])
            container_id = await self._made(config, name)
        async with self._engine.asked(f"start {name}") as docker:
            await docker.containers.container(container_id).start()
        return DockerCarrier(self._engine, container_id)

    async def _made(self, config: Mapping[str, object], name: str) -> str:
        async with self._engine.asked(f"create {name}") as docker:
            return str((await docker.containers.create(dict(config), name=name)).id)

    async def _remove_own(self, name: str, labels: object) -> None:
        """Remove the holder of a name whose create reply was lost.

        Raises:
            SandboxStartError: it is somebody else's.
        """
        try:
            async with self._engine.asked(f"inspect {name}") as docker:
                found = await docker.containers.container(name).show()
        except EngineError as error:
            if error.status == 404:
                return
            raise
        if _ours(found["Config"]["Labels"]) != _ours(labels):
            raise SandboxStartError(f"the name {name} is taken by a container of another owner: it is left alone")
        await DockerCarrier(self._engine, found["Id"]).remove()

    async def _discard(self, name: str, labels: object) -> None:
        """Remove what a failed start may have left; the failure itself is what the caller is told."""
        try:
            await self._remove_own(name, labels)
        except SandboxError as error:
            logger.warning("the failed start of %s may have left a container for the sweep: %s", name, error)

    async def attach(self, sandbox_id: str) -> Sandbox:
        try:
            async with self._engine.asked(f"inspect {sandbox_id}") as docker:
                found = await docker.containers.container(sandbox_id).show()
        except EngineError as error:
            if error.status == 404:
                raise SandboxLostError(f"sandbox {sandbox_id} is gone") from error
            raise
        config = found["Config"]
        if config["Labels"].get(docker_config.OWNER_LABEL) != self._deployment_id:
            raise SandboxLostError(f"container {sandbox_id} is not a sandbox of deployment {self._deployment_id}")
        if not found["State"]["Running"]:
            raise SandboxLostError(f"sandbox {sandbox_id} is {found['State']['Status']}")
        return CommandSandbox(DockerCarrier(self._engine, found["Id"]), workdir=config["WorkingDir"] or "/", start_seconds=0.0)

    async def images(self) -> frozenset[str]:
        return await self._images.references()

    async def list(self) -> Sequence[SandboxInfo]:
        label = f"{docker_config.OWNER_LABEL}={self._deployment_id}"
        async with self._engine.asked("list containers") as docker:
            found = await docker.containers.list(all=True, filters={"label": [label]})
        now = time.time()
        return [
            SandboxInfo(
                id=each["Id"],
                name=each["Labels"].get(docker_config.NAME_LABEL, each["Names"][0].lstrip("/")),
                labels=docker_config.callers_labels(each["Labels"]),
                age_s=max(0.0, now - each["Created"]),
                alive=each["State"] == "running",
            )
            for each in found
        ]

    async def sweep(self, *, keep: frozenset[str], older_than_s: float) -> int:
        doomed = [info for info in await self.list() if info.name not in keep and info.age_s >= older_than_s]
        results = await asyncio.gather(*(self._swept(info) for info in doomed))
        return sum(results)

    async def _swept(self, info: SandboxInfo) -> bool:
        try:
            async with self._starting:  # removals cost the engine about what starts do
                await to_the_end(DockerCarrier(self._engine, info.id).remove())
        except SandboxError as error:
            logger.warning("sweep left %s: %s", info.name, error)
            return False
        logger.info("sweep removed %s, %.0f s old", info.name, info.age_s)
        return True

    async def ping(self) -> None:
        async with self._engine.asked("answer") as docker:
            await docker.version()

    async def aclose(self) -> None:
        await self._images.aclose()
        await self._engine.aclose()


def _ours(labels: object) -> dict[str, str]:
    """The labels by which an owner is known: those an image brings are not."""
    found = labels if isinstance(labels, Mapping) else {}
    return {key: value for key, value in found.items() if key.split(".")[0] == docker_config.OWNER_LABEL}


def _start_error(name: str, error: EngineError) -> SandboxStartError:
    text = str(error).lower()
    if error.status == 400 or any(words in text for words in _SPEC_FAULTS):
        return SandboxSpecError(f"sandbox {name} can never start: {error}{_cure(text)}")
    return SandboxStartError(f"sandbox {name} did not start: {error}")


def _cure(refusal: str) -> str:
    """What to change in the spec, where the engine's refusal (in lower case) tells it."""
    if cpus := re.search(r"range of cpus is from [\d.]+ to ([\d.]*\d)", refusal):
        return f"; set sandbox.cpus to at most {cpus.group(1)}, or use a larger machine"
    if "runtime" in refusal and "unknown" in refusal:
        return "; leave sandbox.runtime at 'default', or install that runtime in the engine"
    if "executable file not found" in refusal or ("exec: " in refusal and "no such file or directory" in refusal):
        return "; an image must hold bash and tar"
    return ""
