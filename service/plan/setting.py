"""What is planned: one setting of a job and of what it runs on. Times are seconds, sizes of the trainer are groups, as in a job.

The option in a message is the command's: a field's name with hyphens.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from service.plan.errors import PlanError
from service.plan.lengths import Floats, Lengths, Measured

StalePolicy = Literal["requeue", "drop", "pace"]

MAX_BUDGET = 10_000
"""What a job allows; so the numbers below."""
LARGEST = {
    "concurrency": 1_000_000,
    "group_size": 1024,
    "groups_per_step": 10_000,
    "steps_per_version": 1000,
    "generators": 10_000,
    "extra_members": 1024,
    "max_starting": 1_000_000,
    "max_sandboxes": 1_000_000,
}
_DRAWS = 20_000
"""Groups drawn for the mean of what has no exact one: sums of random times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Rollway's own rule: at most `(budget + 1)` versions' groups are charged; what is too old for the trainer follows `stale_policy`."""

    budget: int
    stale_policy: StalePolicy = "requeue"
    max_requeues: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= MAX_BUDGET:
            raise PlanError("staleness-budget", f"{self.budget} is outside 0..{MAX_BUDGET}; 0 is on-policy, 1 to 8 are usual")
        if self.stale_policy not in ("requeue", "drop", "pace"):
            raise PlanError("stale-policy", f"{self.stale_policy!r} is none of requeue, drop, pace")
        if self.max_requeues < 0:
            raise PlanError("max-requeues", f"{self.max_requeues} is below zero; 0 drops a stale group at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDrop:
    """No gate: a first-in-first-out queue of `batches` batches, whose oldest group is evicted by one too many."""

    batches: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.batches) and self.batches >= 1):
            raise PlanError("queue", f"{self.batches:g} batches never hold the one that the trainer waits for; give 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueMax:
    """No gate and no bound but age: groups beyond `max_staleness` are thrown away when they are ready, or as they wait."""

    max_staleness: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise PlanError("queue-max", f"{self.max_staleness} is below zero; 0 trains only on what the current policy made")


Rule = Gate | QueueDrop | QueueMax


@dataclass(frozen=True, kw_only=True)
class Setting:
    """concurrency: rollouts in flight at most. tokens_per_s: of one rollout, sandboxes and tools apart. train_s: of one step, without
    waiting and weights. update_s: for how long a weight update holds generators and trainer up. sandbox_s, tool_s, verify_s: means per
    rollout; the sigmas make them lognormal. max_starting: sandboxes that may start at once. generator_tokens_per_s: the most one
    generator samples in all. acceptance: share of groups that pass the filters.
    """

    lengths: Lengths
    concurrency: int
    tokens_per_s: float
    train_s: float
    rule: Rule
    group_size: int = 8
    groups_per_step: int = 32
    steps_per_version: int = 1
    extra_members: int = 0
    update_s: float = 0.0
    sandbox_s: float = 0.0
    sandbox_sigma: float = 0.0
    max_starting: int | None = None
    max_sandboxes: int | None = None
    tool_s: float = 0.0
    tool_sigma: float = 0.0
    verify_s: float = 0.0
    acceptance: float = 1.0
    generators: int = 1
    generator_tokens_per_s: float | None = None
    sandbox_cpus: float = 1.0
    sandbox_memory_mib: int = 512

    def __post_init__(self) -> None:
        for name, most in LARGEST.items():
            value, least = getattr(self, name), 0 if name == "extra_members" else 1
            if value is not None and not least <= value <= most:
                raise PlanError(_option(name), f"{value} is outside {least}..{most}")
        for name in ("tokens_per_s", "train_s", "generator_tokens_per_s", "sandbox_cpus", "sandbox_memory_mib"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise PlanError(_option(name), f"{value:g} is not a positive number")
        for name in ("update_s", "sandbox_s", "sandbox_sigma", "tool_s", "tool_sigma", "verify_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(_option(name), f"{value:g} is below zero or no number")
        if not 0 < self.acceptance <= 1:
            raise PlanError(
                "acceptance",
                f"{self.acceptance:g} is outside 0..1; the share of groups that pass the filters must be above 0, or no step ends",
            )
        if self.slots < self.members:
            limit = "concurrency" if self.concurrency < self.members else "max-sandboxes"
            raise PlanError(
                limit,
                f"{self.slots} is below the {self.members} rollouts of one group: no group could ever start; "
                "raise it, or lower --group-size or --extra-members",
            )

    @property
    def members(self) -> int:
        """Rollouts that a group starts with."""
        return self.group_size + self.extra_members

    @property
    def slots(self) -> int:
        """Rollouts that can be in flight: each has a sandbox."""
        return min(self.concurrency, self.max_sandboxes or self.concurrency)

    @property
    def batch(self) -> int:
        """Samples of one step."""
        return self.groups_per_step * self.group_size

    @property
    def capacity(self) -> int | None:
        """Groups that the gate lets out at once; None without a gate."""
        match self.rule:
            case Gate(budget=budget):
                return (budget + 1) * self.groups_per_step * self.steps_per_version
        return None

    @cached_property
    def sampling_rate(self) -> float:
        """Tokens per second of one rollout, with so many beside it that the generators may be full."""
        if self.generator_tokens_per_s is None:
            return self.tokens_per_s
        busy = self.slots if self.capacity is None else min(self.slots, self.capacity * self.members)
        beside_s = self.sandbox_s + self.tool_s + self.verify_s
        crowded_s = busy * self.lengths.mean / (self.generator_tokens_per_s * self.generators) - beside_s
        return self.lengths.mean / max(self.lengths.mean / self.tokens_per_s, crowded_s)

    @cached_property
    def times(self) -> "Times":
        """Mean times of rollouts when no sandbox has to wait for its start."""
        beside_s = self.sandbox_s + self.tool_s + self.verify_s
        if not (self.extra_members or self.sandbox_s * self.sandbox_sigma or self.tool_s * self.tool_sigma):
            mean_s, longest_s, slowest_s = (  # the longest rollout is the one with most tokens
                self.lengths.ordered_mean(n, n) / self.sampling_rate + beside_s for n in (1, self.group_size, self.batch)
            )
            return Times(mean_s=mean_s, longest_s=longest_s, slowest_s=slowest_s, held_s=mean_s)
        rng = np.random.default_rng(0)
        shape = (_DRAWS, self.members)
        latencies = self.lengths.draw(rng, shape) / self.sampling_rate + draw_times(rng, shape, self.sandbox_s, self.sandbox_sigma)
        latencies += draw_times(rng, shape, self.tool_s, self.tool_sigma) + self.verify_s
        longest = np.partition(latencies, self.group_size - 1, axis=1)[:, self.group_size - 1]
        return Times(
            mean_s=float(latencies.mean()),
            longest_s=float(longest.mean()),
            slowest_s=Measured(longest).ordered_mean(self.groups_per_step, self.groups_per_step),
            held_s=float(np.minimum(latencies, longest[:, None]).sum(axis=1).mean()) / self.group_size,
        )

    def with_generators(self, generators: int) -> "Setting":
        """So many generators, each with as many rollouts as now."""
        if generators < 1:
            raise PlanError("generators", f"{generators} is below 1")
        return replace(self, generators=generators, concurrency=self._rollouts_of(generators))

    def scaled(self, factor: float) -> "Setting":
        """So many times the generators, as if they came in parts."""
        crowd = self.generator_tokens_per_s and self.generator_tokens_per_s * factor
        return replace(self, concurrency=self._rollouts_of(self.generators * factor), generator_tokens_per_s=crowd)

    def _rollouts_of(self, generators: float) -> int:
        return min(LARGEST["concurrency"], max(self.members, round(self.concurrency * generators / self.generators)))

    def with_budget(self, budget: int) -> "Setting":
        """Under the gate with this budget; what it does with stale groups stays."""
        rule = replace(self.rule, budget=budget) if isinstance(self.rule, Gate) else Gate(budget=budget)
        return replace(self, rule=rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """mean_s: of a rollout. longest_s: of the one that makes its group ready. slowest_s: of the last of a batch. held_s: in-flight time of
    one kept sample."""

    mean_s: float
    longest_s: float
    slowest_s: float
    held_s: float

    @property
    def tail(self) -> float:
        """M = E[longest of a group] / E[rollout]."""
        return self.longest_s / self.mean_s


def draw_times(rng: np.random.Generator, shape: tuple[int, ...], mean_s: float, sigma: float) -> Floats:
    """Lognormal times with this mean; without a sigma all are the mean."""
    if mean_s == 0 or sigma == 0:
        return np.full(shape, mean_s)
    return rng.lognormal(math.log(mean_s) - sigma**2 / 2, sigma, shape)


def _option(name: str) -> str:
    return name.replace("_", "-")
