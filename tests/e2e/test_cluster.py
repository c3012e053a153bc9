"""The whole service on a Redis Cluster of three primaries, one of which is lost while rollouts run."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack, rule, running, task
from tests.redis_cluster import running_cluster

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]

SHORT, LONG = "I think. ", "I think about it for a while. " * 12
POLICY: dict[str, Any] = {"rules": [rule("count", [SHORT, LONG])]}
PLAIN: dict[str, Any] = {"tools": [], "verifier": None}


async def batch(stack: Stack, job_id: str, groups: int) -> set[str]:
    """The groups of a batch, whose lease a store that fails over may refuse for a while."""
    async with asyncio.timeout(100):
        while True:
            reply = await stack.api.post(f"/v1/jobs/{job_id}/batches", json={"groups": groups, "wait_s": 5, "lease_s": 60}, timeout=60)
            if reply.status_code == 200:
                return {group["group_id"] for group in reply.json()["groups"]}
            assert reply.status_code in (204, 503), reply.text


async def test_jobs_on_all_nodes_finish_though_one_is_lost(tmp_path: Path, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_cluster(tmp_path / "cluster", replica=True) as servers:
        lost = servers.primaries[0]
        monkeypatch.setenv("ROLLWAY_REDIS_URL", servers.url)
        async with running(tmp_path / "stack", qwen3_dir, POLICY, tokens_per_s=30) as stack:
            homes: dict[str, Any] = {}
            while set(homes.values()) != set(servers.primaries):
                job_id = await stack.job(f"job{len(homes)}", groups_per_step=3)
                homes[job_id] = servers.owner(job_id)
            groups = {job_id: await stack.submit(job_id, *(task(f"count {n}", **PLAIN) for n in range(3))) for job_id in homes}
            await stack.group(next(groups[job_id][0] for job_id, home in homes.items() if home is lost), "running", "ready")
            lost.kill()
            for job_id, submitted in groups.items():
                assert await batch(stack, job_id, 3) == set(submitted)
