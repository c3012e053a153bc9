"""What one run of the sandbox benchmark measured, and what follows from it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tests.bench.sandbox_costs import Cpu


class Key(NamedTuple):
    """One cell of the table."""

    sandboxes: int
    operation: str
    variant: str


@dataclass(slots=True)
class Samples:
    """Every call of one cell, all rounds together."""

    times_s: list[float] = field(default_factory=list)
    cpu: Cpu = field(default_factory=Cpu)

    def __add__(self, other: "Samples") -> "Samples":
        return Samples(times_s=self.times_s + other.times_s, cpu=self.cpu + other.cpu)

    def ms(self, percentile: float) -> float:
        return float(np.percentile(self.times_s, percentile)) * 1000

    @property
    def calls_per_s(self) -> float:
        return len(self.times_s) / self.cpu.wall_s

    def per_thousand(self, idle_busy_cores: float) -> Cpu:
        """CPU seconds per 1,000 calls; the machine's less what it uses when nothing is called."""
        thousands = len(self.times_s) / 1000
        return Cpu(
            client_s=self.cpu.client_s / thousands,
            daemons_s=self.cpu.daemons_s / thousands,
            inside_s=self.cpu.inside_s / thousands,
            machine_s=(self.cpu.machine_s - idle_busy_cores * self.cpu.wall_s) / thousands,
            wall_s=self.cpu.wall_s / thousands,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Idle sandboxes of ours. MiB are each one's: off what the machine has available, and the shim's and agent's own share (PSS)."""

    sandboxes: int
    available_mib: float
    resident_mib: float
    starts_per_s: float
    busy_cores: float
    call_ms: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """`starts`: milliseconds by way to start."""

    starts: Mapping[str, Sequence[float]]
    memory: Sequence[Memory]
    calls: Mapping[Key, Samples]
    idle_busy_cores: float


class Aim(NamedTuple):
    """`bound` is the most, or with `at_least` the least, that is wanted."""

    what: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound
