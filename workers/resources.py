"""What a worker's rollouts share: the store, the sandbox backends, and per job its chat model and generator pool."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp

from sandboxes.base import SandboxBackend
from service.chat import ChatModel, load_chat_model
from service.errors import NotFoundError, UnavailableError
from service.generator_pool import GeneratorPool
from service.groups import Groups
from service.jobs import JobRecord, Jobs
from service.leases import Leases
from service.settings import Settings
from service.weight_store import WeightStore

logger = logging.getLogger(__name__)

REFRESH_S = 1.0
"""How old a job's version, generators and their weights may be: a version read late is only a lower bound, which is what it is used for;
and a generator that is held or in quarantine by now answers nothing, or under a label that is true."""

MAX_UNWELL = 16
"""Generators of one job that a heartbeat names."""


@dataclass(slots=True)
class JobContext:
    """One job as this worker runs it. `record` is renewed at most every REFRESH_S seconds."""

    record: JobRecord
    chat: ChatModel
    pool: GeneratorPool
    read_at: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)


class JobContexts:
    """The contexts of the jobs this worker has rollouts of. Entering yields it; leaving closes every pool."""

    def __init__(self, settings: Settings, jobs: Jobs, weights: WeightStore) -> None:
        self._settings = settings
        self._jobs = jobs
        self._weights = weights
        self._contexts: dict[str, JobContext] = {}
        self._loading: dict[str, asyncio.Lock] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for context in self._contexts.values():
            await context.pool.__aexit__(None, None, None)
        self._contexts.clear()

    async def get(self, job_id: str, *, fresh: bool = False) -> JobContext:
        """The job's context, loaded once and refreshed. fresh: as it is from now on; many that ask at once are served by one look.

        Raises:
            InvalidError: its tokenizer or renderer cannot be loaded here.
            NotFoundError: the job is gone.
        """
        asked_at = time.monotonic()
        async with self._loading.setdefault(job_id, asyncio.Lock()):
            context = self._contexts.get(job_id)
            if context is None:
                context = self._contexts[job_id] = await self._load(job_id)
            elif time.monotonic() - context.read_at > REFRESH_S or (fresh and context.read_at < asked_at):
                await self._refresh(context)
            context.used_at = time.monotonic()
            return context

    async def _load(self, job_id: str) -> JobContext:
        record, weights = await self._jobs.get(job_id), await self._weights.read(job_id)
        model = record.spec.model
        chat = await asyncio.to_thread(load_chat_model, model.tokenizer, model.renderer, settings=self._settings)
        pool = GeneratorPool(record.spec.generator_specs, vocab_size=chat.vocab_size, stop_token_ids=chat.stop_token_ids)
        await pool.__aenter__()
        pool.take(weights)
        return JobContext(record=record, chat=chat, pool=pool)

    async def _refresh(self, context: JobContext) -> None:
        job_id, asked_at = context.record.job_id, time.monotonic()
        try:
            record, weights = await self._jobs.get(job_id), await self._weights.read(job_id)
        except UnavailableError as error:
            logger.warning("job %s not refreshed: %s", job_id, error)  # an old version is still a lower bound
            return
        if record.spec.generators != context.record.spec.generators:
            context.pool.update(record.spec.generator_specs)
        context.pool.take(weights)
        context.record, context.read_at = record, asked_at

    async def refresh(self) -> None:
        """Take up what changed in the jobs: calls that wait for a generator go to a new one without asking again."""
        for context in list(self._contexts.values()):
            try:
                await self._refresh(context)
            except NotFoundError:
                continue  # `forget` closes it once its rollouts are gone

    def open(self) -> list[JobContext]:
        """Those there are now."""
        return list(self._contexts.values())

    def unwell(self) -> dict[str, list[str]]:
        """Per job, what is wrong with its generators that do not answer this worker: calls wait for them."""
        return {
            job_id: problems
            for job_id, context in self._contexts.items()
            if (
                problems := [f"{each['url']}: {each['last_error'][:300]}" for each in context.pool.status() if not each["well"]][
                    :MAX_UNWELL
                ]
            )
        }

    async def forget(self, job_ids: frozenset[str]) -> None:
        """Close the contexts of jobs that are not in `job_ids` any more."""
        for job_id in [job_id for job_id in self._contexts if job_id not in job_ids]:
            context = self._contexts.pop(job_id)
            self._loading.pop(job_id, None)
            await context.pool.__aexit__(None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Everything a rollout needs, passed down from the roof."""

    settings: Settings
    worker: str
    """This worker's name, unique among live ones."""
    deployment_id: str
    """On every sandbox of ours, and on no other."""
    leases: Leases
    groups: Groups
    contexts: JobContexts
    backends: dict[str, SandboxBackend]
    http: aiohttp.ClientSession
    verifying: asyncio.Semaphore
    """Bounds verifications that run at once."""
    stopping: asyncio.Event
    """Set when the worker leaves: rollouts are handed back at their next step."""
