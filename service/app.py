"""`create_app(settings)`: the gateway as an ASGI application. Its resources live in its lifespan."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from service import openapi, problems
from service.auth import Auth, AuthMiddleware, is_loopback
from service.batches import Batches
from service.bodies import Bodies
from service.events import EventStreams
from service.export import Exporter
from service.gateway import Gateway
from service.generators import open_session
from service.groups import Groups
from service.idempotency import Idempotency
from service.jobs import Jobs
from service.leases import Leases
from service.metrics import Metrics, MetricsMiddleware
from service.rates import Rates
from service.routes import batches, groups, jobs, rollouts, solve_rates, system, tasks, throughput, weights
from service.settings import Settings
from service.store import Store, open_store
from service.urls import UrlGuard
from service.weight_store import WeightStore
from service.weight_updates import WeightUpdates

DESCRIPTION = "Durable, trainer-neutral rollouts for RL with tools."


def create_app(
    settings: Settings, *, host: str = "127.0.0.1", store: Store | None = None, stopping: asyncio.Event | None = None
) -> FastAPI:
    """The gateway that will listen on `host`.

    store: an open one to use; by default the app opens its own and closes it. stopping: set it to end streams and long polls at once.
    """
    metrics = Metrics()
    stop = stopping or asyncio.Event()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            opened = store if store is not None else await stack.enter_async_context(open_store(settings))
            app.state.gateway = await open_gateway(settings, opened, stack, host=host, metrics=metrics, stopping=stop)
            yield
            stop.set()

    app = FastAPI(title="Rollway", version=version("rollway"), description=DESCRIPTION, lifespan=lifespan, redirect_slashes=False)
    for module in (system, jobs, tasks, groups, rollouts, batches, solve_rates, throughput, weights):
        app.include_router(module.router)
    app.add_middleware(AuthMiddleware, auth=Auth(settings))
    app.add_middleware(MetricsMiddleware, metrics=metrics)
    problems.install(app)
    openapi.install(app)
    return app


async def open_gateway(
    settings: Settings, store: Store, stack: AsyncExitStack, *, host: str, metrics: Metrics, stopping: asyncio.Event
) -> Gateway:
    """The resources of one gateway; what needs closing is put on `stack`."""
    record_groups = Groups(store, retain_s=settings.retain_s)
    weights = WeightStore(store)
    http = await stack.enter_async_context(open_session())
    updates = WeightUpdates(weights, http)
    await stack.enter_async_context(updates.driving())
    leases = Leases(store, lease_s=settings.lease_s, max_attempts=settings.max_attempts)
    return Gateway(
        settings=settings,
        store=store,
        jobs=Jobs(store, retain_s=settings.retain_s),
        groups=record_groups,
        leases=leases,
        batches=Batches(store, retain_s=settings.retain_s),
        rates=Rates(store),
        weights=weights,
        updates=updates,
        exporter=Exporter(record_groups, leases, metrics),
        idempotency=Idempotency(store, retain_s=settings.retain_s),
        bodies=Bodies(max_bytes=settings.max_body_bytes),
        streams=EventStreams(limit=settings.max_event_streams, stopping=stopping, metrics=metrics),
        metrics=metrics,
        urls=UrlGuard(allowed=settings.allowed_urls, loopback=is_loopback(host)),
        http=http,
    )
