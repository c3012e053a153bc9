"""The containers of a deployment: made under a name that is known before, found again, and removed only when they are ours.

What must always hold: whatever happens to a request to create, a container that came of it has the name that was asked for, so it is found
and removed by that name; nothing that carries another deployment's label is touched.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sandboxes import docker_config
from sandboxes.base import SandboxError, SandboxInfo, SandboxStartError
from sandboxes.docker_engine import Engine, EngineError
from sandboxes.docker_line import DockerLine
from sandboxes.shielding import to_the_end

logger = logging.getLogger(__name__)

_LOOKS = 4
_LOOK_PAUSE_S = 0.5
"""An engine may still be making what it was asked for on a connection that is gone by now."""


class Containers:
    def __init__(self, engine: Engine, *, deployment_id: str) -> None:
        self._engine = engine
        self._deployment_id = deployment_id

    def line(self, container_id: str) -> DockerLine:
        return DockerLine(self._engine, container_id, deployment_id=self._deployment_id)

    async def create(self, config: Mapping[str, Any], name: str) -> DockerLine:
        """Make a container. The holder of its name is removed first where it is ours: its answer was lost.

        The request is seen to its end before a cancellation leaves, so that whoever cleans up finds what came of it.

        Raises:
            EngineError: the engine refused. With status 0 it may have made it.
            SandboxStartError: the name is another owner's.
        """
        try:
            return await to_the_end(self._created(config, name))
        except EngineError as error:
            if error.status != 409:
                raise
        await self.remove_own(name, config["Labels"])
        return await to_the_end(self._created(config, name))

    async def _created(self, config: Mapping[str, Any], name: str) -> DockerLine:
        made = await self._engine.call(f"create {name}", "POST", "containers/create", params={"name": name}, body=dict(config))
        return self.line(str(made["Id"]))

    async def find(self, id_or_name: str) -> dict[str, Any] | None:
        """What the engine knows of it; None where there is none."""
        try:
            found = await self._engine.call(f"inspect {id_or_name}", "GET", f"containers/{id_or_name}/json")
        except EngineError as error:
            if error.status == 404:
                return None
            raise
        return dict(found)

    def is_ours(self, found: Mapping[str, Any]) -> bool:
        return _labels(found).get(docker_config.OWNER_LABEL) == self._deployment_id

    async def remove_own(self, name: str, labels: Mapping[str, str]) -> bool:
        """Remove the holder of a name; whether there was one.

        Raises:
            SandboxStartError: it is somebody else's.
        """
        found = await self.find(name)
        if found is None:
            return False
        if not self._same_owner(found, name, labels):
            raise SandboxStartError(f"the name {name} is taken by a container of another owner: it is left alone")
        await self.line(found["Id"]).remove()
        return True

    def _same_owner(self, found: Mapping[str, Any], name: str, labels: Mapping[str, str]) -> bool:
        """A container of a pool was renamed when it was claimed: its labels are the pool's, and the name says whose it is."""
        if not self.is_ours(found):
            return False
        there = _labels(found)
        renamed = there.get(docker_config.NAME_LABEL) != name
        return renamed or docker_config.callers_labels(there) == docker_config.callers_labels(labels)

    async def rename(self, line: DockerLine, name: str, labels: Mapping[str, str]) -> None:
        """Give it a name; who has that already is removed where it is ours.

        Raises:
            EngineError: the engine refused.
            SandboxStartError: the name is another owner's.
        """
        try:
            await line.rename(name)
            return
        except EngineError as error:
            if error.status != 409:
                raise
        await self.remove_own(name, labels)
        await line.rename(name)

    async def discard(self, name: str, labels: Mapping[str, str], *, unknown: bool) -> None:
        """Remove what a failed start may have left; the failure itself is what the caller is told. `unknown`: whether it was made."""
        try:
            for look in range(_LOOKS if unknown else 1):
                if look:
                    await asyncio.sleep(_LOOK_PAUSE_S)
                if await self.remove_own(name, labels):
                    return
        except SandboxStartError as error:
            logger.debug("nothing of ours came to be: %s", error)
        except SandboxError as error:
            logger.warning("the failed start of %s may have left a container for the sweep: %s", name, error)

    async def list(self) -> Sequence[SandboxInfo]:
        """Names are the engine's own: a claim renames."""
        filters = json.dumps({"label": [f"{docker_config.OWNER_LABEL}={self._deployment_id}"]})
        found = await self._engine.call("list containers", "GET", "containers/json", params={"all": "1", "filters": filters})
        now = time.time()
        return [
            SandboxInfo(
                id=each["Id"],
                name=(each["Names"] or [each["Id"]])[0].lstrip("/"),
                labels=docker_config.callers_labels(each["Labels"]),
                age_s=max(0.0, now - each["Created"]),
                alive=each["State"] == "running",
            )
            for each in found
        ]


def _labels(found: Mapping[str, Any]) -> Mapping[str, str]:
    return found["Config"]["Labels"] or {}
