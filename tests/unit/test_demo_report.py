"""A demo's report: numbers from what was delivered, and JSON that can be written."""

from typing import Any

import orjson

from service.demo.report import Findings, build_report, spread
from service.demo.trainer import Delivered, Progress


def trajectory(reward: float) -> dict[str, Any]:
    timing = {"sandbox_s": 0.5, "tool_s": 1.0, "verify_s": 0.0, "generate_s": 0.1}
    samples = [{"loss_mask": [0, 1, 1]}]
    return {"reward": reward, "samples": samples, "timing": timing, "turns": 3, "tool_calls": 2, "stop_reason": "submitted"}


def test_report() -> None:
    groups = [[1.0, 0.0], [1.0, 1.0]]
    delivered = [
        Delivered(policy_version=n, group={"staleness": n, "trajectories": [trajectory(reward) for reward in rewards]})
        for n, rewards in enumerate(groups)
    ]
    findings = Findings(states={"a": "acked", "b": "acked"}, tokens_compared=8, sandboxes_left=0, problems=[])
    report = build_report(Progress(delivered=delivered, seconds=2.0), findings, generator="standin", backend="docker", budget=1)
    said = orjson.loads(orjson.dumps(report.as_json()))
    assert said["passed"] is True
    assert said["groups"] == {"acked": 2}
    assert said["stop_reasons"] == {"submitted": 4}
    assert (said["reward_mean"], said["groups_with_variance"]) == (0.75, 0.5)
    assert (said["samples_per_s"], said["tokens"], said["tool_call_s"]["p50"]) == (2.0, 8, 0.5)
    assert (said["staleness"]["mean"], said["staleness"]["max"]) == (0.5, 1.0)


def test_a_problem_fails_the_demo_even_without_any_delivery() -> None:
    findings = Findings(states={"a": "failed"}, tokens_compared=0, sandboxes_left=0, problems=["a is failed"])
    report = build_report(Progress(), findings, generator="standin", backend="docker", budget=1)
    assert not report.passed
    assert report.samples == 0


def test_spread_of_nothing_is_zero() -> None:
    assert spread([]).p95 == 0.0
