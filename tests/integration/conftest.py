"""Fixtures of the tests that speak HTTP to a gateway."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.gateway_stack import RunningGateway, gateway_settings, running_gateway


@pytest.fixture
async def gateway(empty_redis_url: str, qwen3_dir: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(gateway_settings(empty_redis_url, qwen3_dir, tmp_path)) as running:
        yield running


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    """Tenant red."""
    async with gateway.client() as red:
        yield red
