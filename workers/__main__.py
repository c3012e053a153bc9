"""`python -m workers`: settings, signals, wiring. One worker process."""

import asyncio
import logging
import os
import signal
import socket
from contextlib import AsyncExitStack

import aiohttp
import prometheus_client
import uvloop

from service.groups import Groups
from service.jobs import Jobs
from service.leases import Leases
from service.settings import Settings
from service.store import Store, open_store
from service.weight_store import WeightStore
from workers import metrics
from workers.backends import open_backends
from workers.resources import JobContexts, Resources
from workers.worker import Worker, current_rollout, longest_leave_s

logger = logging.getLogger(__name__)


class RolloutFilter(logging.Filter):
    """Puts the rollout's id on every line logged while it is driven."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.rollout_id = current_rollout.get()
        return True


def set_up_logging() -> None:
    handler = logging.StreamHandler()
    handler.addFilter(RolloutFilter())
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s [%(rollout_id)s] %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)


async def run(settings: Settings) -> bool:
    """Work until a signal; whether all has ended within the grace time. What an engine holds up past it is left to other workers' sweeps:
    by then every rollout was handed back."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with open_store(settings) as store:
        working, told = asyncio.create_task(work(settings, store, stopping)), asyncio.create_task(stopping.wait())
        await asyncio.wait((working, told), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        await asyncio.wait((working,), timeout=longest_leave_s(settings.grace_s))
        if working.done():
            working.result()
        return working.done()


async def work(settings: Settings, store: Store, stopping: asyncio.Event) -> None:
    """One worker's life, with all that it opens and closes."""
    async with AsyncExitStack() as stack:
        jobs = Jobs(store, retain_s=settings.retain_s)
        deployment_id = settings.deployment_id or await store.deployment_id()
        name = f"{socket.gethostname()}-{os.getpid()}"
        backends = await open_backends(settings, deployment_id, stack, worker=name)
        prometheus_client.REGISTRY.register(metrics.SandboxCounts(backends.limits, backends.pools))
        resources = Resources(
            settings=settings,
            worker=name,
            deployment_id=deployment_id,
            leases=Leases(store, lease_s=settings.lease_s, max_attempts=settings.max_attempts),
            groups=Groups(store, retain_s=settings.retain_s),
            contexts=await stack.enter_async_context(JobContexts(settings, jobs, WeightStore(store))),
            backends=backends.offered,
            http=await stack.enter_async_context(aiohttp.ClientSession()),
            verifying=asyncio.Semaphore(settings.verify_concurrency),
            stopping=stopping,
        )
        worker = Worker(store, jobs, resources)
        logger.info("worker %s: %d slots, sandboxes: %s", worker.name, settings.worker_rollouts, ", ".join(resources.backends) or "none")
        await worker.run()
    logger.info("worker %s left", name)


def main() -> None:
    set_up_logging()
    settings = Settings()
    if settings.worker_metrics_port is not None:
        prometheus_client.start_http_server(settings.worker_metrics_port, addr="127.0.0.1")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if not runner.run(run(settings)):
            logger.warning("left after %g s: what was still being removed is left to the sweep", settings.grace_s)
            logging.shutdown()
            os._exit(0)  # the runner would wait for what is held up


if __name__ == "__main__":
    main()
