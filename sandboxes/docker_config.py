"""A container's configuration from a spec: pure. Everything that keeps a command inside is set here, or by the agent that it starts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandboxes.base import DEFAULT_ENV, INODES_PER_MIB, SandboxSpec, SandboxSpecError

OWNER_LABEL = "rollway"
LABEL_PREFIX = "rollway."
NAME_LABEL = "rollway.sandbox"
EXPIRES_LABEL = "rollway.expires"
"""On a snapshot: unix time in whole seconds."""
_OURS_ALONE = frozenset({NAME_LABEL, EXPIRES_LABEL})

AGENT_DIRECTORY = "/.rollway"
AGENT_PATH = "/.rollway/agent"
HOSTNAME = "sandbox"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{1,200}")
_MIB = 2**20
_SHM_MIB = 64
_SCRATCH = ("/tmp", "/var/tmp", "/run", "/root")
"""Writable in a sandbox with a read-only root, beside its working directory."""
_AGENT_TASKS = 2
"""Itself and its disk watch."""
_IMAGE_MAY_SET = frozenset({"PATH", "LANG", "HOME"})
"""Where the image's own value is the better default: its programs may lie elsewhere."""

_AGENT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID")
"""For files and calls of any user. What the agent runs holds none of them, but for root where the spec says so (not SETPCAP)."""
_NETWORK_CAPABILITIES = ("NET_ADMIN", "SYS_ADMIN")
"""For an own network namespace. The agent gives them up before it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What an image says about whatever is started from it. `user` is empty for root; `volumes` are paths that it wants mounted."""

    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the engine offers to a sandbox.

    `agent_volume` holds the agent. `pause`: the container whose network namespace a sandbox starts in, to leave it at once; None where
    the engine allows no such thing, and each sandbox gets a namespace from the engine. `quota`: its storage bounds a container's files.
    """

    agent_volume: str
    pause: str | None
    quota: bool


def checked(spec: SandboxSpec, name: str) -> None:
    """Refuse what the engine would refuse later, or what would open the sandbox.

    Raises:
        SandboxSpecError: with the field and the cure.
    """
    if not valid_name(name):
        raise SandboxSpecError(f"name {name!r}: use letters, digits and _.-, at least two, beginning with a letter or digit")
    if spec.network not in ("none", "open"):
        raise SandboxSpecError(f"network {spec.network!r}: use 'none' or 'open'")
    if spec.capabilities not in ("none", "root"):
        raise SandboxSpecError(f"capabilities {spec.capabilities!r}: use 'none' or 'root'")
    if not spec.workdir.startswith("/") or "\0" in spec.workdir or ":" in spec.workdir:
        raise SandboxSpecError(f"workdir {spec.workdir!r} must be absolute, without ':'")
    if spec.workdir == "/" and spec.read_only:
        raise SandboxSpecError("workdir '/' cannot be writable where read_only is set: name a directory below it")
    if spec.memory_mib < 16 or spec.pids < 4 or spec.cpus <= 0 or spec.disk_mib < 1:
        raise SandboxSpecError("limits are too small: memory_mib >= 16, pids >= 4, cpus > 0, disk_mib >= 1")
    if (spec.user or "").startswith("-"):
        raise SandboxSpecError(f"user {spec.user!r}: a name, or uid[:gid]")


def valid_name(name: str) -> bool:
    """Whether the engine, and a file system, takes it as a name."""
    return _NAME.fullmatch(name) is not None


def container_labels(spec: SandboxSpec, *, name: str, deployment_id: str, image: ImageFacts) -> dict[str, str]:
    """Ours, and the caller's under `rollway.`. What the image brings under our prefix (a snapshot does) is made empty: it is not ours."""
    return {
        **{key: "" for key in image.labels if key.startswith(LABEL_PREFIX)},
        **{LABEL_PREFIX + key: value for key, value in spec.labels.items()},
        OWNER_LABEL: deployment_id,
        NAME_LABEL: name,
    }


def callers_labels(found: Mapping[str, str]) -> dict[str, str]:
    """The caller's part of a container's labels."""
    return {
        key.removeprefix(LABEL_PREFIX): value
        for key, value in found.items()
        if key.startswith(LABEL_PREFIX) and key not in _OURS_ALONE and value
    }


def joins_pause(spec: SandboxSpec, host: Host) -> bool:
    """Whether the sandbox starts in the pause container's network, and its agent makes an own one."""
    return host.pause is not None and spec.network == "none" and spec.runtime != "runsc"


def container(spec: SandboxSpec, *, name: str, deployment_id: str, image: ImageFacts, host: Host) -> dict[str, Any]:
    """The body of `POST /containers/create`. `spec.env`, `user` and `workdir` are not in it: the agent is told them, at a claim too."""
    defaults = {key: value for key, value in DEFAULT_ENV.items() if not (key in _IMAGE_MAY_SET and key in image.env)}
    joins = joins_pause(spec, host)
    return {
        "Image": spec.image,
        "Entrypoint": [AGENT_PATH],
        "Cmd": [*(["--own-network"] if joins else ()), *(["--root-capabilities"] if spec.capabilities == "root" else ())],
        "User": "0:0",
        "WorkingDir": "/",
        "Env": [f"{key}={value}" for key, value in defaults.items()],
        **({} if joins else {"Hostname": HOSTNAME}),  # whoever joins has the pause container's, which is the same
        "Labels": container_labels(spec, name=name, deployment_id=deployment_id, image=image),
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": False,  # attachers come and go
        "Tty": False,
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host_config(spec, image, host, joins=joins),
    }


def _host_config(spec: SandboxSpec, image: ImageFacts, host: Host, *, joins: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "NetworkMode": f"container:{host.pause}" if joins else {"open": "bridge"}.get(spec.network, "none"),
        "CapDrop": ["ALL"],
        "CapAdd": [*_AGENT_CAPABILITIES, *(_NETWORK_CAPABILITIES if joins else ())],
        "SecurityOpt": ["no-new-privileges"],  # and the engine's default seccomp profile
        "PidsLimit": spec.pids + _AGENT_TASKS,
        "Memory": spec.memory_mib * _MIB,
        "MemorySwap": spec.memory_mib * _MIB,  # memory and swap together: no swap
        "NanoCpus": int(spec.cpus * 1e9),
        "Ulimits": [
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "fsize", "Soft": spec.disk_mib * _MIB, "Hard": spec.disk_mib * _MIB},
        ],
        "Mounts": [agent_mount(host.agent_volume)],
        "Tmpfs": _tmpfs(spec, image),
        "ReadonlyRootfs": spec.read_only,
        "LogConfig": {"Type": "none"},
        "RestartPolicy": {"Name": "no"},
        "IpcMode": "none",  # an own namespace, and no /dev/shm but ours, whose files are bounded in number too
        "AutoRemove": False,
    }
    if host.quota and not spec.read_only:
        config["StorageOpt"] = {"size": f"{spec.disk_mib}m"}
    if spec.runtime != "default":
        config["Runtime"] = spec.runtime
    return config


def agent_mount(volume: str) -> dict[str, Any]:
    """The agent, read-only. Not filled from the image: what an image holds at that path must never reach a volume that others use."""
    return {"Type": "volume", "Source": volume, "Target": AGENT_DIRECTORY, "ReadOnly": True, "VolumeOptions": {"NoCopy": True}}


def _tmpfs(spec: SandboxSpec, image: ImageFacts) -> dict[str, str]:
    """What they hold is memory of the sandbox: each is bounded by `disk_mib` and by half of `memory_mib`, so that a full one leaves room
    for the command that empties it.

    A volume of the image becomes one too, and is empty: one of the engine's would lie on its disk without any bound.
    """
    most_mib = max(1, min(spec.disk_mib, spec.memory_mib // 2))
    shm_mib = min(_SHM_MIB, most_mib)
    mounts = {"/dev/shm": f"rw,nosuid,nodev,noexec,{_bounds(shm_mib)},mode=1777"}
    scratch = (*_SCRATCH, spec.workdir) if spec.read_only else ()
    for path in (*image.volumes, *scratch):
        mode = "0700" if path == "/root" else "0755" if path == "/run" else "1777"
        mounts[path] = f"rw,nosuid,nodev,exec,{_bounds(most_mib)},mode={mode}"
    mounts.pop(AGENT_DIRECTORY, None)
    return mounts


def _bounds(mib: int) -> str:
    return f"size={mib}m,nr_inodes={mib * INODES_PER_MIB}"
