"""How fast a job goes, and what limits it."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from service.gateway import GatewayDep, Tenant
from service.problems import problem_responses
from service.rates import WINDOW_S, Throughput
from service.routes.answers import answer
from service.throughput import MAX_WINDOW_S, Limit

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

Window = Annotated[float, Query(ge=5, le=MAX_WINDOW_S, description="seconds to look back, in slots of 5 s; at most what is kept")]


class StalenessAnswer(BaseModel):
    """Of groups as the trainer leased them, in policy versions."""

    mean: float | None
    p50: int | None
    p95: int | None
    max: int | None
    pre_queue_mean: float | None = Field(description="versions until the group was ready; mean = pre_queue_mean + in_queue_mean")
    in_queue_mean: float | None = Field(description="versions from then to its lease")


class RolloutTimeAnswer(BaseModel):
    """Mean seconds of a rollout; they add up to mean_latency_s."""

    queue: float | None = Field(description="waiting for a worker or for a place at a generator, and what failed attempts took")
    sandbox: float | None = Field(description="starting sandboxes")
    generate: float | None
    tool: float | None
    verify: float | None


class ThroughputAnswer(BaseModel):
    """A sample is one rollout's trajectory here; null: not measured in this window. By the store's clock."""

    window_s: float = Field(description="what was looked at: as asked, or since the job's first dispatch")
    generated_samples_per_s: float = Field(description="rollouts that ended with a trajectory")
    accepted_samples_per_s: float = Field(description="rollouts of groups that became ready, less those turned away later")
    consumed_samples_per_s: float | None = Field(
        description="acked, over the whole steps (from ack to ack) that ended in the window: long steps need a long one"
    )
    consumption_samples_per_s: float | None = Field(description="the same while the trainer computes, its waits left out")
    rho: float | None = Field(description="accepted / consumption: below 1 the trainer waits")
    wait_fraction: float | None = Field(
        description="share of the trainer's time in which it asked for a batch and held none, its present step included"
    )
    in_flight_rollouts: int
    queue_groups: int = Field(description="ready groups")
    capacity_groups: int | None = Field(description="places of the gate; null: it is off")
    staleness: StalenessAnswer
    time_s: RolloutTimeAnswer
    acceptance: float | None = Field(description="share of the rollouts of decided groups that may train")
    zero_variance_share: float | None = Field(description="share of complete groups whose rewards are all the same")
    tail_multiplier: float | None = Field(description="E[longest of a group] / E[length], in seconds that rollouts were worked on")
    mean_latency_s: float | None = Field(description="of a rollout, from its dispatch to its end")
    gated_share: float | None = Field(description="share of the times that a worker had room in which the gate held a group back")
    capped_share: float | None = Field(description="share of them in which the cap on rollouts in flight did")
    limited_by: Limit
    bottleneck: str = Field(description="what limits the job, by how much, and what to change")


@router.get(
    "/{job_id}/throughput",
    summary="Rates, waits, staleness, and what limits the job",
    responses={200: {"model": ThroughputAnswer}, **problem_responses(404)},
)
async def get_throughput(job_id: str, gateway: GatewayDep, tenant: Tenant, window_s: Window = WINDOW_S) -> Response:
    record = await gateway.job(job_id, tenant)
    counts = await gateway.jobs.counts(job_id)
    return answer(throughput_answer(await gateway.rates.throughput(record, counts, window_s=window_s)))


def throughput_answer(found: Throughput) -> ThroughputAnswer:
    figures, limit = found.figures, found.bottleneck
    staleness = StalenessAnswer.model_validate(figures.staleness, from_attributes=True)
    time_s = RolloutTimeAnswer.model_validate(figures.time_s, from_attributes=True)
    rest = {name: getattr(figures, name) for name in ThroughputAnswer.model_fields if hasattr(figures, name)}
    return ThroughputAnswer(**rest | {"staleness": staleness, "time_s": time_s}, limited_by=limit.limit, bottleneck=limit.sentence)
