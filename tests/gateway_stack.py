"""A gateway under a real uvicorn, on the session's Valkey."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from pydantic import SecretStr

from service.app import create_app
from service.batches import Batches
from service.groups import Groups
from service.jobs import Jobs
from service.leases import Leases
from service.server import GatewayServer
from service.settings import Settings
from service.store import Store, open_store

KEYS = {"red": "red-key-0001", "blue": "blue-key-0002"}
OPERATOR_KEY = "operator-key-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGateway:
    """A gateway that listens, and the store behind it for tests that play the worker."""

    url: str
    server: GatewayServer
    store: Store
    settings: Settings

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.store, retain_s=self.settings.retain_s)

    @property
    def groups(self) -> Groups:
        return Groups(self.store, retain_s=self.settings.retain_s)

    @property
    def leases(self) -> Leases:
        return Leases(self.store, lease_s=30, max_attempts=3)

    @property
    def batches(self) -> Batches:
        return Batches(self.store, retain_s=self.settings.retain_s)

    def client(self, tenant: str | None = "red", **headers: str) -> httpx.AsyncClient:
        """Speaks as `tenant`; None: without a key."""
        if tenant is not None:
            headers["Authorization"] = f"Bearer {KEYS[tenant]}"
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30)


def gateway_settings(redis_url: str, tokenizer: Path, folder: Path, **changes: object) -> Settings:
    fields = {
        "redis_url": SecretStr(redis_url),
        "data_dir": folder,
        "tokenizer_roots": [tokenizer.parent],
        "api_keys": {tenant: SecretStr(key) for tenant, key in KEYS.items()},
        "operator_key": SecretStr(OPERATOR_KEY),
        "max_body_bytes": 2_000_000,
        "grace_s": 5.0,
    }
    return Settings(**{**fields, **changes})


@asynccontextmanager
async def running_gateway(settings: Settings) -> AsyncIterator[RunningGateway]:
    """Listens on a free loopback port while the body runs."""
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stopping = asyncio.Event()
    async with open_store(settings) as store:
        app = create_app(settings, store=store, stopping=stopping)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, http="httptools", log_config=None, timeout_graceful_shutdown=5)
        server = GatewayServer(config, stopping=stopping, say=lambda line: listening.set_result(line.removeprefix("listening on ")))
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve())
            yield RunningGateway(url=await listening, server=server, store=store, settings=settings)
            server.leave()
