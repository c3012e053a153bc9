"""The Docker engine behind deadlines: every call ends, and every failure is a SandboxError that says whose it is."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
from aiodocker import Docker, DockerError
from yarl import URL

from sandboxes.base import SandboxError

DEFAULT_HOST = "unix:///var/run/docker.sock"

SIGN_S = 5.0
"""For a sign of life; a busy engine gives it within a second."""
AWAY_PAUSE_S = 0.2
"""Between two looks at an engine that is away."""

T = TypeVar("T")


class EngineError(SandboxError):
    """The engine refused or failed a call. `status` is its HTTP status, 0 where there was no answer."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Engine:
    """One connection pool to one engine. `answer_s` bounds every call but pulls and the output of commands."""

    def __init__(self, docker_host: str | None, *, answer_s: float) -> None:
        self.host = docker_host or DEFAULT_HOST
        self.answer_s = answer_s
        self._docker: Docker | None = None
        self._connector: aiohttp.BaseConnector | None = None

    @property
    def address(self) -> str | tuple[str, int]:
        """Where it listens: the path of a Unix socket, or host and port."""
        if self.host.startswith("unix://"):
            return self.host.removeprefix("unix://")
        url = URL(self.host.replace("tcp://", "http://", 1))
        if url.host is None or url.port is None:
            raise SandboxError(_unsupported(self.host))
        return url.host, url.port

    @property
    def docker(self) -> Docker:
        """The client; made at first use, since it belongs to the running loop."""
        if self._docker is None:
            url, self._connector = _connection(self.host)
            self._docker = Docker(url=url, connector=self._connector)
        return self._docker

    async def aclose(self) -> None:
        if self._docker is not None and self._connector is not None:
            await self._docker.close()
            await self._connector.close()
            self._docker = self._connector = None

    @asynccontextmanager
    async def asked(self, what: str, *, within_s: float | None = None) -> AsyncIterator[Docker]:
        """Run the body, which asks the engine for `what`, under a deadline.

        Raises:
            EngineError: it refused, failed or did not answer.
        """
        budget_s = self.answer_s if within_s is None else within_s
        deadline = asyncio.timeout(budget_s)
        try:
            async with deadline:
                yield self.docker
        except DockerError as error:
            if error.status >= 900:  # aiodocker's own code for no connection
                raise EngineError(self._unreachable(str(error.message)), status=0) from error
            raise EngineError(f"the engine could not {what}: {error.message}", status=error.status) from error
        except TimeoutError as error:
            raise EngineError(f"the engine at {self.host} did not {what} within {budget_s:g} s", status=0) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(self._unreachable(str(error)), status=0) from error

    async def call(
        self,
        what: str,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: object = None,
        within_s: float | None = None,
    ) -> Any:
        """One request for which aiodocker has no call, or none that fits; the parsed reply, "" where it has none.

        Raises:
            EngineError: as `asked`.
        """
        async with self.asked(what, within_s=within_s) as docker:
            return await docker._query_json(path, method, params=dict(params or {}), data=body)

    async def outlasting(self, attempt: Callable[[], Awaitable[T]], *, within_s: float) -> T:
        """`attempt`, again where it failed while the engine was away: one that is restarted is mostly back within seconds.

        attempt: leaves nothing behind when it fails. within_s: for the engine to be away, all times together.

        Raises:
            SandboxError: as `attempt` did, with the engine there, or when it stayed away.
        """
        away_s = 0.0
        while True:
            try:
                return await attempt()
            except SandboxError:
                began = time.monotonic()
                if await self._answers() or not await self._comes_back(within_s - away_s):
                    raise
                away_s += time.monotonic() - began

    async def _comes_back(self, within_s: float) -> bool:
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            await asyncio.sleep(AWAY_PAUSE_S)
            if await self._answers():
                return True
        return False

    async def _answers(self) -> bool:
        try:
            await self.call("answer", "GET", "version", within_s=min(self.answer_s, SIGN_S))
        except EngineError as error:
            return error.status != 0
        return True

    def _unreachable(self, detail: str) -> str:
        return f"the engine at {self.host} cannot be reached ({detail}): start dockerd, or name another one in ROLLWAY_DOCKER_HOST"


def _connection(host: str) -> tuple[str, aiohttp.BaseConnector]:
    """The base URL and the connections, without aiohttp's limit of 100: every running command holds one."""
    if host.startswith("unix://"):
        return "unix://localhost", aiohttp.UnixConnector(host.removeprefix("unix://"), limit=0)
    if host.startswith(("tcp://", "http://")):
        return host.replace("tcp://", "http://", 1), aiohttp.TCPConnector(limit=0)
    raise SandboxError(_unsupported(host))


def _unsupported(host: str) -> str:
    return f"docker host {host!r} is not supported: use unix:///path/to/docker.sock or tcp://host:port"
