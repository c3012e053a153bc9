"""The directory of a process sandbox: what another process needs to find it again.

box.json   name, nonce, labels, limits, environment     pid    the first process, as the machine numbers it
in, out    pipes to and from the first process          root/  its file system
"""

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sandboxes.base import SandboxLostError

_FIRST_UID = 0x10000000
_UIDS = 0x20000000
"""Far above every account and below 2^31. Each sandbox has an id of its own, so that one cannot touch another's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One sandbox on disk. `id` names this very one: a later sandbox of the same name has another nonce."""

    name: str
    nonce: str
    deployment_id: str
    created: float
    workdir: str
    disk_mib: int
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.name}@{self.nonce}"

    @property
    def key(self) -> str:
        """Its name on this machine, whose control groups all deployments share."""
        return f"{self.deployment_id}--{self.name}"

    @property
    def uid(self) -> int:
        return _FIRST_UID + zlib.crc32(self.key.encode()) % _UIDS

    def write(self, directory: Path) -> None:
        (directory / "box.json").write_text(json.dumps(asdict(self)))


def read_box(directory: Path) -> Box | None:
    """None for a directory that was not finished, or is being removed."""
    try:
        return Box(**json.loads((directory / "box.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def first_process(directory: Path) -> int | None:
    """The pid of the live first process; None when it is dead or another process has its number."""
    try:
        pid, birth = (directory / "pid").read_text().split()
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return int(pid) if stat[0] != "Z" and stat[19] == birth else None


def exists(pid: int) -> bool:
    """Whether a process of that number is there and not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def started(directory: Path) -> bool:
    """Whether the start script said who it is."""
    return (directory / "pid").exists()


def remember_birth(directory: Path) -> None:
    """Add the first process's start time to its pid, so that a reused number is not taken for it.

    Raises:
        SandboxLostError: it is dead already.
    """
    try:
        pid = (directory / "pid").read_text().split()[0]
        birth = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError) as error:
        raise SandboxLostError(f"the first process ended: {last_words(directory)}") from error
    (directory / "pid.new").write_text(f"{pid} {birth}\n")
    os.replace(directory / "pid.new", directory / "pid")


def last_words(directory: Path) -> str:
    """What the start script said."""
    try:
        return (directory / "log").read_text()[-500:].strip()
    except OSError:
        return "no log"
