"""What sandboxes cost the machine: CPU seconds by whose they are, and memory, from /proc."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import psutil

_DAEMONS = ("dockerd", "containerd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """CPU seconds. `inside_s`: of all in the containers; `machine_s`: all that was busy, whoever it was."""

    client_s: float = 0.0
    daemons_s: float = 0.0
    inside_s: float = 0.0
    machine_s: float = 0.0
    wall_s: float = 0.0

    def __add__(self, other: Self) -> "Cpu":
        return Cpu(
            client_s=self.client_s + other.client_s,
            daemons_s=self.daemons_s + other.daemons_s,
            inside_s=self.inside_s + other.inside_s,
            machine_s=self.machine_s + other.machine_s,
            wall_s=self.wall_s + other.wall_s,
        )


class Meter:
    """Runs from when it is made; `read` gives what was used since: of shims and insides those of `container_ids` alone."""

    def __init__(self, container_ids: Iterable[str] = ()) -> None:
        self._shims = shims_of(container_ids)
        self._daemons, self._inside_s = _used([*daemons(), *self._shims]), _inside_s(self._shims)
        self._machine_s, self._client_s, self._wall_s = _machine_s(), time.process_time(), time.perf_counter()

    def read(self) -> Cpu:
        """Of the engine's processes those count that still live."""
        wall_s, client_s, machine_s = time.perf_counter(), time.process_time(), _machine_s()
        return Cpu(
            client_s=client_s - self._client_s,
            daemons_s=_since(self._daemons),
            inside_s=_inside_s(self._shims) - self._inside_s,
            machine_s=machine_s - self._machine_s,
            wall_s=wall_s - self._wall_s,
        )


def daemons() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] in _DAEMONS]


def shims_of(container_ids: Iterable[str]) -> list[psutil.Process]:
    wanted = set(container_ids)
    shims = [process for process in psutil.process_iter(["name"]) if (process.info["name"] or "").startswith("containerd-shim")]
    return [process for process in shims if wanted.intersection(_arguments(process))]


def _inside_s(shims: Iterable[psutil.Process]) -> float:
    """Of all that lives below them, with what that reaped: the dead are in the sum of their parents, whenever they died."""
    found = list(psutil.process_iter(["ppid"]))
    below = {shim.pid for shim in shims}
    inside: list[psutil.Process] = []
    while children := [process for process in found if process.info["ppid"] in below]:
        inside += children
        below = {process.pid for process in children}
    return sum(_used(inside).values())


def _used(processes: Iterable[psutil.Process]) -> dict[psutil.Process, float]:
    return {process: used for process in processes if (used := _used_s(process)) is not None}


def _since(before: Mapping[psutil.Process, float]) -> float:
    return sum(now - then for process, then in before.items() if (now := _used_s(process)) is not None)


def _machine_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _used_s(process: psutil.Process) -> float | None:
    """With the children that it reaped; None when it is gone."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return None
    return float(times.user + times.system + times.children_user + times.children_system)


def available_bytes() -> int:
    return int(psutil.virtual_memory().available)


def resident_bytes(container_ids: Iterable[str]) -> int:
    """Proportional set size of these containers' shims and of what runs in them."""
    trees = [member for shim in shims_of(container_ids) for member in (shim, *shim.children(recursive=True))]
    return sum(_proportional_bytes(process) for process in trees)


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _proportional_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0
