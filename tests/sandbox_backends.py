"""The sandbox backends under test, and short words for what their tests do most."""

import os
import shutil
import subprocess
import uuid
from pathlib import Path

from sandboxes.base import ExecResult, Sandbox, SandboxSpec
from sandboxes.docker import DockerBackend
from sandboxes.process import ProcessBackend

IMAGE = "rollway-sandbox:1"
DEPLOYMENT = f"test-{uuid.uuid4().hex[:8]}"
CAP = 65_536
HAVE_USERS = frozenset({"docker"})
"""Backends whose sandboxes have other users than root."""
HAVE_SNAPSHOTS = frozenset({"docker"})
PROCESSES = "for p in /proc/[0-9]*; do tr '\\000' ' ' < $p/cmdline 2>/dev/null; echo; done"


def docker_host() -> str | None:
    return os.environ.get("ROLLWAY_DOCKER_HOST") or os.environ.get("DOCKER_HOST")


def has_engine() -> bool:
    """Asked once, through the command line client, with the image that the tests use."""
    if shutil.which("docker") is None:
        return False
    env = {**os.environ, **({"DOCKER_HOST": host} if (host := docker_host()) else {})}
    return subprocess.run(["docker", "image", "inspect", IMAGE], env=env, capture_output=True, check=False).returncode == 0


def has_namespaces() -> bool:
    """Root, and a kernel that lets it make namespaces."""
    tools = all(shutil.which(tool) for tool in ("unshare", "setpriv", "pivot_root"))
    tried = ["unshare", "--mount", "--pid", "--net", "--fork", "true"]
    return os.geteuid() == 0 and tools and subprocess.run(tried, capture_output=True, check=False).returncode == 0


def make(kind: str, root: Path, *, answer_s: float = 30.0, deployment_id: str = DEPLOYMENT) -> DockerBackend | ProcessBackend:
    if kind == "docker":
        return DockerBackend(deployment_id=deployment_id, docker_host=docker_host(), answer_s=answer_s)
    return ProcessBackend(deployment_id=deployment_id, root=root, answer_s=answer_s)


def spec(**changes: object) -> SandboxSpec:
    fields: dict[str, object] = {"image": IMAGE, "labels": {"owner": "a"}, "pids": 128, "memory_mib": 128, "disk_mib": 64, "start_s": 30.0}
    return SandboxSpec(**{**fields, **changes})  # type: ignore[arg-type]


def named() -> str:
    return f"own-{uuid.uuid4().hex[:8]}"


async def bash(
    sandbox: Sandbox,
    script: str,
    *,
    timeout_s: float = 20,
    cap: int = CAP,
    session: str | None = None,
    user: str | None = None,
    call_id: str | None = None,
    shell: str = "bash",
) -> ExecResult:
    return await sandbox.exec([shell, "-c", script], timeout_s=timeout_s, max_output_bytes=cap, session=session, user=user, call_id=call_id)


async def count(sandbox: Sandbox, pattern: str) -> int:
    """How many processes in the sandbox have a command line that matches."""
    return int((await bash(sandbox, f"{PROCESSES} | grep -c '{pattern}' || true")).stdout)
