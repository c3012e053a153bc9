"""What a simulation found out, and what it shows to a controller on its way."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """In policy versions, over trained groups; the two parts add up to the mean."""

    mean: float
    p50: float
    p95: float
    max: int
    pre_queue_mean: float
    in_queue_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Where the groups of a whole run went; together they are `begun`."""

    begun: int
    trained: int
    filtered: int
    evicted: int
    stale: int
    out: int
    """In flight, ready or with the trainer when the run ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One run. All but `ends`, `charged_max` and `max_staleness_ever` over the window after the warm-up; shares are 0..1.

    wait_share: of the trainer's time, waiting for a batch. discarded_share: of ready or stopped groups that passed the filters, those
    evicted or stale. trained_tokens and drawn_tokens: mean length of what was trained, and of all that began; their ratio is the bias.
    """

    steps: int
    seconds: float
    staleness: Staleness
    wait_share: float
    generated_samples_per_s: float
    consumed_samples_per_s: float
    queue_mean: float
    queue_max: int
    in_flight_mean: float
    charged_max: int
    discarded_share: float
    requeued: int
    trained_tokens: float
    drawn_tokens: float
    ends: Ends

    @property
    def length_bias(self) -> float:
        return self.trained_tokens / self.drawn_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a controller sees after each step: since the one before, and now."""

    now_s: float
    version: int
    step_s: float
    waited_s: float
    ready_groups: int
    in_flight: int
    staleness_mean: float


Control = Callable[[Reading], int]
"""Answers with the rollouts that may be in flight from now on."""
