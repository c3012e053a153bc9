"""A running job as a setting: its own figures, read from its throughput report.

The report has no token counts of whole rollouts, so a length here is the seconds of generation that it takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from service.plan.errors import PlanError
from service.plan.options import Options

DEFAULT_URL = "http://127.0.0.1:8000"
FULL = 0.9
"""Of the gate's capacity charged: then the gate, not the workers, bounds what is in flight."""
NEEDED = ("generated_samples_per_s", "consumption_samples_per_s", "in_flight_rollouts", "acceptance", "tail_multiplier")


def job_urls(job: str) -> tuple[str, str]:
    """Where a job and its throughput are, given `URL/ID`, the job's whole URL, or its id on a gateway of this machine."""
    scheme, host, path, *_ = urlsplit(job if "://" in job else f"{DEFAULT_URL}/{job}")
    base, _, job_id = path.rstrip("/").rpartition("/")
    if not (scheme in ("http", "https") and host and job_id):
        raise PlanError("job", f"{job!r} is not URL/ID, such as {DEFAULT_URL}/job-id")
    url = urlunsplit((scheme, host, f"{base.removesuffix('/v1/jobs')}/v1/jobs/{job_id}", "", ""))
    return url, f"{url}/throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A job as it runs. wait_fraction, staleness, bottleneck: as the service measured them, to compare with; None where it has none."""

    options: Options
    wait_fraction: float | None
    staleness: float | None
    bottleneck: str | None


def read_live(job: Mapping[str, Any], throughput: Mapping[str, Any]) -> Live:
    """Raises PlanError when figures that a plan needs are not there yet; names them."""
    if missing := [key for key in NEEDED if throughput.get(key) is None]:
        raise PlanError(
            "job",
            f"its report has no {', '.join(missing)} over its window; wait until groups were generated and trained",
        )
    spec, times = job["spec"], throughput.get("time_s") or {}
    produced, consumption = float(throughput["generated_samples_per_s"]), float(throughput["consumption_samples_per_s"])
    in_flight = float(throughput["in_flight_rollouts"])
    if produced <= 0 or consumption <= 0 or in_flight <= 0:
        raise PlanError("job", "it stands still: nothing is generated or trained; see its bottleneck and preflight")
    latency_s = throughput.get("mean_latency_s") or in_flight / produced
    budget = spec["staleness_budget"]
    options = Options(
        concurrency=_concurrency(spec, throughput, in_flight),
        generators=len(spec["generators"]),
        latency_s=latency_s,
        consumption=consumption,
        group_size=spec["group_size"],
        groups_per_step=spec["groups_per_step"],
        steps_per_version=spec["steps_per_version"],
        extra_members=spec.get("extra_members") or 0,
        staleness_budget=budget,
        queue=None if budget is not None else max(1.0, spec["queue_groups"] / spec["groups_per_step"]),
        stale_policy=spec["stale_policy"],
        max_requeues=spec["max_requeues"],
        mean_tokens=max(latency_s - sum(times.get(part) or 0.0 for part in ("sandbox", "tool", "verify")), 0.0),
        tail=max(1.0, float(throughput["tail_multiplier"])),
        acceptance=float(throughput["acceptance"]),
        sandbox_s=times.get("sandbox") or 0.0,
        tool_s=times.get("tool") or 0.0,
        verify_s=times.get("verify") or 0.0,
        sandbox_cpus=(spec.get("sandbox") or {}).get("cpus", 1.0),
        sandbox_memory_mib=(spec.get("sandbox") or {}).get("memory_mib", 512),
    )
    staleness = (throughput.get("staleness") or {}).get("mean")
    return Live(
        options=options, wait_fraction=throughput.get("wait_fraction"), staleness=staleness, bottleneck=throughput.get("bottleneck")
    )


def _concurrency(spec: Mapping[str, Any], throughput: Mapping[str, Any], in_flight: float) -> int:
    """What may be in flight: the job's bound where the gate holds it back, what is in flight where workers or generators do."""
    capacity = throughput.get("capacity_groups")
    charged = in_flight / spec["group_size"] + (throughput.get("queue_groups") or 0)
    if capacity and charged >= FULL * capacity:
        return int(spec["max_in_flight_rollouts"])
    return max(round(in_flight), int(spec["group_size"]))
