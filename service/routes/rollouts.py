"""Rollouts: read, followed live, cancelled."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from service.bodies import read_as
from service.errors import GoneError, NotFoundError
from service.events import ENDED, EventResponse, Position, RolloutEvents, position_after
from service.export import sample_object
from service.gateway import Gateway, GatewayDep, PostDep, Tenant
from service.groups import RolloutRecord
from service.keys import group_of
from service.problems import problem_responses
from service.progress import Progress
from service.replay import readable
from service.routes.answers import RolloutAnswer, RolloutDetailAnswer, answer, rollout_fields
from service.routes.requests import EmptyBody, takes
from service.samples import build_samples

router = APIRouter(prefix="/v1/rollouts", tags=["rollouts"])

Include = Annotated[
    str, Query(max_length=100, pattern=r"^(messages|samples)?(,(messages|samples))*$", description="messages, samples or both")
]
LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=100)]
EVENT_STREAM = {
    "description": "server-sent events: `id` is `<attempt>-<index>`, `event` the kind of the journal's entry, `data` a JSON object",
    "content": {"text/event-stream": {}},
}
"""Without a schema: OpenAPI 3.1 has none for the events of a stream."""


@router.get("/{rollout_id}", summary="A rollout", responses={200: {"model": RolloutDetailAnswer}, **problem_responses(404)})
async def get_rollout(rollout_id: str, gateway: GatewayDep, tenant: Tenant, include: Include = "") -> Response:
    await gateway.owner(rollout_id, tenant, kind="rollout")
    record = await gateway.groups.rollout(rollout_id)
    [journal] = await gateway.leases.raw_journals([rollout_id])
    wanted = frozenset(part for part in include.split(",") if part)
    prompt = await prompt_of(gateway, rollout_id) if "messages" in wanted else None
    body = await asyncio.to_thread(detail, record, journal, wanted, prompt)
    return Response(body, media_type="application/json")


async def prompt_of(gateway: Gateway, rollout_id: str) -> list[dict[str, Any]] | None:
    """The task's own messages; None once the group is acked and its task gone."""
    try:
        task = await gateway.groups.task(group_of(rollout_id))
    except (NotFoundError, GoneError):
        return None
    return [message.model_dump(exclude_none=True) for message in task.messages]


def detail(record: RolloutRecord, journal: Sequence[bytes], wanted: frozenset[str], prompt: list[dict[str, Any]] | None) -> bytes:
    """The JSON of `RolloutDetailAnswer`. Blocking: it walks the journal, as far as that can be read."""
    entries, error = readable(journal)
    progress = Progress(entries)
    fields = rollout_fields(record) | {"error": error}
    fields["timings"] = {"queued_s": progress.queued_s} | {f"{name}_s": seconds for name, seconds in progress.seconds.items()}
    fields["sandbox"] = progress.sandbox_name
    if record.state not in ENDED:
        live = {"turns": progress.turns, "tool_calls": progress.tool_calls, "sampled_tokens": progress.sampled}
        fields |= live | {"oldest_version": progress.oldest_version, "newest_version": progress.newest_version}
        fields["sandbox_id"] = progress.sandbox_id
    fields["messages"] = [*prompt, *progress.messages] if prompt is not None else None
    fields["samples"] = (
        [sample_object(sample) for sample in build_samples(entries)] if "samples" in wanted and entries and not error else None
    )
    return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)


@router.get(
    "/{rollout_id}/events",
    response_class=Response,
    summary="The journal as server-sent events, resumable",
    responses={200: EVENT_STREAM, 204: {"description": "the client has seen the end"}, **problem_responses(404, 429)},
)
async def get_events(rollout_id: str, gateway: GatewayDep, tenant: Tenant, last_event_id: LastEventId = None) -> Response:
    await gateway.owner(rollout_id, tenant, kind="rollout")
    record = await gateway.groups.rollout(rollout_id)
    start = position_after(last_event_id)
    if start is None and record.state in ENDED:
        return Response(status_code=204)
    events = RolloutEvents(gateway.groups, gateway.leases, gateway.streams)
    return EventResponse(gateway.streams, events.stream(rollout_id, start or Position()))


@router.post(
    "/{rollout_id}/cancel",
    summary="Cancel a rollout and with it its group, whose rewards can no longer be compared",
    description="409 while the trainer holds the group in a batch.",
    openapi_extra=takes(EmptyBody, required=False),
    responses={200: {"model": RolloutAnswer}, **problem_responses(400, 404, 409, 413, 415, 429)},
)
async def cancel_rollout(rollout_id: str, post: PostDep) -> Response:
    async def act(body: bytes) -> Response:
        await read_as(EmptyBody, body)
        await post.gateway.owner(rollout_id, post.tenant, kind="rollout")
        return answer(RolloutAnswer(**rollout_fields(await post.gateway.groups.cancel_rollout(rollout_id))))

    return await post.once(act)
