"""Each sandbox backend in turn. `live` is one sandbox for all tests of a file that leave it usable."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandboxes.base import Sandbox, SandboxBackend
from tests.sandbox_backends import IMAGE, has_engine, has_namespaces, make, named, spec


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}")]),
        pytest.param("process", marks=[pytest.mark.process, pytest.mark.skipif(not has_namespaces(), reason="needs root and namespaces")]),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("process-sandboxes")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(kind: str, root: Path) -> AsyncIterator[SandboxBackend]:
    async with make(kind, root) as made:
        yield made
        await made.sweep(keep=frozenset(), older_than_s=0)
        assert await made.list() == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(backend: SandboxBackend) -> Sandbox:
    return await backend.create(spec(), name=named())
