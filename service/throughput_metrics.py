"""A job's throughput for Prometheus: the figures of `GET .../throughput` over WINDOW_S seconds, one gauge each.

What is not measured has no sample. What limits a job is in the label `limit` of a gauge that is 1.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.rates import WINDOW_S, Throughput

FIGURES = (
    "generated_samples_per_s",
    "accepted_samples_per_s",
    "consumed_samples_per_s",
    "consumption_samples_per_s",
    "rho",
    "wait_fraction",
    "acceptance",
    "zero_variance_share",
    "tail_multiplier",
    "mean_latency_s",
    "gated_share",
    "capped_share",
)
STALENESS = ("mean", "p50", "p95", "max", "pre_queue_mean", "in_queue_mean")
PARTS = ("queue", "sandbox", "generate", "tool", "verify")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSeries:
    """One job's labels and throughput."""

    tenant: str
    name: str
    throughput: Throughput


class ThroughputGauges(Collector):
    """The counts that the figures name (queue, capacity, in flight) are gauges of their own already."""

    def __init__(self, series: Iterable[ThroughputSeries]) -> None:
        self._series = list(series)

    def collect(self) -> Iterator[Metric]:
        for name in FIGURES:
            family = GaugeMetricFamily(
                f"rollway_job_{name}", f"{name.replace('_', ' ')} of a job over {WINDOW_S:g} s", labels=["tenant", "job"]
            )
            for job in self._series:
                _add(family, [job.tenant, job.name], getattr(job.throughput.figures, name))
            yield family
        staleness = GaugeMetricFamily("rollway_job_staleness", "policy versions of leased groups", labels=["tenant", "job", "figure"])
        time_s = GaugeMetricFamily("rollway_job_rollout_time_s", "mean seconds of a rollout, by part", labels=["tenant", "job", "part"])
        limit = GaugeMetricFamily("rollway_job_limited_by", "1 for what limits a job", labels=["tenant", "job", "limit"])
        for job in self._series:
            labels, figures = [job.tenant, job.name], job.throughput.figures
            for name in STALENESS:
                _add(staleness, [*labels, name], getattr(figures.staleness, name))
            for part in PARTS:
                _add(time_s, [*labels, part], getattr(figures.time_s, part))
            limit.add_metric([*labels, job.throughput.bottleneck.limit.value], 1)
        yield from (staleness, time_s, limit)


def _add(family: GaugeMetricFamily, labels: list[str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)
