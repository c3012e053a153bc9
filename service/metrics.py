"""The gateway's numbers for Prometheus. Labels are bounded: route templates, statuses, and the names of at most `MAX_JOBS` jobs; no ids."""

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import NotFoundError
from service.jobs import JobCounts, Jobs
from service.ledger import Entry, together
from service.rates import Rates, Throughput
from service.throughput_metrics import ThroughputGauges, ThroughputSeries

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_JOBS = 100
"""Jobs with series of their own; with more, the newest ones by id order are left out and `rollway_jobs` still counts all."""

MAX_REASONS = 50
"""Series of one job for what is counted by reason."""

LENGTHS = [0, *(2**power for power in range(25))]
"""Bounds of the histograms of lengths; limits.tokens is below the last."""

COUNTS = (
    "backlog",
    "running",
    "ready",
    "leased",
    "acked",
    "cancelled",
    "requeued",
    "charged",
    "capacity",
    "pending_rollouts",
    "leased_rollouts",
    "in_flight_rollouts",
    "in_flight_cap",
    "left_out_rollouts",
    "surplus_rollouts",
    "tokens_generated",
    "tokens_discarded",
    "tokens_delivered",
    "tokens_standing",
)


class Metrics:
    """Counters of one gateway; its own registry, so that several apps can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route")
        self.requests = Counter("rollway_http_requests", "Answers of the gateway", (*labels, "status"), registry=self.registry)
        self.seconds = Histogram(
            "rollway_http_seconds",
            "Time from a request to the end of its answer",
            labels,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
            registry=self.registry,
        )
        self.event_streams = Gauge("rollway_event_streams", "Open event streams", registry=self.registry)
        self.exported_samples = Counter("rollway_exported_samples", "Samples sent to trainers", registry=self.registry)
        self.exported_bytes = Counter("rollway_exported_bytes", "Bytes of batches sent to trainers", ["format"], registry=self.registry)

    async def render(self, jobs: Jobs, rates: Rates) -> bytes:
        """The exposition text, with the jobs' gauges as of now."""
        scraped = CollectorRegistry()
        series = await job_series(jobs, rates)
        scraped.register(JobGauges(series))
        scraped.register(
            ThroughputGauges(
                ThroughputSeries(tenant=job.tenant, name=job.name, throughput=job.throughput) for job in series if job.throughput
            )
        )
        return await asyncio.to_thread(lambda: generate_latest(self.registry) + generate_latest(scraped))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeries:
    """One job's labels, counts and, if it was asked for, throughput."""

    tenant: str
    name: str
    policy_version: int
    counts: JobCounts
    throughput: Throughput | None = None


async def job_series(jobs: Jobs, rates: Rates | None = None) -> list[JobSeries]:
    """At most `MAX_JOBS` jobs; one that is deleted meanwhile is left out."""
    series = []
    for job_id in (await jobs.ids())[:MAX_JOBS]:
        try:
            record = await jobs.get(job_id)
            counts = await jobs.counts(job_id)
            throughput = await rates.throughput(record, counts) if rates is not None else None
        except NotFoundError:
            continue
        series.append(
            JobSeries(
                tenant=record.tenant,
                name=record.spec.name,
                policy_version=record.policy_version,
                counts=counts,
                throughput=throughput,
            )
        )
    return series


class JobGauges(Collector):
    """The jobs' counts as gauges; they are read from the store, where all gateways' work comes together."""

    def __init__(self, series: Iterable[JobSeries]) -> None:
        self._series = list(series)

    def collect(self) -> Iterator[Metric]:
        for name in COUNTS:
            family = GaugeMetricFamily(f"rollway_job_{name}", f"{name.replace('_', ' ')} of a job", labels=["tenant", "job"])
            for job in self._series:
                value = getattr(job.counts, name)
                if value is not None:
                    family.add_metric([job.tenant, job.name], value)
            yield family
        versions = GaugeMetricFamily("rollway_job_policy_version", "policy version of a job", labels=["tenant", "job"])
        for job in self._series:
            versions.add_metric([job.tenant, job.name], job.policy_version)
        yield versions
        yield from (self._by_reason(name) for name in ("dropped", "failed"))
        yield from (self._discarded(what) for what in ("rollouts", "tokens"))
        yield self._lengths()

    def _by_reason(self, name: str) -> Metric:
        family = GaugeMetricFamily(f"rollway_job_{name}", f"groups {name}, by reason", labels=["tenant", "job", "reason"])
        for job in self._series:
            for reason, count in sorted(getattr(job.counts, name).items())[:MAX_REASONS]:
                family.add_metric([job.tenant, job.name, reason[:100]], count)
        return family

    def _discarded(self, what: str) -> Metric:
        labels = ["tenant", "job", "reason"]
        family = GaugeMetricFamily(f"rollway_job_discarded_{what}", f"{what} of a job that were sampled in vain, by reason", labels=labels)
        for job in self._series:
            for reason, entry in list(job.counts.ledger.discarded.items())[:MAX_REASONS]:
                family.add_metric([job.tenant, job.name, reason[:100]], getattr(entry, what))
        return family

    def _lengths(self) -> Metric:
        labels = ["tenant", "job", "fate"]
        family = HistogramMetricFamily("rollway_job_rollout_tokens", "Sampled tokens of a job's rollouts, by fate", labels=labels)
        for job in self._series:
            ledger = job.counts.ledger
            for fate, entry in (("kept", ledger.kept), ("discarded", together(ledger.discarded))):
                family.add_metric([job.tenant, job.name, fate], _cumulative(entry), sum_value=entry.tokens)
        return family


def _cumulative(entry: Entry) -> list[tuple[str, float]]:
    counts = itertools.accumulate(entry.lengths.get(bound, 0) for bound in LENGTHS)
    return [*((str(float(bound)), float(count)) for bound, count in zip(LENGTHS, counts, strict=True)), ("+Inf", float(entry.rollouts))]


class MetricsMiddleware:
    """Counts every answer under its route's template; a path that matches none is `unmatched`."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        status = 500

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, counting_send)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.requests.labels(method, route, str(status)).inc()
            self.metrics.seconds.labels(method, route).observe(time.monotonic() - started)


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
