"""The directory of a process sandbox, called by its name: what another process needs to find it again.

box.json     id, labels, age                    pid    the first process, as the machine numbers it
agent.sock   where its first process listens    root/  its file system              log    what it complained of
agent        the program of the first process   doomed is there while the sandbox is removed
"""

import json
import os
import socket
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

_FIRST_UID = 0x10000000
_UIDS = 0x20000000
"""Far above every account and below 2^31. Each sandbox has an id of its own, so that one cannot touch another's files."""
_WAITING_ATTACHERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One sandbox on disk. `id` names this very one: a later sandbox of the same name has another."""

    id: str
    deployment_id: str
    created: float
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its name on this machine, whose control groups all deployments share."""
        return f"{self.deployment_id}--{self.id}"

    @property
    def uid(self) -> int:
        return _FIRST_UID + zlib.crc32(self.key.encode()) % _UIDS

    def write(self, directory: Path) -> None:
        (directory / "box.json.new").write_text(json.dumps(asdict(self)))
        os.replace(directory / "box.json.new", directory / "box.json")


def read_box(directory: Path) -> Box | None:
    """None for a directory that was not finished, or is being removed."""
    try:
        return Box(**json.loads((directory / "box.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def boxes(root: Path) -> Sequence[tuple[Path, Box]]:
    """All sandboxes below `root`."""
    found = [(directory, read_box(directory)) for directory in root.glob("*")]
    return [(directory, box) for directory, box in found if box is not None]


def find(root: Path, sandbox_id: str) -> tuple[Path, Box] | None:
    """The sandbox of that id, whatever it is called by now."""
    return next((each for each in boxes(root) if each[1].id == sandbox_id), None)


@contextmanager
def socket_path(directory: Path) -> Iterator[str]:
    """Its address by way of an open directory: a path of any length does not fit into a socket's address."""
    held = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{held}/agent.sock"
    finally:
        os.close(held)


def listening(directory: Path) -> socket.socket:
    """The socket that the first process inherits; only this machine's root may connect to it."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_path(directory) as path:
            made.bind(path)
        made.listen(_WAITING_ATTACHERS)
    except OSError:
        made.close()
        raise
    return made


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


def doom(directory: Path) -> None:
    """Say that it dies of us and not by itself, before it does."""
    with suppress(OSError):
        (directory / "doomed").touch()


def doomed(directory: Path) -> bool:
    return (directory / "doomed").exists()


def last_words(directory: Path) -> str:
    """What the start script, or the agent, said."""
    try:
        return (directory / "log").read_text(errors="replace")[-500:].strip()
    except OSError:
        return "no log"
