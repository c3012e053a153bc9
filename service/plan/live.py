"""A running job as a setting: its own figures, read from its throughput report.

The report has no token counts of whole rollouts, so a length here is the seconds of generation that it takes. What staleness turned away is
not taken from it: that is simulated, and would count twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from service.plan.errors import PlanError
from service.plan.lengths import MAX_SIGMA, Lognormal, sigma_of_tail, tail_multiplier
from service.plan.options import Options

DEFAULT_URL = "http://127.0.0.1:8000"
FULL = 0.9
"""Of the gate's capacity charged: then the gate, not the workers, bounds what is in flight."""
MOST = 0.5
"""Share of the times that a worker had room in which the gate held a group back: likewise, where it is reported."""
NEEDED = ("generated_samples_per_s", "consumption_samples_per_s", "tail_multiplier")


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
    spec = job["spec"]
    needed = (*NEEDED, "zero_variance_share") if spec.get("zero_variance") == "drop" else NEEDED
    if missing := [key for key in needed if throughput.get(key) is None]:
        raise PlanError("job", f"its report has no {', '.join(missing)} yet; wait until groups were generated and trained")
    produced, consumption = float(throughput["generated_samples_per_s"]), float(throughput["consumption_samples_per_s"])
    if produced <= 0 or consumption <= 0:
        raise PlanError("job", "it stands still: nothing is generated or trained; see its bottleneck and preflight")
    spent = {part: float(seconds or 0.0) for part, seconds in (throughput.get("time_s") or {}).items()}
    latency_s = float(throughput.get("mean_latency_s") or (throughput.get("in_flight_rollouts") or 0) / produced)  # Little
    worked_s = latency_s - spent.get("queue", 0.0)  # who waits for a worker is nobody's load
    beside_s = sum(spent.get(part, 0.0) for part in ("sandbox", "tool", "verify"))
    if worked_s <= beside_s:
        raise PlanError("job", f"of the {latency_s:.3g} s of a rollout its report leaves no time to generate; look at a longer window")
    budget, box = spec["staleness_budget"], spec.get("sandbox") or {}
    options = Options(
        concurrency=_concurrency(spec, throughput, worked=produced * worked_s),
        generators=len(spec["generators"]),
        latency_s=worked_s,
        consumption=consumption,
        group_size=spec["group_size"],
        groups_per_step=spec["groups_per_step"],
        steps_per_version=spec["steps_per_version"],
        extra_members=spec.get("extra_members") or 0,
        staleness_budget=budget,
        queue=None if budget is not None else max(1.0, spec["queue_groups"] / spec["groups_per_step"]),
        stale_policy=spec["stale_policy"],
        max_requeues=spec["max_requeues"],
        mean_tokens=worked_s - beside_s,
        sigma=_sigma(float(throughput["tail_multiplier"]), worked_s / (worked_s - beside_s), spec["group_size"]),
        acceptance=1.0 - float(throughput["zero_variance_share"]) if spec.get("zero_variance") == "drop" else 1.0,
        sandbox_s=spent.get("sandbox", 0.0),
        tool_s=spent.get("tool", 0.0),
        verify_s=spent.get("verify", 0.0),
        sandbox_cpus=box.get("cpus", 1.0),
        sandbox_memory_mib=box.get("memory_mib", 512),
    )
    staleness = (throughput.get("staleness") or {}).get("mean")
    return Live(
        options=options, wait_fraction=throughput.get("wait_fraction"), staleness=staleness, bottleneck=throughput.get("bottleneck")
    )


def _concurrency(spec: Mapping[str, Any], throughput: Mapping[str, Any], *, worked: float) -> int:
    """What may be in flight: the job's bound where the gate holds it back, what is worked on where workers or generators do."""
    capacity, gated = throughput.get("capacity_groups"), throughput.get("gated_share")
    charged = (throughput.get("in_flight_rollouts") or 0) / spec["group_size"] + (throughput.get("queue_groups") or 0)
    if capacity and (charged >= FULL * capacity if gated is None else gated >= MOST):
        return int(spec["max_in_flight_rollouts"])
    members = int(spec["group_size"]) + int(spec.get("extra_members") or 0)
    return max(round(worked), members)


def _sigma(tail: float, working_to_generating: float, group_size: int) -> float:
    """Of generation alone, when `tail` is that of all working time and the rest of it is even."""
    largest = tail_multiplier(Lognormal(uncut_mean=1.0, sigma=MAX_SIGMA), group_size)
    return sigma_of_tail(min(largest, 1 + max(0.0, tail - 1) * working_to_generating), group_size)
