"""Weight updates: begun, watched, finished, abandoned. They take seconds to minutes, so each call is answered at once and asked about."""

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from service.bodies import read_as
from service.errors import FieldProblem, GeneratorError, InvalidError, NotFoundError
from service.gateway import Gateway, GatewayDep, PostDep, Tenant
from service.generator_control import GeneratorControl, label_of
from service.generators import NotFoundHereError
from service.keys import job_of
from service.problems import problem_responses
from service.records import GeneratorSpec
from service.routes.answers import answer
from service.routes.jobs import load_chat
from service.routes.requests import MAX_WAIT_S, AbandonBody, EmptyBody, WeightUpdateBody, takes
from service.weight_records import Said, UpdateState, Wanted, WeightUpdate

router = APIRouter(prefix="/v1", tags=["weights"])

LOOK_S = 2.0
"""For a generator to say which weights it has; one that does not will miss the update, and is told of there."""

AT_ONCE = 64
MIN_POLL_S, MAX_POLL_S = 0.02, 0.25

RESTS = frozenset({UpdateState.PAUSED, UpdateState.DONE, UpdateState.FAILED})
"""What does not go on by itself."""

WaitS = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="until it is paused, done or failed")]


class GeneratorPartAnswer(BaseModel):
    url: str
    state: UpdateState
    detail: str = Field(description="why it failed: it gets no work until its weights are loaded anew under the job's label")


class WeightUpdateAnswer(BaseModel):
    """One update. `lineage.version` is what its generators are labelled with."""

    update_id: str
    state: UpdateState
    version: int
    lineage: int
    rollback: bool
    from_disk: str | None
    mode: str
    flush_cache: bool
    timeout_s: float
    began_at: float
    phase_ends_at: float | None = Field(description="unix time at which the present phase is given up; null: it is over")
    ended_at: float | None
    reason: str = Field(description="why it failed")
    weights: Said | None = Field(description="what the trainer said of them when it gave up")
    generators: list[GeneratorPartAnswer]


def update_answer(update: WeightUpdate, status: int = 200) -> Response:
    fields: dict[str, Any] = {name: getattr(update, name) for name in WeightUpdateAnswer.model_fields if hasattr(update, name)}
    fields |= {"weights": update.said, "phase_ends_at": None if update.state.over else update.deadline}
    fields["generators"] = [GeneratorPartAnswer(url=url, state=part.state, detail=part.detail) for url, part in update.parts.items()]
    return answer(WeightUpdateAnswer(**fields), status, location=f"/v1/weight_updates/{update.update_id}" if status == 202 else None)


@router.post(
    "/jobs/{job_id}/weight_updates",
    status_code=202,
    summary="Begin a weight update",
    description=(
        "Generators are paused the job's way (weight_update). With from_disk they load that path, are labelled and go on, and the policy "
        "version follows; else the state becomes paused, the trainer moves the weights and says finish. While another runs: 409."
    ),
    openapi_extra=takes(WeightUpdateBody),
    responses={202: {"model": WeightUpdateAnswer}, **problem_responses(400, 404, 409, 413, 415, 429)},
)
async def begin_update(job_id: str, post: PostDep) -> Response:
    async def act(body: bytes) -> Response:
        asked = await read_as(WeightUpdateBody, body)
        gateway = post.gateway
        await gateway.job(job_id, post.tenant)
        known = await gateway.weights.known(job_id)
        spec = known.spec
        wanted = Wanted(
            version=asked.version,
            from_disk=asked.from_disk,
            rollback=asked.rollback,
            timeout_s=asked.timeout_s,
            mode=spec.weight_update,
            flush_cache=spec.flush_cache if asked.flush_cache is None else asked.flush_cache,
            request=post.key,
        )
        gateway.updates.check(known, wanted)
        chat = await load_chat(gateway, spec)
        labels = await labels_of(gateway, spec.generator_specs, vocab_size=chat.vocab_size)
        return update_answer(await gateway.updates.begin(known, wanted, labels), 202)

    return await post.once(act)


async def labels_of(gateway: Gateway, specs: list[GeneratorSpec], *, vocab_size: int) -> dict[str, str | None]:
    """Which weights each generator says it has; None: it says nothing now.

    Raises:
        InvalidError: one of them cannot take weights, or is not of the others' model.
    """
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(spec: GeneratorSpec) -> list[dict[str, Any]] | NotFoundHereError:
        async with places:
            try:
                return await GeneratorControl(gateway.http, spec).infos(timeout_s=LOOK_S)
            except NotFoundHereError as error:
                return error
            except GeneratorError:
                return []

    found = await asyncio.gather(*map(ask, specs))
    problems, labels = [], {}
    kinds = [kind_of(info) for infos in found if isinstance(infos, list) for info in infos]
    for number, (spec, infos) in enumerate(zip(specs, found, strict=True)):
        if isinstance(infos, NotFoundHereError):
            problem = "it has no /model_info: a router passes no weights on; name the workers behind it as control_urls"
            problems.append(FieldProblem(field=f"generators.{number}.control_urls", problem=problem))
            continue
        if any(kind_of(info) != kinds[0] for info in infos):
            problem = f"it serves another model than the job's other generators ({kind_of(infos[0])}, not {kinds[0]}): take it out"
            problems.append(FieldProblem(field=f"generators.{number}.url", problem=problem))
        sizes = {size for info in infos if isinstance(size := info.get("vocab_size"), int)}
        if sizes and min(sizes) < vocab_size:
            problem = f"it has {min(sizes)} token ids and the job's tokenizer {vocab_size}: it serves a model of another tokenizer"
            problems.append(FieldProblem(field=f"generators.{number}.url", problem=problem))
        labels[spec.url] = label_of(infos)
    if problems:
        raise InvalidError("some generators cannot take part in a weight update", fields=problems)
    return labels


def kind_of(info: dict[str, Any]) -> str:
    """What stays the same when weights move."""
    architectures = info.get("architectures")
    return " ".join([str(info.get("model_type")), *map(str, architectures if isinstance(architectures, list) else ())])


@router.get(
    "/weight_updates/{update_id}",
    summary="An update, per generator",
    responses={200: {"model": WeightUpdateAnswer}, **problem_responses(404)},
)
async def get_update(update_id: str, gateway: GatewayDep, tenant: Tenant, wait_s: WaitS = 0.0) -> Response:
    await owned(gateway, update_id, tenant)
    ends_at, poll_s = time.monotonic() + wait_s, MIN_POLL_S
    while True:
        update = await gateway.weights.update(update_id)
        left_s = ends_at - time.monotonic()
        if update.state in RESTS or left_s <= 0 or await gateway.streams.pause(min(poll_s, left_s)):
            return update_answer(update)
        poll_s = min(poll_s * 1.5, MAX_POLL_S)


@router.post(
    "/weight_updates/{update_id}/finish",
    status_code=202,
    summary="The weights are there: label, go on, bump; again changes nothing",
    openapi_extra=takes(EmptyBody, required=False),
    responses={202: {"model": WeightUpdateAnswer}, **problem_responses(400, 404, 409, 413, 415, 429)},
)
async def finish_update(update_id: str, post: PostDep) -> Response:
    async def act(body: bytes) -> Response:
        await read_as(EmptyBody, body)
        await owned(post.gateway, update_id, post.tenant)
        return update_answer(await post.gateway.updates.finish(update_id), 202)

    return await post.once(act)


@router.post(
    "/weight_updates/{update_id}/abandon",
    status_code=202,
    summary="Give up; again changes nothing",
    description="untouched: the generators go on under their old label. moved: they get no work until weights are loaded anew.",
    openapi_extra=takes(AbandonBody),
    responses={202: {"model": WeightUpdateAnswer}, **problem_responses(400, 404, 409, 413, 415, 429)},
)
async def abandon_update(update_id: str, post: PostDep) -> Response:
    async def act(body: bytes) -> Response:
        asked = await read_as(AbandonBody, body)
        await owned(post.gateway, update_id, post.tenant)
        return update_answer(await post.gateway.updates.abandon(update_id, asked.weights), 202)

    return await post.once(act)


async def owned(gateway: Gateway, update_id: str, tenant: str) -> None:
    """Raises NotFoundError: unknown, malformed, another tenant's, or of a job that is gone, all in the same words."""
    record = await gateway.owner(update_id, tenant, kind="weight update")
    if f"{job_of(update_id)}-u" not in update_id or record.deleted:
        raise NotFoundError(f"there is no weight update {update_id!r}")
