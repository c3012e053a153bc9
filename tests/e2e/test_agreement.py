"""The planner and the real service agree, where a slow machine changes little; `tests/bench/agreement.py` compares the whole range."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from service.plan.simulator import simulate
from service.standin.server import load_model
from tests.bench.agreement import Case, Place, measure
from tests.paced_service import deliver, service_running

WAIT_BOUND, STALENESS_BOUND = 0.15, 0.6
"""Of few steps, on a machine that does other things too."""
TIME_SCALE = 900.0
"""A rollout of 15 minutes in one second."""

pytestmark = [pytest.mark.redis, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

small = partial(Case, group_size=2, groups_per_step=4, sigma=0.3)


@pytest.fixture(scope="module")
def model(qwen3_dir: Path) -> dict[str, Any]:
    return load_model(qwen3_dir, "qwen3")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory, qwen3_dir: Path) -> AsyncIterator[str]:
    async with service_running(tmp_path_factory.mktemp("service"), qwen3_dir) as url:
        yield url


async def test_waits_and_staleness_are_as_planned(url: str, qwen3_dir: Path, model: dict[str, Any]) -> None:
    place = Place(url=url, tokenizer=qwen3_dir, model=model, time_scale=TIME_SCALE, minutes=0.3)
    cases = [small(load=0.1, budget=4), small(load=2.5, budget=1)]
    for case, measured in zip(cases, await asyncio.gather(*(measure(case, place) for case in cases)), strict=True):
        planned = simulate(case.setting, groups=4000)
        assert measured.wait_fraction == pytest.approx(planned.wait_share, abs=WAIT_BOUND), case.name
        assert measured.staleness is not None
        assert measured.staleness.mean == pytest.approx(planned.staleness.mean, abs=STALENESS_BOUND), case.name
        assert measured.staleness.max <= case.budget


async def test_under_requeue_no_group_is_delivered_above_the_budget(url: str, qwen3_dir: Path, model: dict[str, Any]) -> None:
    found = await deliver(url, qwen3_dir, model, groups=160)
    assert (found.above, found.staleness_max) == (0, 1)
    assert found.requeued > 0, "nothing came too late, so nothing was shown"
