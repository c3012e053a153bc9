"""What sandboxes cost the machine: CPU seconds by whose they are, and memory, from /proc."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import psutil

_DAEMONS = ("dockerd", "containerd", "containerd-shim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """CPU seconds so far, or between two readings. `machine_s` is all that was busy, whoever it was."""

    client_s: float = 0.0
    daemons_s: float = 0.0
    machine_s: float = 0.0
    wall_s: float = 0.0

    def __add__(self, other: Self) -> "Cpu":
        return Cpu(
            client_s=self.client_s + other.client_s,
            daemons_s=self.daemons_s + other.daemons_s,
            machine_s=self.machine_s + other.machine_s,
            wall_s=self.wall_s + other.wall_s,
        )

    def since(self, before: Self) -> "Cpu":
        return Cpu(
            client_s=self.client_s - before.client_s,
            daemons_s=self.daemons_s - before.daemons_s,
            machine_s=self.machine_s - before.machine_s,
            wall_s=self.wall_s - before.wall_s,
        )


def daemons() -> list[psutil.Process]:
    """The engine's processes that live now, the shims included."""
    return [process for process in psutil.process_iter(["name"]) if (process.info["name"] or "").startswith(_DAEMONS)]


def reading(of: Iterable[psutil.Process]) -> Cpu:
    """What those processes and the children that they reaped used; a process that is gone counts as nothing."""
    machine = psutil.cpu_times()
    return Cpu(
        client_s=time.process_time(),
        daemons_s=sum(_used_s(process) for process in of),
        machine_s=machine.user + machine.nice + machine.system + machine.irq + machine.softirq,
        wall_s=time.perf_counter(),
    )


def _used_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def available_bytes() -> int:
    return int(psutil.virtual_memory().available)


def resident_bytes(container_ids: Iterable[str]) -> int:
    """Proportional set size of these containers' shims and of what runs in them."""
    wanted = set(container_ids)
    shims = [process for process in daemons() if wanted.intersection(_arguments(process))]
    trees = [member for shim in shims for member in (shim, *shim.children(recursive=True))]
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
