"""A container's configuration from a spec: pure. Everything that keeps a command inside is set here."""

import re
from collections.abc import Mapping
from typing import Any

from sandboxes.base import DEFAULT_ENV, SandboxSpec, SandboxSpecError
from sandboxes.guest import BOOT, STATE_DIRECTORY, STATE_MIB

OWNER_LABEL = "rollway"
LABEL_PREFIX = "rollway."
NAME_LABEL = "rollway.sandbox"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{1,200}")
_MIB = 2**20
_SHM_BYTES = 64 * _MIB
_IMAGE_MAY_SET = frozenset({"PATH", "LANG", "HOME"})
"""Where the image's own value is the better default: its programs may lie elsewhere."""


def checked(spec: SandboxSpec, name: str) -> None:
    """Refuse what the engine would refuse later, or what would open the sandbox.

    Raises:
        SandboxSpecError: with the field and the cure.
    """
    if not valid_name(name):
        raise SandboxSpecError(f"name {name!r}: use letters, digits and _.-, at least two, beginning with a letter or digit")
    if spec.network == "host" or ":" in spec.network:
        raise SandboxSpecError(f"network {spec.network!r} would join the sandbox to something outside: use 'none' or 'bridge'")
    if not spec.workdir.startswith("/"):
        raise SandboxSpecError(f"workdir {spec.workdir!r} must be absolute")
    if spec.memory_mib < 16 or spec.pids < 4 or spec.cpus <= 0 or spec.disk_mib < 1:
        raise SandboxSpecError("limits are too small: memory_mib >= 16, pids >= 4, cpus > 0, disk_mib >= 1")


def valid_name(name: str) -> bool:
    """Whether the engine, and a file system, takes it as a name."""
    return _NAME.fullmatch(name) is not None


def labels(spec: SandboxSpec, *, name: str, deployment_id: str) -> dict[str, str]:
    """Ours, and the caller's under `rollway.`."""
    return {
        **{LABEL_PREFIX + key: value for key, value in spec.labels.items()},
        OWNER_LABEL: deployment_id,
        NAME_LABEL: name,
    }


def callers_labels(found: Mapping[str, str]) -> dict[str, str]:
    """The caller's part of a container's labels."""
    return {key.removeprefix(LABEL_PREFIX): value for key, value in found.items() if key.startswith(LABEL_PREFIX) and key != NAME_LABEL}


def container(spec: SandboxSpec, *, name: str, deployment_id: str, image_env: Mapping[str, str]) -> dict[str, Any]:
    """The body of `POST /containers/create`."""
    defaults = {key: value for key, value in DEFAULT_ENV.items() if not (key in _IMAGE_MAY_SET and key in image_env)}
    return {
        "Image": spec.image,
        "Entrypoint": ["bash", "-c", BOOT, "rollway-init"],
        "Cmd": [],
        "User": "0:0",  # root without a single capability: files of the image stay writable, nothing else does
        "WorkingDir": spec.workdir,
        "Env": [f"{key}={value}" for key, value in {**defaults, **spec.env}.items()],
        "Hostname": "sandbox",
        "Labels": labels(spec, name=name, deployment_id=deployment_id),
        "OpenStdin": True,
        "StdinOnce": False,  # requests to the first process come over connections that end
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host_config(spec),
    }


def _host_config(spec: SandboxSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "NetworkMode": spec.network,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],  # and the engine's default seccomp profile
        "PidsLimit": spec.pids,
        "Memory": spec.memory_mib * _MIB,
        "MemorySwap": spec.memory_mib * _MIB,  # memory and swap together: no swap
        "NanoCpus": int(spec.cpus * 1e9),
        "ShmSize": _SHM_BYTES,
        "Ulimits": [
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "fsize", "Soft": spec.disk_mib * _MIB, "Hard": spec.disk_mib * _MIB},
        ],
        "Tmpfs": {STATE_DIRECTORY: f"rw,nosuid,nodev,noexec,size={STATE_MIB}m,mode=0700"},
        "LogConfig": {"Type": "none"},
        "RestartPolicy": {"Name": "no"},
        "IpcMode": "private",
        "AutoRemove": False,
    }
    if spec.read_only:
        config["ReadonlyRootfs"] = True
        for path in (spec.workdir, "/tmp", "/root"):
            config["Tmpfs"][path] = f"rw,nosuid,nodev,exec,size={spec.disk_mib}m,mode=0755"
        config["Tmpfs"]["/tmp"] = f"rw,nosuid,nodev,exec,size={spec.disk_mib}m,mode=1777"
    if spec.runtime != "default":
        config["Runtime"] = spec.runtime
    return config
