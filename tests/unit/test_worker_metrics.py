"""A worker's labels."""

from dataclasses import fields

import pytest

from sandboxes.pool import PoolCounts, SandboxPool
from sandboxes.starting import StartCounts, StartLimits
from tests.standin_sandboxes import StandinBackend
from workers.metrics import SandboxCounts, reason_class


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        pytest.param("sandbox: container 7f3 is gone", "sandbox", id="sandbox"),
        pytest.param("sandbox_destroyed", "sandbox", id="destroyed"),
        pytest.param("generator: http://10.0.0.1: HTTP 500", "generator", id="generator"),
        pytest.param("task: no such image", "task", id="task"),
        pytest.param("python: what a model made up", "other", id="case-079-unknown"),
        pytest.param("", "other", id="empty"),
    ],
)
def test_reasons_become_one_of_a_few_classes(reason: str, label: str) -> None:
    assert reason_class(reason) == label


def test_every_count_of_starts_and_pools_is_a_series_of_its_backend_case_079() -> None:
    pool = SandboxPool(StandinBackend(), deployment_id="d", worker="w")
    limits = StartLimits()
    limits.counts.started, limits.counts.retried, pool.counts.claimed = 3, 2, 1
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in SandboxCounts({"docker": limits}, {"docker": pool}).collect()
        for sample in family.samples
    }
    assert samples["rollway_sandbox_starts_total", "docker", "started"] == 3
    assert samples["rollway_sandbox_start_retries_total", "docker"] == 2
    assert samples["rollway_sandbox_pool_total", "docker", "claimed"] == 1
    assert len(samples) == len(fields(StartCounts)) + len(fields(PoolCounts))
