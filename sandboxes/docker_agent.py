"""What an engine needs once for all sandboxes: the agent in a volume, and the container whose network namespace they start in.

Made at the first start, by whichever worker comes first, and made again when somebody removes it. It belongs to the engine and not to a
deployment: several may use it, and their sweeps leave it alone. Its names hold a digest of the agent, so that two versions of us never
meet in one.
"""

import asyncio
import io
import json
import logging
import math
import re
import tarfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sandboxes import agent_binary
from sandboxes.base import SandboxError
from sandboxes.docker_config import AGENT_DIRECTORY, AGENT_PATH, HOSTNAME, OWNER_LABEL
from sandboxes.docker_engine import Engine, EngineError

logger = logging.getLogger(__name__)

LABEL = "rollway.agent"
_LABELLED = {"filters": json.dumps({"label": [LABEL]})}
_NAME = "rollway-agent"
_VOLUME = re.compile(rf"{_NAME}-([0-9a-f]{{12}})")
_PAUSE_NAME = "rollway-pause"
PROBE_NAME = "rollway-probe"
OLDER_S = 3600.0
"""What another version of us made longer ago than this, and nothing uses, was left by an upgrade. One that still lives makes it again."""
_TRIES = 20
_PAUSE_S = 0.1
"""Another worker, that makes the same things at this moment, is done within `_TRIES` of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Names on the engine."""

    image: str
    volume: str
    pause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agent:
    """The program for the engine's processor. `digest`: the first 12 hexadecimal digits of its SHA-256."""

    digest: str
    content: bytes

    @classmethod
    def of(cls, machine: str) -> "_Agent":
        return cls(digest=agent_binary.digest(machine)[:12], content=agent_binary.path(machine).read_bytes())


class EngineAgent:
    """The agent on one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._making = asyncio.Lock()
        self._agent: _Agent | None = None
        self._ready = False

    async def ensure(self) -> Shared:
        """See that they are there and the pause container runs; asked from the engine once.

        Raises:
            SandboxError: the engine refused, or there is no agent for its processor.
        """
        async with self._making:
            if self._agent is None:
                version = await self._engine.call("tell its version", "GET", "version")
                self._agent = await asyncio.to_thread(_Agent.of, str(version["Arch"]))
            if not self._ready:
                await self._make(self._agent)
                self._ready = True
            return _shared(self._agent)

    def doubt(self) -> None:
        """Look again at the next start: one failed as it does when these things are gone."""
        self._ready = False

    async def remove_shared(self) -> None:
        """Remove them, of every version, as far as no sandbox of any deployment has that version's agent."""
        self._ready = False
        await self._remove_unused(await self._ages_s())

    async def remove_older(self, *, older_than_s: float = OLDER_S) -> None:
        """The same, of other versions than ours only, and only what is older: somebody may be about to start in it."""
        if self._agent is None:
            return  # not known yet what is ours
        ages_s = await self._ages_s()
        await self._remove_unused({digest for digest, age_s in ages_s.items() if age_s >= older_than_s} - {self._agent.digest})

    async def _ages_s(self) -> dict[str, float]:
        """The versions that are there, by their digests: how old what was made last of each is."""
        now, ages_s = time.time(), dict[str, float]()
        for digest, volume in (await self._volumes()).items():
            ages_s[digest] = now - datetime.fromisoformat(volume["CreatedAt"]).timestamp()
        for each in await self._images():
            digest = each["Labels"][LABEL]
            ages_s[digest] = min(now - each["Created"], ages_s.get(digest, math.inf))
        return ages_s

    async def _remove_unused(self, digests: Collection[str]) -> None:
        if not digests:
            return
        used = {mount.get("Name") for each in await self._containers(OWNER_LABEL) for mount in each["Mounts"]}
        unused = {digest for digest in digests if f"{_NAME}-{digest}" not in used}
        for each in await self._containers(LABEL):
            name = each["Names"][0] if each["Names"] else ""
            pause = name.startswith(f"/{_PAUSE_NAME}-") and each["Labels"][LABEL] in unused
            if pause or name.startswith(f"/{PROBE_NAME}-"):
                await self._removed(f"containers/{each['Id']}", force="1")
        for digest in (await self._volumes()).keys() & unused:
            await self._removed(f"volumes/{_NAME}-{digest}")
        for each in await self._images():
            if each["Labels"][LABEL] in unused:
                await self._removed(f"images/{each['Id']}", force="1")

    async def _volumes(self) -> dict[str, Any]:
        """By digest. By their names, since one that the engine made for a container that asked for it has no label."""
        params = {"filters": json.dumps({"name": [f"{_NAME}-"]})}
        found = (await self._engine.call("list volumes", "GET", "volumes", params=params))["Volumes"] or ()
        return {match[1]: each for each in found if (match := _VOLUME.fullmatch(each["Name"]))}

    async def _images(self) -> Sequence[Any]:
        found: Sequence[Any] = await self._engine.call("list images", "GET", "images/json", params=_LABELLED)
        return found

    async def _containers(self, label: str) -> Any:
        """Every container that carries it, of whichever deployment."""
        params = {"all": "1", "filters": json.dumps({"label": [label]})}
        return await self._engine.call("list containers", "GET", "containers/json", params=params)

    async def _removed(self, path: str, **params: str) -> None:
        try:
            await self._engine.call(f"remove {path}", "DELETE", path, params=params)
        except EngineError as error:
            if error.status not in (404, 409):
                raise
            logger.info("%s stays: %s", path, error)

    async def _make(self, agent: _Agent) -> None:
        pause = _shared(agent).pause
        for _ in range(_TRIES):
            try:
                await self._engine.call(f"start {pause}", "POST", f"containers/{pause}/start")
                return
            except EngineError as error:
                if error.status not in (404, 409):
                    raise
                if error.status == 404 and await self._created(agent):
                    continue
            await asyncio.sleep(_PAUSE_S)
        raise SandboxError(f"{pause} could not be made on the engine: remove it there (docker rm -f {pause}), it is made anew")

    async def _created(self, agent: _Agent) -> bool:
        """Make the pause container; its creation fills the volume from the image. False where another worker is at it."""
        shared = _shared(agent)
        volume = {"Name": shared.volume, "Labels": {LABEL: agent.digest}}
        await self._engine.call(f"create volume {shared.volume}", "POST", "volumes/create", body=volume)
        try:
            params = {"name": shared.pause}
            await self._engine.call(f"create {shared.pause}", "POST", "containers/create", params=params, body=_pause_config(shared))
        except EngineError as error:
            if error.status == 404:
                await self._import(agent)
                return True
            if error.status == 409:
                return False
            raise
        logger.info("made %s on the engine", shared.pause)
        return True

    async def _import(self, agent: _Agent) -> None:
        params = {"fromSrc": "-", "repo": _NAME, "tag": agent.digest, "changes": f"LABEL {LABEL}={agent.digest}"}
        async with self._engine.asked("import the agent") as docker:
            headers = {"Content-Type": "application/x-tar"}
            async with docker._query("images/create", "POST", params=params, data=_archive(agent), headers=headers) as response:
                said = await response.text()
        if '"error"' in said:
            raise EngineError(f"the engine could not import the agent: {said.strip()[-500:]}", status=0)


def _archive(agent: _Agent) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        folder = tarfile.TarInfo(AGENT_DIRECTORY.lstrip("/"))
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        entry = tarfile.TarInfo(AGENT_PATH.lstrip("/"))
        entry.mode, entry.size = 0o755, len(agent.content)
        tar.addfile(entry, io.BytesIO(agent.content))
    return packed.getvalue()


def _shared(agent: _Agent) -> Shared:
    digest = agent.digest
    return Shared(image=f"{_NAME}:{digest}", volume=f"{_NAME}-{digest}", pause=f"{_PAUSE_NAME}-{digest}")


def _pause_config(shared: Shared) -> dict[str, Any]:
    return {
        "Image": shared.image,
        "Entrypoint": [AGENT_PATH],
        "Cmd": ["--pause"],
        "User": "65534:65534",
        "Hostname": HOSTNAME,
        "HostConfig": {
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "ReadonlyRootfs": True,
            "PidsLimit": 8,
            "Memory": 16 * 2**20,
            "LogConfig": {"Type": "none"},
            "Mounts": [{"Type": "volume", "Source": shared.volume, "Target": AGENT_DIRECTORY, "ReadOnly": True}],
        },
    }
