"""What the routes share: the resources of one gateway, who owns an id, and how a POST is answered once."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import aiohttp
from fastapi import Depends, Header, Request
from starlette.responses import Response

from service.batches import Batches
from service.bodies import Bodies, off_loop
from service.errors import FieldProblem, InvalidError, NotFoundError
from service.events import EventStreams
from service.export import Exporter
from service.groups import Groups
from service.idempotency import Idempotency, RequestKey
from service.jobs import JobRecord, Jobs
from service.keys import job_of
from service.leases import Leases
from service.metrics import Metrics
from service.rates import Rates
from service.settings import Settings
from service.store import Store
from service.urls import UrlGuard
from service.weight_store import WeightStore
from service.weight_updates import WeightUpdates


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Everything a route may use; made in the app's lifespan."""

    settings: Settings
    store: Store
    jobs: Jobs
    groups: Groups
    leases: Leases
    batches: Batches
    rates: Rates
    weights: WeightStore
    updates: WeightUpdates
    exporter: Exporter
    idempotency: Idempotency
    bodies: Bodies
    streams: EventStreams
    metrics: Metrics
    urls: UrlGuard
    http: aiohttp.ClientSession

    async def job(self, job_id: str, tenant: str) -> JobRecord:
        """The tenant's job.

        Raises:
            NotFoundError: unknown, malformed or another tenant's, all in the same words.
        """
        try:
            return await self.jobs.get(job_id, tenant=tenant)
        except NotFoundError:
            raise NotFoundError(f"there is no job {job_id!r}") from None

    async def owner(self, any_id: str, tenant: str, *, kind: str) -> JobRecord:
        """The tenant's job that a group, rollout or batch belongs to.

        Raises:
            NotFoundError: as `job`.
        """
        try:
            return await self.jobs.get(job_of(any_id), tenant=tenant)
        except NotFoundError:
            raise NotFoundError(f"there is no {kind} {any_id!r}") from None


async def gateway_of(request: Request) -> Gateway:
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


async def tenant_of(request: Request) -> str:
    tenant = request.state.caller.tenant
    assert isinstance(tenant, str)  # the middleware lets no caller without a tenant reach /v1
    return tenant


GatewayDep = Annotated[Gateway, Depends(gateway_of)]
Tenant = Annotated[str, Depends(tenant_of)]
IdempotencyKey = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=255, description="same key and body: the first answer again"),
]

Act = Callable[[bytes], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """One POST: its tenant, its key, and its body still to be read."""

    gateway: Gateway
    tenant: str
    request: Request
    key: str | None

    async def once(self, act: Act, *, replay: bool = True, small: bool = True) -> Response:
        """Answer with `act(body)`; with an Idempotency-Key, with its first answer. `replay` False: `act` finds that answer itself.
        `small`: the body is bounded by `SMALL_BYTES`.

        Raises:
            RequestError: the body cannot be read, or the key came before with another body.
        """
        async with self.gateway.bodies.held(self.request, small=small) as body:
            if self.key is None:
                return await act(body)
            call = f"{self.request.method} {self.request.url.path}"
            make_key = partial(RequestKey.of, tenant=self.tenant, call=call, key=self.key, body=body)
            key = await off_loop(len(body), make_key)
            return await self.gateway.idempotency.run(key, lambda: act(body), replay=replay)


async def posted(request: Request, gateway: GatewayDep, tenant: Tenant, key: IdempotencyKey = None) -> Post:
    return Post(gateway=gateway, tenant=tenant, request=request, key=key)


PostDep = Annotated[Post, Depends(posted)]


async def check_urls(gateway: Gateway, urls: dict[str, str]) -> None:
    """Guard URLs (each with the field that names it) that a client wants called.

    Raises:
        InvalidError: naming every URL that is refused.
    """
    problems = []
    for url, field in urls.items():
        wrong = await gateway.urls.problem(url)
        if wrong is not None:
            problems.append(FieldProblem(field=field, problem=wrong))
    if problems:
        raise InvalidError("some URLs are refused", fields=problems)
