"""One running service per module; its policy is the module's `POLICY`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.stack import Stack, running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, qwen3_dir: Path) -> AsyncIterator[Stack]:
    policy = request.module.POLICY
    async with running(
        tmp_path_factory.mktemp("stack"), qwen3_dir, policy, tokens_per_s=getattr(request.module, "TOKENS_PER_S", 0)
    ) as stack:
        yield stack
