"""What a worker counts. Labels are bounded: never an id, never a name that a model or a client chose."""

from collections.abc import Iterator, Mapping

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sandboxes.pool import SandboxPool
from sandboxes.starting import StartLimits

turns = Counter("rollway_turns_total", "Turns generated and parsed")
tokens = Counter("rollway_sampled_tokens_total", "Tokens sampled, partial turns included")
rollouts = Counter("rollway_rollouts_total", "Rollouts ended", ["outcome", "stop_reason"])
restarts = Counter("rollway_attempts_ended_total", "Attempts that ended before their rollout did", ["reason"])
leaks = Counter("rollway_sandbox_removals_failed_total", "Sandboxes left to the sweep")
swept = Counter("rollway_sandboxes_swept_total", "Sandboxes of dead owners destroyed by the sweep")
kills = Counter("rollway_tool_kills_total", "Tool calls in which a limit of the sandbox killed something", ["limit"])
fenced = Counter("rollway_sandboxes_fenced_total", "Rollouts whose sandbox another worker had attached to")
snapshots = Counter(
    "rollway_snapshots_total",
    "Snapshots that were due (taken, live: not taken, failed), or gone back to",
    ["result"],
)
cuts = Counter("rollway_generations_cut_total", "Generations that an abort ended: as a rule a weight update's")
cut_tokens = Counter("rollway_tokens_cut_total", "Sampled tokens discarded by going back to a snapshot")
lost_leases = Counter("rollway_leases_lost_total", "Rollout leases that ran out or were taken over")

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
generate_seconds = Histogram("rollway_generate_seconds", "Wall time of one generation call", buckets=_SECONDS)
tool_seconds = Histogram("rollway_tool_seconds", "Wall time of one tool call", buckets=_SECONDS)
sandbox_seconds = Histogram("rollway_sandbox_start_seconds", "Wall time from the create call to readiness", buckets=_SECONDS)

_CLASSES = ("generator", "sandbox", "verifier", "task", "journal", "misaligned tokens", "stale_environment", "internal")


def generated(count: int, seconds: float, *, cut: bool) -> None:
    """One answer of a generator, of `count` tokens."""
    tokens.inc(count)
    generate_seconds.observe(seconds)
    cuts.inc(cut)


def reason_class(reason: str) -> str:
    """The bounded class of a reason: what stands before its colon, when it is one of ours."""
    head = reason.partition(":")[0]
    if head == "sandbox_destroyed":
        return "sandbox"
    return head if head in _CLASSES else "other"


_STARTS = ("started", "failed_spec", "failed_engine", "over_budget", "over_wait", "cancelled")
_POOLED = ("claimed", "cold", "refilled", "refills_failed", "dead_at_claim", "broken_at_claim", "removed")


class SandboxCounts(Collector):
    """What starting and keeping warm counts, by backend."""

    def __init__(self, limits: Mapping[str, StartLimits], pools: Mapping[str, SandboxPool]) -> None:
        self._limits = limits
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        starts = CounterMetricFamily("rollway_sandbox_starts", "Sandbox starts, by what became of them", labels=["backend", "result"])
        retried = CounterMetricFamily("rollway_sandbox_start_retries", "Tries of a start after its first", labels=["backend"])
        waited = CounterMetricFamily("rollway_sandbox_start_wait_seconds", "Waiting for a place to start", labels=["backend"])
        now = GaugeMetricFamily("rollway_sandboxes_starting", "Starts and removals under way or in the queue", labels=["backend", "at"])
        for backend, counts in ((name, limits.counts) for name, limits in self._limits.items()):
            for result in _STARTS:
                starts.add_metric([backend, result], getattr(counts, result))
            retried.add_metric([backend], counts.retried)
            waited.add_metric([backend], counts.waited_s)
            now.add_metric([backend, "starting"], counts.starting)
            now.add_metric([backend, "waiting"], counts.waiting)
        yield from (starts, retried, waited, now, *self._pooled())

    def _pooled(self) -> Iterator[Metric]:
        events = CounterMetricFamily("rollway_sandbox_pool", "What became of warm sandboxes and of claims", labels=["backend", "event"])
        warm = GaugeMetricFamily("rollway_sandboxes_warm", "Sandboxes ready to be claimed", labels=["backend"])
        for backend, counts in ((name, pool.counts) for name, pool in self._pools.items()):
            for event in _POOLED:
                events.add_metric([backend, event], getattr(counts, event))
            warm.add_metric([backend], counts.warm)
        yield from (events, warm)
