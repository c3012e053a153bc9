"""Tasks: submitted all or nothing, groups out."""

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from service.bodies import off_loop, parse_as
from service.gateway import Gateway, PostDep, check_urls
from service.jobs import JobRecord
from service.preflight import image_findings
from service.problems import problem_responses
from service.records import TaskSpec
from service.routes.answers import SubmittedAnswer, SubmittedGroup, answer
from service.routes.jobs import load_chat
from service.routes.requests import TaskList, TasksBody, takes
from service.submissions import check_tasks, complete_tasks, reward_urls, sandboxes_of

router = APIRouter(prefix="/v1/jobs/{job_id}/tasks", tags=["tasks"])


@router.post(
    "",
    status_code=202,
    summary="Enqueue tasks, all or nothing",
    openapi_extra=takes(TasksBody),
    responses={202: {"model": SubmittedAnswer}, **problem_responses(400, 404, 409, 410, 413, 415, 429)},
)
async def submit_tasks(job_id: str, post: PostDep) -> Response:
    async def act(body: bytes) -> Response:
        record = await post.gateway.job(job_id, post.tenant)
        tasks = await off_loop(len(body), lambda: complete_tasks(record.spec, parse_as(TaskList, body).tasks))
        await check(post.gateway, record, tasks)
        submitted = await post.gateway.groups.submit(job_id, tasks, request_key=post.key)
        groups = [SubmittedGroup(task_id=task_id, group_id=group_id) for task_id, group_id in submitted.groups]
        warnings = await image_findings(post.gateway.store, sandboxes_of(tasks))
        return answer(SubmittedAnswer(groups=groups, backlog=submitted.backlog, warnings=warnings), 202)

    return await post.once(act, small=False)


async def check(gateway: Gateway, record: JobRecord, tasks: list[TaskSpec]) -> None:
    """What can be known now and would fail later."""
    await check_urls(gateway, reward_urls(tasks))
    chat = await load_chat(gateway, record.spec)
    await asyncio.to_thread(check_tasks, record.spec, tasks, chat, gateway.settings)
