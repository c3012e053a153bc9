"""The agent's programs as they are shipped, one for each machine. Made by `deploy/agent-build` from `sandboxes/agent/`."""

import hashlib
from functools import cache
from pathlib import Path

from sandboxes.base import SandboxError

_DIRECTORY = Path(__file__).with_name("agent") / "bin"
_MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
"""As kernels and as container engines call them."""


def path(machine: str) -> Path:
    """The agent for a machine, named as `platform.machine()` or an engine's `Architecture` does.

    Raises:
        SandboxError: there is none for it.
    """
    known = _MACHINES.get(machine.lower())
    if known is None:
        raise SandboxError(f"no agent for machine {machine!r}: there are some for {', '.join(sorted(set(_MACHINES.values())))}")
    return _DIRECTORY / f"agent-{known}"


@cache
def digest(machine: str) -> str:
    """SHA-256 of that program in hex: names what was made from it."""
    return hashlib.sha256(path(machine).read_bytes()).hexdigest()
