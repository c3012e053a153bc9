"""What the attempts at a job's tasks were worth."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from service.gateway import GatewayDep, Tenant
from service.problems import problem_responses
from service.routes.answers import answer
from service.solve_rates import changed_since, of_task

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class SolveRateAnswer(BaseModel):
    """One task since the job began, groups that zero_variance drops included."""

    task_id: str
    groups: int = Field(description="whose members have all ended; one that was run again counts again")
    rollouts: int
    rewarded: int = Field(description="rollouts whose reward was not left to the trainer")
    solved: int = Field(description="of those, with a reward of at least 1")
    solve_rate: float | None = Field(description="solved of rewarded; null: none was rewarded")
    mean_reward: float | None


class SolveRatesAnswer(BaseModel):
    tasks: list[SolveRateAnswer]
    next: int = Field(description="pass as `after` for the next page, or later for what has changed since")


TaskId = Annotated[str | None, Query(min_length=1, max_length=200, description="this task only")]
After = Annotated[int, Query(ge=0, lt=2**53, description="`next` of the page before")]
Limit = Annotated[int, Query(ge=1, le=1000)]


@router.get(
    "/{job_id}/solve_rates",
    summary="Solve rates by task, the longest unchanged first",
    description="The last 100000 tasks that were attempted are kept, until the job is deleted.",
    responses={200: {"model": SolveRatesAnswer}, **problem_responses(404)},
)
async def list_solve_rates(
    job_id: str, gateway: GatewayDep, tenant: Tenant, task_id: TaskId = None, after: After = 0, limit: Limit = 100
) -> Response:
    await gateway.job(job_id, tenant)
    if task_id is not None:
        one = await of_task(gateway.store, job_id, task_id)
        rates = [one] if one is not None and one.change > after else []
    else:
        rates = await changed_since(gateway.store, job_id, after=after, limit=limit)
    last = rates[-1].change if rates else after
    return answer(SolveRatesAnswer(tasks=[SolveRateAnswer.model_validate(rate, from_attributes=True) for rate in rates], next=last))
