"""What came of a trainer's steps, in numbers: pure. Times are in simulated seconds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: it waits, trains, publishes. staleness: of each of its groups, the version trained from minus the oldest sampled."""

    version: int
    wait_s: float
    train_s: float
    publish_s: float
    staleness: Sequence[int]
    samples: int
    tokens: int

    @property
    def seconds(self) -> float:
        return self.wait_s + self.train_s + self.publish_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Of groups, in policy versions. counts: groups by staleness."""

    mean: float
    p95: float
    max: int
    counts: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`steps` counts those after the warm-up, which all figures are of. discarded: groups by reason, over the whole run;
    lost_batches: whose lease ended under the trainer. interrupted: ended before its time."""

    steps: int
    warm_up: int
    version: int
    seconds: float
    steps_per_s: float
    samples_per_s: float
    tokens_per_s: float
    train_s: float
    wait_fraction: float
    publish_fraction: float
    staleness: Staleness | None
    discarded: Mapping[str, int]
    lost_batches: int
    interrupted: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def staleness_of(steps: Sequence[Step]) -> Staleness | None:
    """None where there was no group."""
    values = [value for step in steps for value in step.staleness]
    if not values:
        return None
    return Staleness(
        mean=float(np.mean(values)),
        p95=float(np.percentile(values, 95)),
        max=max(values),
        counts=dict(sorted(Counter(values).items())),
    )


def summarise(
    steps: Sequence[Step], *, warm_up: int, version: int, discarded: Mapping[str, int], lost_batches: int = 0, interrupted: bool = False
) -> Summary:
    """`steps`: all of them, the first `warm_up` are left out. version: the last that was published."""
    kept = steps[warm_up:]
    seconds = sum(step.seconds for step in kept)
    per_s = 1.0 / seconds if seconds else 0.0
    return Summary(
        steps=len(kept),
        warm_up=min(warm_up, len(steps)),
        version=version,
        seconds=seconds,
        steps_per_s=len(kept) * per_s,
        samples_per_s=sum(step.samples for step in kept) * per_s,
        tokens_per_s=sum(step.tokens for step in kept) * per_s,
        train_s=sum(step.train_s for step in kept) / max(1, len(kept)),
        wait_fraction=sum(step.wait_s for step in kept) * per_s,
        publish_fraction=sum(step.publish_s for step in kept) * per_s,
        staleness=staleness_of(kept),
        discarded=discarded,
        lost_batches=lost_batches,
        interrupted=interrupted,
    )


def discards(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """Groups that left the job untrained between two `counts` of it, by reason; those that were run again as `requeued`."""
    found = {"requeued": after["requeued"] - before["requeued"], "cancelled": after["cancelled"] - before["cancelled"]}
    for end in ("dropped", "failed"):
        for reason, count in after[end].items():
            found[f"{end}: {reason}"] = count - before[end].get(reason, 0)
    return {reason: count for reason, count in found.items() if count}
