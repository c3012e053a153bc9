"""Whether an engine's storage can bound the files of a container; asked once, by creating a container that is never started."""

import logging
import secrets

from sandboxes.docker_agent import LABEL, PROBE_NAME
from sandboxes.docker_engine import Engine, EngineError
from sandboxes.shielding import to_the_end

logger = logging.getLogger(__name__)

_PROBE_MIB = 16
QUOTA = "quota: the engine's storage bounds every sandbox's files to disk_mib"
WATCH = (
    "watch: the engine's storage has no quotas (XFS with pquota has); the agent kills what outgrows disk_mib, within a second or so, and "
    "read_only sandboxes write to sized tmpfs alone"
)


async def has_quota(engine: Engine, image: str) -> bool:
    """Whether `StorageOpt size` is taken. `image`: one that the engine has.

    Raises:
        EngineError: the engine did not answer. A refusal is an answer.
    """
    return await to_the_end(_probed(engine, image))


async def _probed(engine: Engine, image: str) -> bool:
    host_config = {"StorageOpt": {"size": f"{_PROBE_MIB}m"}, "NetworkMode": "none"}
    body = {"Image": image, "Cmd": ["none"], "Labels": {LABEL: "probe"}, "HostConfig": host_config}
    name = f"{PROBE_NAME}-{secrets.token_hex(6)}"
    try:
        made = await engine.call("probe for quotas", "POST", "containers/create", params={"name": name}, body=body)
    except EngineError as error:
        if error.status == 0:
            raise
        logger.info("no quotas, disk_mib is watched by the agents: %s", error)
        return False
    try:
        await engine.call("remove the probe", "DELETE", f"containers/{made['Id']}", params={"force": "true"})
    except EngineError as error:
        if error.status not in (404, 409):  # somebody else cleans up
            raise
    return True
