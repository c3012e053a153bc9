"""Groups: listed, read, cancelled."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from service.bodies import read_as
from service.errors import NotFoundError
from service.gateway import GatewayDep, PostDep, Tenant
from service.keys import job_of
from service.problems import problem_responses
from service.records import GroupState
from service.routes.answers import GroupAnswer, GroupsAnswer, answer, group_answer
from service.routes.requests import EmptyBody, takes

router = APIRouter(prefix="/v1", tags=["groups"])

State = Annotated[GroupState | None, Query(description="only groups in this state")]
After = Annotated[str | None, Query(pattern=r"^j[0-9a-f]{16}-g[1-9][0-9]{0,14}$", description="the last group id of the page before")]
Limit = Annotated[int, Query(ge=1, le=1000, description="groups a page; fewer where groups are large")]

MAX_PAGE_ROLLOUTS = 4000
"""Members in one page: their records are read and written on the loop."""


@router.get(
    "/jobs/{job_id}/groups",
    summary="Groups of a job, in order of submission",
    responses={200: {"model": GroupsAnswer}, **problem_responses(404)},
)
async def list_groups(
    job_id: str, gateway: GatewayDep, tenant: Tenant, state: State = None, after: After = None, limit: Limit = 100
) -> Response:
    job = await gateway.job(job_id, tenant)
    most = max(1, min(limit, MAX_PAGE_ROLLOUTS // job.spec.members))
    records = await gateway.groups.list(job_id, state=state, after=after, limit=most)
    last = records[-1].group_id if len(records) == most else None
    return answer(GroupsAnswer(groups=[group_answer(record) for record in records], next=last))


@router.get("/jobs/{job_id}/groups/{group_id}", summary="A group", responses={200: {"model": GroupAnswer}, **problem_responses(404)})
async def get_group(job_id: str, group_id: str, gateway: GatewayDep, tenant: Tenant) -> Response:
    await gateway.job(job_id, tenant)
    if job_of(group_id) != job_id:
        raise NotFoundError(f"there is no group {group_id!r} in this job")
    return answer(group_answer(await gateway.groups.get(group_id)))


@router.post(
    "/groups/{group_id}/cancel",
    summary="Cancel a group; again changes nothing",
    description="409 while the trainer holds the group in a batch.",
    openapi_extra=takes(EmptyBody, required=False),
    responses={200: {"model": GroupAnswer}, **problem_responses(400, 404, 409, 413, 415, 429)},
)
async def cancel_group(group_id: str, post: PostDep) -> Response:
    async def act(body: bytes) -> Response:
        await read_as(EmptyBody, body)
        await post.gateway.owner(group_id, post.tenant, kind="group")
        return answer(group_answer(await post.gateway.groups.cancel(group_id)))

    return await post.once(act)
