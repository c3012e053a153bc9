"""Snapshots: images of a sandbox's files, with an end that the sweep keeps to."""

import json
import logging
import secrets
import time

from sandboxes import docker_config
from sandboxes.base import SandboxError
from sandboxes.docker_engine import Engine, EngineError

logger = logging.getLogger(__name__)

REPOSITORY = "rollway-snapshot"
SNAPSHOT_S = 300.0
"""Budget of one snapshot: the engine copies whatever the sandbox wrote."""

_FORGOTTEN = "forgotten-"
"""Begins the tag of a snapshot that was forgotten while a sandbox made from it still runs; the sweep takes it then."""


class Snapshots:
    """The snapshots of one deployment on one engine."""

    def __init__(self, engine: Engine, *, deployment_id: str) -> None:
        self._engine = engine
        self._deployment_id = deployment_id

    async def take(self, container_id: str, *, ttl_s: float) -> str:
        """An image of a container's files, taken while its processes stand still, with the user of the image that it was made from."""
        tag = secrets.token_hex(12)
        body = {
            "User": await self._image_user(container_id),
            "Labels": {docker_config.OWNER_LABEL: self._deployment_id, docker_config.EXPIRES_LABEL: str(int(time.time() + ttl_s))},
        }
        params = {"container": container_id, "repo": REPOSITORY, "tag": tag, "pause": "1"}
        what = f"take a snapshot of {container_id[:12]}"
        await self._engine.call(what, "POST", "commit", params=params, body=body, within_s=SNAPSHOT_S)
        return f"{REPOSITORY}:{tag}"

    async def _image_user(self, container_id: str) -> str:
        found = await self._engine.call(f"inspect {container_id[:12]}", "GET", f"containers/{container_id}/json")
        image = await self._engine.call("inspect its image", "GET", f"images/{found['Image']}/json")
        return str(image["Config"]["User"] or "0:0")

    def owns(self, reference: str, labels: object) -> bool:
        """Whether an image of this name, with these labels, is a snapshot of the deployment."""
        mine = isinstance(labels, dict) and labels.get(docker_config.OWNER_LABEL) == self._deployment_id
        return mine and reference.startswith(f"{REPOSITORY}:")

    async def forget(self, reference: str) -> None:
        """Remove one. While a sandbox made from it runs, it loses its name only, and the sweep removes it later."""
        try:
            await self._engine.call(f"remove {reference}", "DELETE", f"images/{reference}")
        except EngineError as error:
            if error.status == 404:
                return
            if error.status != 409:
                raise
            tag = _FORGOTTEN + reference.rpartition(":")[2]
            await self._engine.call(f"rename {reference}", "POST", f"images/{reference}/tag", params={"repo": REPOSITORY, "tag": tag})
            await self._engine.call(f"remove {reference}", "DELETE", f"images/{reference}")

    async def sweep(self, *, past_only: bool = True) -> None:
        """Remove those past their time, and those that were forgotten; all, without `past_only`."""
        filters = json.dumps({"label": [f"{docker_config.OWNER_LABEL}={self._deployment_id}"]})
        for each in await self._engine.call("list snapshots", "GET", "images/json", params={"filters": filters}):
            expires = (each["Labels"] or {}).get(docker_config.EXPIRES_LABEL, "")
            if not expires.isdigit():
                continue
            for reference in each["RepoTags"] or ():
                past = time.time() >= int(expires) or reference.startswith(f"{REPOSITORY}:{_FORGOTTEN}")
                if (past or not past_only) and reference.startswith(f"{REPOSITORY}:"):
                    await self._swept(reference)

    async def _swept(self, reference: str) -> None:
        try:
            await self._engine.call(f"remove {reference}", "DELETE", f"images/{reference}")
            logger.info("sweep removed snapshot %s", reference)
        except SandboxError as error:
            logger.info("snapshot %s stays: %s", reference, error)
