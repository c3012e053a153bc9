"""Batches: leased to the trainer, sent as JSON or Arrow, acked, extended, released."""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from service import arrow
from service.batches import BatchRecord, NothingReady
from service.bodies import read_as
from service.errors import NotAcceptableError, UnavailableError, UnexportableError
from service.export import JSON_MEDIA_TYPE
from service.gateway import Gateway, GatewayDep, Post, PostDep, Tenant
from service.problems import problem_responses
from service.routes.answers import BatchAnswer, BatchStateAnswer, LeaseAnswer, LiveBatchesAnswer, answer, live_batch
from service.routes.requests import BatchBody, EmptyBody, ExtendBody, takes

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1", tags=["batches"])

MIN_POLL_S, MAX_POLL_S = 0.05, 0.5
DRAINED_HEADER = "Rollway-Drained"

BATCH_BODY = {"model": BatchAnswer, "content": {arrow.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
NOTHING_READY = {
    "description": "nothing is ready",
    "headers": {
        DRAINED_HEADER: {"description": "whether nothing is left to come", "schema": {"type": "string", "enum": ["true", "false"]}}
    },
}


@router.post(
    "/jobs/{job_id}/batches",
    summary="Lease ready groups",
    openapi_extra=takes(BatchBody),
    responses={200: BATCH_BODY, 204: NOTHING_READY, **problem_responses(400, 404, 406, 409, 410, 413, 415, 429)},
)
async def lease_batch(job_id: str, post: PostDep) -> Response:
    media_type = accepted(post.request)

    async def act(body: bytes) -> Response:
        asked = await read_as(BatchBody, body)
        await post.gateway.job(job_id, post.tenant)
        found = await wait_for_batch(post, job_id, asked)
        if isinstance(found, NothingReady):
            return Response(status_code=204, headers={DRAINED_HEADER: str(found.drained).lower()})
        return await export(post.gateway, found, media_type)

    return await post.once(act, replay=False)


async def wait_for_batch(post: Post, job_id: str, asked: BatchBody) -> BatchRecord | NothingReady:
    """Ask until there is a batch, nothing is left to come, or the wait is over: the client's, the server's, or the connection's."""
    gateway, ends_at, poll_s = post.gateway, time.monotonic() + asked.wait_s, MIN_POLL_S
    while True:
        found = await gateway.batches.lease(
            job_id,
            groups=asked.groups,
            lease_s=asked.lease_s,
            allow_fewer=asked.allow_fewer,
            trains_version=asked.trains_version,
            request_key=post.key,
        )
        left_s = ends_at - time.monotonic()
        if isinstance(found, BatchRecord) or found.drained or left_s <= 0:
            return found
        if await gateway.streams.pause(min(poll_s, left_s)) or await post.request.is_disconnected():
            return found
        poll_s = min(poll_s * 1.5, MAX_POLL_S)


def accepted(request: Request) -> str:
    """The form that the client wants: JSON unless it asks for Arrow.

    Raises:
        NotAcceptableError: it takes neither.
    """
    wanted = [part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "*/*").split(",")]
    for form in wanted:
        if form == arrow.MEDIA_TYPE:
            return arrow.MEDIA_TYPE
        if form in (JSON_MEDIA_TYPE, "application/*", "*/*", ""):
            return JSON_MEDIA_TYPE
    raise NotAcceptableError(f"batches are sent as {JSON_MEDIA_TYPE} or {arrow.MEDIA_TYPE}; accept one of them")


async def export(gateway: Gateway, batch: BatchRecord, media_type: str) -> Response:
    """The batch's body as a stream. Its first piece is made here, so that what cannot be exported is refused with a status.

    Raises:
        UnavailableError: a group could not be exported, and has failed.
    """
    pieces = sound(gateway, batch, gateway.exporter.arrow(batch) if media_type == arrow.MEDIA_TYPE else gateway.exporter.json(batch))
    first = await anext(pieces)

    async def stream() -> AsyncIterator[bytes]:
        async with aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    return StreamingResponse(stream(), media_type=media_type)


async def sound(gateway: Gateway, batch: BatchRecord, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """`pieces`; a group whose journals are damaged fails once and for all, instead of coming back in every batch."""
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
    except UnexportableError as error:
        await gateway.batches.spoil(batch, error.group_id, str(error))
        logger.error("batch %s is handed back and group %s has failed: %s", batch.batch_id, error.group_id, error)
        detail = f"group {error.group_id} cannot be exported and has failed ({error}); the others are ready again: ask once more"
        raise UnavailableError(detail, retry_after_s=1.0) from error


@router.get("/jobs/{job_id}/batches", summary="The live leases", responses={200: {"model": LiveBatchesAnswer}, **problem_responses(404)})
async def list_batches(job_id: str, gateway: GatewayDep, tenant: Tenant) -> Response:
    await gateway.job(job_id, tenant)
    return answer(LiveBatchesAnswer(batches=[live_batch(record) for record in await gateway.batches.live(job_id)]))


@router.get("/batches/{batch_id}", summary="The body once more", responses={200: BATCH_BODY, **problem_responses(404, 406, 410)})
async def get_batch(batch_id: str, request: Request, gateway: GatewayDep, tenant: Tenant) -> Response:
    media_type = accepted(request)
    await gateway.owner(batch_id, tenant, kind="batch")
    return await export(gateway, await gateway.batches.get(batch_id), media_type)


@router.post(
    "/batches/{batch_id}/ack",
    summary="The trainer is done with it; again changes nothing",
    openapi_extra=takes(EmptyBody, required=False),
    responses={200: {"model": BatchStateAnswer}, **problem_responses(400, 404, 409, 410, 413, 415, 429)},
)
async def ack_batch(batch_id: str, post: PostDep) -> Response:
    async def act(body: bytes) -> Response:
        await read_as(EmptyBody, body)
        await post.gateway.owner(batch_id, post.tenant, kind="batch")
        await post.gateway.batches.ack(batch_id)
        return answer(BatchStateAnswer(batch_id=batch_id, state="acked"))

    return await post.once(act)


@router.post(
    "/batches/{batch_id}/release",
    summary="Hand it back; its groups come first again",
    openapi_extra=takes(EmptyBody, required=False),
    responses={200: {"model": BatchStateAnswer}, **problem_responses(400, 404, 409, 410, 413, 415, 429)},
)
async def release_batch(batch_id: str, post: PostDep) -> Response:
    async def act(body: bytes) -> Response:
        await read_as(EmptyBody, body)
        await post.gateway.owner(batch_id, post.tenant, kind="batch")
        await post.gateway.batches.release(batch_id)
        return answer(BatchStateAnswer(batch_id=batch_id, state="released"))

    return await post.once(act)


@router.post(
    "/batches/{batch_id}/extend",
    summary="Renew its lease",
    openapi_extra=takes(ExtendBody, required=False),
    responses={200: {"model": LeaseAnswer}, **problem_responses(400, 404, 409, 410, 413, 415, 429)},
)
async def extend_batch(batch_id: str, post: PostDep) -> Response:
    async def act(body: bytes) -> Response:
        asked = await read_as(ExtendBody, body)
        await post.gateway.owner(batch_id, post.tenant, kind="batch")
        return answer(LeaseAnswer(batch_id=batch_id, lease_until=await post.gateway.batches.extend(batch_id, asked.lease_s)))

    return await post.once(act)
