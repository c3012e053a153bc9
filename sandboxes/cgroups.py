"""Limits for process sandboxes through the kernel's control groups, version 1 or 2, where this process may write them."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from sandboxes.base import SandboxSpec

logger = logging.getLogger(__name__)

ROOT = Path("/sys/fs/cgroup")
_PARENT = "rollway"
_CPU_PERIOD_US = 100_000
_MIB = 2**20
_REMOVE_TRIES = 50
_OUR_PIDS = 2
"""The agent, and unshare outside, which waits for it."""


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The groups of one sandbox: joined by writing a pid to `procs`, gone with `remove`."""

    directories: tuple[Path, ...]
    memory: Path | None

    @property
    def procs(self) -> tuple[Path, ...]:
        return tuple(each / "cgroup.procs" for each in self.directories)

    @property
    def oom_counter(self) -> Path:
        """The file in which the kernel counts those killed for memory; an empty one where nobody counts."""
        if self.memory is None:
            return Path("/dev/null")
        return self.memory / ("memory.events" if version2() else "memory.oom_control")

    async def remove(self) -> None:
        """Remove the groups; the kernel needs a moment after the last process died."""
        for each in self.directories:
            for _ in range(_REMOVE_TRIES):
                try:
                    each.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    break


def version2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def unenforced() -> list[str]:
    """Which limits cannot be enforced here."""
    if version2():
        parent = ROOT / _PARENT
        granted = _granted(parent)
        return [name for name in ("memory", "pids", "cpu") if name not in granted]
    return [name for name in ("memory", "pids", "cpu") if not _writable(ROOT / name)]


def existing(sandbox: str) -> Cgroups:
    """The groups a sandbox was made with, found again by its name."""
    if version2():
        directory = ROOT / _PARENT / sandbox
        return Cgroups((directory,), directory) if directory.exists() else Cgroups((), None)
    found = tuple(path for name in ("memory", "pids", "cpu") if (path := ROOT / name / _PARENT / sandbox).exists())
    memory = ROOT / "memory" / _PARENT / sandbox
    return Cgroups(found, memory if memory.exists() else None)


def create(sandbox: str, spec: SandboxSpec) -> Cgroups:
    """Make the groups with the spec's limits, as far as they can be enforced."""
    missing = unenforced()
    pids = spec.pids + _OUR_PIDS
    quota = int(spec.cpus * _CPU_PERIOD_US)
    memory = spec.memory_mib * _MIB
    if version2():
        _write(
            ROOT / _PARENT / sandbox,
            {"memory.max": memory, "memory.swap.max": 0, "pids.max": pids, "cpu.max": f"{quota} {_CPU_PERIOD_US}"},
        )
        return existing(sandbox)
    limits: dict[str, dict[str, object]] = {
        "memory": {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
        "pids": {"pids.max": pids},
        "cpu": {"cpu.cfs_period_us": _CPU_PERIOD_US, "cpu.cfs_quota_us": quota},
    }
    for name, values in limits.items():
        if name not in missing:
            _write(ROOT / name / _PARENT / sandbox, values)
    return existing(sandbox)


def _write(directory: Path, values: dict[str, object]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("no control group %s: %s", directory, error)
        return
    for name, value in values.items():
        try:
            (directory / name).write_text(str(value))
        except OSError as error:
            logger.warning("limit %s of %s is not enforced: %s", name, directory, error)


def _granted(parent: Path) -> set[str]:
    try:
        parent.mkdir(exist_ok=True)
        (ROOT / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        (parent / "cgroup.subtree_control").write_text("+memory +pids +cpu")
    except OSError as error:
        logger.debug("control groups below %s: %s", parent, error)
    try:
        return set((parent / "cgroup.subtree_control").read_text().split())
    except OSError:
        return set()


def _writable(controller: Path) -> bool:
    try:
        (controller / _PARENT).mkdir(exist_ok=True)
    except OSError:
        return False
    return True
