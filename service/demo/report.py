"""A finished demo in numbers: plain data for `--json`, rows for people."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pvariance
from typing import Any

import numpy as np

from service.demo.trainer import Progress

SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """mean, p50, p95 and max of some values; all 0.0 without any."""

    mean: float
    p50: float
    p95: float
    max: float


def spread(values: Iterable[float]) -> Spread:
    found = np.fromiter(values, dtype=np.float64)
    if not found.size:
        return Spread(mean=0.0, p50=0.0, p95=0.0, max=0.0)
    p50, p95 = np.percentile(found, [50, 95]).tolist()
    return Spread(mean=float(found.mean()), p50=p50, p95=p95, max=float(found.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Seconds where a name says so. `tokens` are sampled ones that were delivered; `problems` empty means that the demo passed."""

    generator: str
    backend: str
    seconds: float
    groups_submitted: int
    groups: Mapping[str, int]
    samples: int
    turns: Spread
    tool_calls: int
    reward_mean: float
    groups_with_variance: float
    stop_reasons: Mapping[str, int]
    samples_per_s: float
    tokens: int
    tokens_per_s: float
    steps: int
    staleness_budget: int
    staleness: Spread
    sandbox_start_s: Spread
    tool_call_s: Spread
    verify_s: Spread
    generate_s: Spread
    tokens_compared: int
    sandboxes_left: int
    problems: Sequence[str]

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed} | asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the checks found out."""

    states: Mapping[str, str]
    tokens_compared: int
    sandboxes_left: int
    problems: Sequence[str]


def build_report(progress: Progress, findings: Findings, *, generator: str, backend: str, budget: int) -> Report:
    """Sum up what was delivered. Sandbox and tool times are per rollout: a tool call's is the mean of its rollout."""
    trajectories = progress.trajectories
    samples = [sample for trajectory in trajectories for sample in trajectory["samples"]]
    tokens = sum(sum(sample["loss_mask"]) for sample in samples)
    timings = [trajectory["timing"] for trajectory in trajectories]
    seconds = progress.seconds or 1.0
    return Report(
        generator=generator,
        backend=backend,
        seconds=progress.seconds,
        groups_submitted=len(findings.states),
        groups=dict(Counter(findings.states.values())),
        samples=len(samples),
        turns=spread(trajectory["turns"] for trajectory in trajectories),
        tool_calls=sum(trajectory["tool_calls"] for trajectory in trajectories),
        reward_mean=fmean(_rewards(trajectories) or [0.0]),
        groups_with_variance=_share_with_variance(progress),
        stop_reasons=dict(Counter(trajectory["stop_reason"] for trajectory in trajectories)),
        samples_per_s=len(samples) / seconds,
        tokens=tokens,
        tokens_per_s=tokens / seconds,
        steps=progress.steps,
        staleness_budget=budget,
        staleness=spread(delivered.group["staleness"] for delivered in progress.delivered),
        sandbox_start_s=spread(timing["sandbox_s"] for timing in timings if timing["sandbox_s"]),
        tool_call_s=spread(t["timing"]["tool_s"] / t["tool_calls"] for t in trajectories if t["tool_calls"]),
        verify_s=spread(timing["verify_s"] for timing in timings if timing["verify_s"]),
        generate_s=spread(timing["generate_s"] for timing in timings),
        tokens_compared=findings.tokens_compared,
        sandboxes_left=findings.sandboxes_left,
        problems=findings.problems,
    )


def _rewards(trajectories: Iterable[Mapping[str, Any]]) -> list[float]:
    return [trajectory["reward"] for trajectory in trajectories if trajectory["reward"] is not None]


def _share_with_variance(progress: Progress) -> float:
    rewards = [_rewards(delivered.group["trajectories"]) for delivered in progress.delivered]
    return fmean([float(pvariance(group) > 0) for group in rewards if group] or [0.0])
