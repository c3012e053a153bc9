"""Jobs: create, read, change, delete, preflight; and their policy version."""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.bodies import parse_object, read_as, validated
from service.chat import ChatModel, load_chat_model
from service.errors import FieldProblem, InvalidError, NotFoundError
from service.gateway import Gateway, GatewayDep, PostDep, Tenant, check_urls
from service.jobs import JobRecord
from service.keys import job_of
from service.preflight import (
    Finding,
    disk_limits,
    generator_findings,
    image_findings,
    redis_findings,
    tokenizer_findings,
    unwell_findings,
    weight_findings,
    worker_findings,
)
from service.problems import problem_responses
from service.records import GeneratorSpec, JobPatch, JobSpec, SandboxFields
from service.routes.answers import JobAnswer, JobsAnswer, PreflightAnswer, answer, job_answer
from service.routes.requests import EmptyBody, PolicyBody, takes
from service.submissions import check_defaults, default_problems

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


async def load_chat(gateway: Gateway, spec: JobSpec) -> ChatModel:
    """The job's tokenizer and renderer; loading is blocking and cached per process."""
    return await asyncio.to_thread(load_chat_model, spec.model.tokenizer, spec.model.renderer, settings=gateway.settings)


async def check_generators(gateway: Gateway, specs: list[GeneratorSpec]) -> None:
    urls = {spec.url: f"generators.{number}.url" for number, spec in enumerate(specs)}
    urls |= {url: f"generators.{n}.control_urls.{m}" for n, spec in enumerate(specs) for m, url in enumerate(spec.control_urls)}
    await check_urls(gateway, urls)


@router.post(
    "",
    status_code=201,
    summary="Create a job; the same name and spec again is the same job",
    openapi_extra=takes(JobSpec),
    responses={201: {"model": JobAnswer}, 200: {"model": JobAnswer}, **problem_responses(400, 409, 413, 415, 429)},
)
async def create_job(post: PostDep) -> Response:
    async def act(body: bytes) -> Response:
        gateway = post.gateway
        spec = await read_job(body)
        check_defaults(spec, gateway.settings)
        await check_generators(gateway, spec.generator_specs)
        await load_chat(gateway, spec)
        record, created = await gateway.jobs.create(post.tenant, spec)
        warnings = await generator_findings(gateway.http, spec.generator_specs, context_tokens=spec.model.context_tokens)
        warnings += await image_findings(gateway.store, {"sandbox": SandboxFields.model_validate(spec.sandbox)})
        body_model = job_answer(record, await gateway.jobs.counts(record.job_id), warnings=warnings)
        return answer(body_model, 201 if created else 200, location=f"/v1/jobs/{record.job_id}")

    return await post.once(act)


async def read_job(raw: bytes) -> JobSpec:
    """Raises InvalidError with every wrong field, those inside the defaults for tasks too."""
    try:
        return await read_as(JobSpec, raw)
    except InvalidError as error:
        fields = [*error.fields, *default_problems(parse_object(raw))]
        raise InvalidError(error.detail, fields=fields) from None


@router.get("", summary="The tenant's jobs", responses={200: {"model": JobsAnswer}, **problem_responses()})
async def list_jobs(gateway: GatewayDep, tenant: Tenant) -> Response:
    return answer(JobsAnswer(jobs=[job_answer(record) for record in await gateway.jobs.list(tenant)]))


@router.get("/{job_id}", summary="A job with live counts", responses={200: {"model": JobAnswer}, **problem_responses(404)})
async def get_job(job_id: str, gateway: GatewayDep, tenant: Tenant) -> Response:
    record = await gateway.job(job_id, tenant)
    warnings = await unwell_findings(gateway.store, job_id) + weight_findings(await gateway.weights.read(job_id))
    return answer(job_answer(record, await gateway.jobs.counts(job_id), warnings=warnings))


@router.patch(
    "/{job_id}",
    summary="Change budget, limits, generators; what is left out stays",
    openapi_extra=takes(JobPatch),
    responses={200: {"model": JobAnswer}, **problem_responses(400, 404, 409, 413, 415, 429)},
)
async def patch_job(job_id: str, request: Request, gateway: GatewayDep, tenant: Tenant) -> Response:
    record = await gateway.job(job_id, tenant)
    async with gateway.bodies.held(request) as raw:
        patch = await read_patch(raw)
    await check_patch(gateway, record, patch)
    patched = await gateway.jobs.patch(job_id, patch)
    if patch.generators is not None:
        await gateway.updates.patched(job_id, record.spec.generator_specs)
    return answer(job_answer(patched, await gateway.jobs.counts(job_id)))


async def read_patch(raw: bytes) -> JobPatch:
    """Raises InvalidError; fields that only a new job can have otherwise are told apart from unknown ones."""
    try:
        return await read_as(JobPatch, raw)
    except InvalidError as error:
        fixed = JobSpec.model_fields.keys() - JobPatch.model_fields.keys()
        problem = "cannot change after creation; make a new job"
        fields = [FieldProblem(field=f.field, problem=problem) if f.field in fixed else f for f in error.fields]
        raise InvalidError(error.detail, fields=fields) from None


async def check_patch(gateway: Gateway, record: JobRecord, patch: JobPatch) -> None:
    """The job as it would be must be one that could be created."""
    changes = patch.model_dump(exclude_unset=True)
    nulls = [name for name, value in changes.items() if value is None and name not in JobPatch.nullable]
    if nulls:
        problems = [FieldProblem(field=name, problem="may not be null; leave it out if it shall stay") for name in nulls]
        raise InvalidError("some fields are wrong", fields=problems)
    spec = validated(JobSpec, record.spec.model_dump() | changes)
    check_defaults(spec, gateway.settings)
    if patch.generators is not None:
        await gateway.updates.check_patch(record.job_id)
        await check_generators(gateway, spec.generator_specs)


@router.delete(
    "/{job_id}",
    status_code=204,
    summary="Cancel everything and free it",
    responses={204: {"description": "gone"}, **problem_responses(404)},
)
async def delete_job(job_id: str, gateway: GatewayDep, tenant: Tenant) -> Response:
    await gateway.job(job_id, tenant)
    await gateway.jobs.delete(job_id)
    await gateway.updates.deleted(job_id)
    return Response(status_code=204)


@router.post(
    "/{job_id}/preflight",
    summary="What would fail later, with the cure",
    openapi_extra=takes(EmptyBody, required=False),
    responses={200: {"model": PreflightAnswer}, **problem_responses(400, 404, 409, 413, 415, 429)},
)
async def preflight(job_id: str, post: PostDep) -> Response:
    async def act(body: bytes) -> Response:
        await read_as(EmptyBody, body)
        record = await post.gateway.job(job_id, post.tenant)
        findings = await find(post.gateway, record.spec)
        ok = all(finding.severity != "error" for finding in findings)
        return answer(PreflightAnswer(ok=ok, findings=findings, disk_limits=disk_limits(await post.gateway.store.workers())))

    return await post.once(act)


async def find(gateway: Gateway, spec: JobSpec) -> list[Finding]:
    """All findings of a job; a tokenizer that cannot be loaded (any more) is one of them."""
    specs = spec.generator_specs
    findings = await generator_findings(gateway.http, specs, context_tokens=spec.model.context_tokens)
    try:
        findings += await tokenizer_findings(gateway.http, specs, await load_chat(gateway, spec))
    except InvalidError as error:
        cure = "put it back where it was; running workers have it loaded"
        findings.append(Finding(severity="error", field="model.tokenizer", problem=error.detail, cure=cure))
    return findings + await worker_findings(gateway.store, spec) + await redis_findings(gateway.store)


@router.put(
    "/{job_id}/policy",
    summary="The trainer has published weights",
    openapi_extra=takes(PolicyBody),
    responses={200: {"model": JobAnswer}, **problem_responses(400, 404, 409, 410, 413, 415, 429)},
)
async def set_policy(job_id: str, request: Request, gateway: GatewayDep, tenant: Tenant) -> Response:
    await gateway.job(job_id, tenant)
    async with gateway.bodies.held(request) as raw:
        body = await read_as(PolicyBody, raw)
    for batch_id in body.ack:
        if job_of(batch_id) != job_id:
            raise NotFoundError(f"there is no batch {batch_id!r} in this job")
    record = await gateway.jobs.set_policy(job_id, body.version, ack=body.ack, rollback=body.rollback)
    return answer(job_answer(record, await gateway.jobs.counts(job_id)))
