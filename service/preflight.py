"""What would fail later in a job, found now: each finding names the field and the cure."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import aiohttp
from pydantic import BaseModel, ValidationError

from service.chat import ChatModel
from service.errors import GeneratorError
from service.generators import GeneratorClient
from service.records import GeneratorSpec, JobSpec, SandboxFields
from service.store import Store
from service.weight_records import JobWeights, Standing

ASK_S = 2.0
"""A generator that needs longer to describe itself is not well."""
MAX_ASKED = 32
"""Generators asked at once; a job may name a thousand."""


class Finding(BaseModel):
    """One thing that would fail (`error`) or may surprise (`warning`)."""

    severity: Literal["error", "warning"]
    field: str
    problem: str
    cure: str


async def generator_findings(http: aiohttp.ClientSession, specs: Sequence[GeneratorSpec], *, context_tokens: int) -> list[Finding]:
    """Reachability and context length of every generator, asked side by side."""
    places = asyncio.Semaphore(MAX_ASKED)

    async def ask(number: int, spec: GeneratorSpec) -> list[Finding]:
        async with places:
            return await _generator(GeneratorClient(http, spec), f"generators.{number}.url", context_tokens)

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(number, spec)) for number, spec in enumerate(specs)]
    return [finding for task in asked for finding in task.result()]


async def _generator(client: GeneratorClient, field: str, context_tokens: int) -> list[Finding]:
    url = client.spec.url
    if not await _is_ready(client):
        cure = "start it, or correct the URL; rollouts wait until it answers"
        return [Finding(severity="error", field=field, problem=f"the generator at {url} does not answer", cure=cure)]
    try:
        async with asyncio.timeout(ASK_S):
            info = await client.server_info()
    except (GeneratorError, TimeoutError):
        cure = "nothing to do if it is a router; else look at its log"
        problem = f"the generator at {url} does not describe itself (/server_info), so its context length is not known"
        return [Finding(severity="warning", field=field, problem=problem, cure=cure)]
    return _context(info, field, context_tokens)


async def _is_ready(client: GeneratorClient) -> bool:
    try:
        async with asyncio.timeout(ASK_S):
            return await client.ready()
    except TimeoutError:
        return False


def _context(info: dict[str, Any], field: str, context_tokens: int) -> list[Finding]:
    """A generator must hold the job's whole context; SGLang refuses or silently cuts what does not fit."""
    limits = [info.get(name) for name in ("context_length", "max_req_input_len")]
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    if not known or min(known) >= context_tokens - 8:  # SGLang's input bound is a few tokens under its context
        return []
    cure = f"lower model.context_tokens to {min(known)}, or start it with a longer --context-length"
    problem = f"it holds {min(known)} tokens and the job's model.context_tokens is {context_tokens}"
    return [Finding(severity="error", field=field, problem=problem, cure=cure)]


async def tokenizer_findings(http: aiohttp.ClientSession, specs: Sequence[GeneratorSpec], chat: ChatModel) -> list[Finding]:
    """The first generator that says its vocabulary's size must agree with the job's tokenizer: ids above it would end the engine."""
    for number, spec in enumerate(specs[:MAX_ASKED]):
        try:
            async with asyncio.timeout(ASK_S):
                info = await GeneratorClient(http, spec).info()
        except (GeneratorError, TimeoutError):
            continue
        size = info.get("vocab_size")
        if isinstance(size, int) and size < chat.vocab_size:
            problem = f"generator {number} has {size} token ids and the job's tokenizer {chat.vocab_size}"
            return [
                Finding(severity="error", field="model.tokenizer", problem=problem, cure="name the tokenizer that belongs to the model")
            ]
    return []


async def worker_findings(store: Store, spec: JobSpec) -> list[Finding]:
    """A live worker, one that has the sandbox backend of the job's defaults, and the image of these."""
    workers = await store.workers()
    if not workers:
        cure = "start one: rollway worker, or rollway serve --workers 1"
        return [Finding(severity="error", field="sandbox.backend", problem="no worker is alive, so nothing will run", cure=cure)]
    try:
        sandbox = SandboxFields.model_validate(spec.sandbox)
    except ValidationError:
        return []  # refused at creation; a job of an older version may still hold such defaults, and its tasks name the field
    if any(sandbox.backend in info.get("backends", ()) for info in workers):
        return [*limit_findings(workers, sandbox), *await image_findings(store, {"sandbox": sandbox})]
    cure = "start a worker where that backend is reachable; its log says at start which backends it found"
    problem = f"no live worker has the sandbox backend {sandbox.backend!r}; tasks with tools would wait"
    return [Finding(severity="error", field="sandbox.backend", problem=problem, cure=cure)]


def disk_limits(workers: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """How each backend bounds `disk_mib`, in the live workers' words: one sentence, unless their machines differ."""
    told: dict[str, set[str]] = {}
    for info in workers:
        for backend, limit in info.get("disk", {}).items():
            told.setdefault(backend, set()).add(limit)
    return {backend: sorted(limits) for backend, limits in sorted(told.items())}


def limit_findings(workers: Sequence[Mapping[str, Any]], sandbox: SandboxFields) -> list[Finding]:
    """What may surprise about the limits of the job's default sandbox, as the live workers say: how its disk is bounded, its network."""
    findings = []
    for limit in (limit for limit in disk_limits(workers).get(sandbox.backend, []) if not limit.startswith("quota")):
        problem = f"{sandbox.backend} bounds disk_mib by {limit}"
        cure = "nothing to do if that is enough; else read_only: true (sized tmpfs), or an engine whose storage has quotas"
        findings.append(Finding(severity="warning", field="sandbox.disk_mib", problem=problem, cure=cure))
    if sandbox.network == "open":
        problem = "the sandboxes reach whatever their machine reaches: its network's other machines and metadata services too"
        cure = "use 'none' unless the tasks need it, and keep workers in a network without secrets"
        findings.append(Finding(severity="warning", field="sandbox.network", problem=problem, cure=cure))
    return findings


async def image_findings(store: Store, wanted: Mapping[str, SandboxFields]) -> list[Finding]:
    """Images (by the field that names them) that no live worker has: they are pulled at their first use, which may fail."""
    workers = await store.workers()
    at_hand: dict[str, set[str]] = {}
    for info in workers:
        for backend, images in info.get("images", {}).items():
            at_hand.setdefault(backend, set()).update(images)
    return [
        Finding(
            severity="warning",
            field=f"{field}.image",
            problem=f"no live worker has the image {sandbox.image!r}, so its first use pulls it",
            cure=f"docker pull {sandbox.image} on the workers' machines, or correct its name",
        )
        for field, sandbox in wanted.items()
        if sandbox.backend in at_hand and tagged(sandbox.image) not in at_hand[sandbox.backend]
    ]


async def unwell_findings(store: Store, job_id: str) -> list[Finding]:
    """The job's generators that do not answer the workers now, as these say: its rollouts wait for them."""
    problems = {problem for info in await store.workers() for problem in info.get("unwell_generators", {}).get(job_id, ())}
    cure = "start it, or PATCH generators; rollouts go on by themselves once it answers"
    return [Finding(severity="error", field="generators", problem=problem, cure=cure) for problem in sorted(problems)]


def weight_findings(weights: JobWeights) -> list[Finding]:
    """The job's generators that get no work, since their weights are not those of its version, or in doubt."""
    cure = "begin a weight update, or abandon the failed one with weights: untouched, if they are"
    return [
        Finding(severity="error", field="generators", problem=f"{url} is out of service: {generator.why}", cure=cure)
        for url, generator in sorted(weights.generators.items())
        if generator.standing is Standing.QUARANTINED
    ]


def tagged(image: str) -> str:
    """The reference as engines list it: with its tag, without the default registry."""
    name = image.removeprefix("docker.io/").removeprefix("library/")
    return name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"


async def redis_findings(store: Store) -> list[Finding]:
    """What `allow_lossy_redis` let through at start."""
    findings = []
    for server, info in (await store.infos()).items():
        named = f"Redis at {server}" if server else "Redis"
        if info["maxmemory_policy"] != "noeviction":
            problem = f"{named} evicts when its memory is full (maxmemory-policy {info['maxmemory_policy']})"
            findings.append(Finding(severity="warning", field="redis", problem=problem, cure="set maxmemory-policy noeviction"))
        if not info["aof_enabled"]:
            cure = "set appendonly yes, or accepted work is lost when Redis restarts"
            findings.append(Finding(severity="warning", field="redis", problem=f"{named} does not persist", cure=cure))
    return findings
