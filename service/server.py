"""`rollway serve`: the gateway under uvicorn, with worker processes beside it, and one orderly way out.

SIGTERM and SIGINT: event streams and long polls end at once, requests in hand get `grace_s`, then the workers are told to leave and get
`grace_s` of their own (and a little more, since they use theirs to hand back), then the store closes.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager

import uvicorn

from service.app import create_app
from service.auth import is_loopback
from service.errors import UnauthorizedError
from service.ports import listening
from service.settings import Settings
from service.store import open_store

logger = logging.getLogger(__name__)

RESTART_S, MAX_RESTART_S = 1.0, 30.0
"""A worker that ends by itself is started again after this, doubled each time it ends soon."""
STEADY_S = 60.0
"""A worker that lived this long was well: its next restart is quick again."""
KEEP_ALIVE_S = 75
"""Longer than clients pool an idle connection, so that it is they who close it."""
LEAVE_S = 5.0
"""What a worker may need beyond its own grace before it is killed."""

Say = Callable[[str], None]


class GatewayServer(uvicorn.Server):
    """uvicorn without signal handlers of its own (the process has more to stop than HTTP)."""

    def __init__(self, config: uvicorn.Config, *, stopping: asyncio.Event, say: Say) -> None:
        super().__init__(config)
        self._stopping = stopping
        self._say = say

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for server in self.servers if self.started else ():
            for sock in server.sockets:
                host, port = sock.getsockname()[:2]
                self._say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")

    def leave(self) -> None:
        """Stop accepting, end streams, finish what is in hand."""
        self._stopping.set()
        self.should_exit = True


def check_binding(settings: Settings, host: str) -> None:
    """Raises UnauthorizedError when the gateway would be open to others without keys."""
    if not settings.api_keys and not is_loopback(host):
        raise UnauthorizedError(
            f"refusing to listen on {host} without keys: set ROLLWAY_API_KEYS=tenant:key, or listen on 127.0.0.1 (--host 127.0.0.1)"
        )


async def serve(settings: Settings, *, host: str, port: int, workers: int, say: Say) -> None:
    """Run until a signal, or until uvicorn cannot go on.

    Raises:
        UnauthorizedError: no keys are configured and `host` is not loopback: anyone could run commands here.
        PortRefusedError: the port is in use.
        StoreRefusedError: the Redis would lose data.
        UnavailableError: it does not answer.
    """
    check_binding(settings, host)
    stopping = asyncio.Event()
    async with open_store(settings) as store:
        app = create_app(settings, host=host, store=store, stopping=stopping)
        config = uvicorn.Config(
            app,
            http="httptools",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(settings.grace_s)),
        )
        server = GatewayServer(config, stopping=stopping, say=say)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.leave)
        children = WorkerProcesses([worker_environment(settings, store.url, n) for n in range(workers)], leave_s=settings.grace_s + LEAVE_S)
        sockets = await asyncio.to_thread(listening, host, port)
        async with children.running(stopping):
            await server.serve(sockets=sockets)
            stopping.set()


def worker_environment(settings: Settings, redis_url: str, number: int) -> dict[str, str]:
    """Of the nth worker: our store, and a metrics port of its own."""
    env = {**os.environ, "ROLLWAY_REDIS_URL": redis_url}
    if settings.worker_metrics_port is not None:
        env["ROLLWAY_WORKER_METRICS_PORT"] = str(settings.worker_metrics_port + number)
    return env


class WorkerProcesses:
    """`python -m workers` children, one an environment, kept alive until told to leave."""

    def __init__(self, environments: Sequence[Mapping[str, str]], *, leave_s: float) -> None:
        self._environments = environments
        self._leave_s = leave_s

    @asynccontextmanager
    async def running(self, stopping: asyncio.Event) -> AsyncIterator[None]:
        """Children run while the body does; leaving waits for them. `stopping` must be set when the body ends."""
        async with asyncio.TaskGroup() as group:
            for number, env in enumerate(self._environments, start=1):
                group.create_task(self._keep(f"worker {number}", env, stopping))
            try:
                yield
            finally:
                stopping.set()

    async def _keep(self, name: str, env: Mapping[str, str], stopping: asyncio.Event) -> None:
        """One child, started again whenever it ends by itself."""
        pause_s = RESTART_S
        while not stopping.is_set():
            started = time.monotonic()
            code = await self._run(env, stopping)
            if stopping.is_set():
                return
            pause_s = RESTART_S if time.monotonic() - started > STEADY_S else min(pause_s * 2, MAX_RESTART_S)
            logger.error("%s ended with status %s; starting it again in %.0f s", name, code, pause_s)
            await _set_within(stopping, pause_s)

    async def _run(self, env: Mapping[str, str], stopping: asyncio.Event) -> int:
        """Start a child and wait for its end; when we stop, tell it to leave and see that it does."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "workers", env=dict(env), stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            async with asyncio.TaskGroup() as group:
                ended = group.create_task(process.wait())
                told = group.create_task(self._tell(process, stopping))
                code = await ended
                told.cancel()
            return code
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _tell(self, process: asyncio.subprocess.Process, stopping: asyncio.Event) -> None:
        await stopping.wait()
        process.terminate()
        await asyncio.sleep(self._leave_s)
        logger.error("worker process %d did not leave within %.0f s: killing it", process.pid, self._leave_s)
        process.kill()


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
