"""`rollway sandbox`: what there is, whose it is, and what nobody owns any more."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandboxes.docker import DockerBackend
from tests.sandbox_backends import IMAGE, docker_host, has_engine, spec
from tests.store_stack import Stack, store_at
from workers.owners import sandbox_name

pytestmark = [pytest.mark.redis, pytest.mark.docker, pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}")]

DEPLOYMENT = f"inventory-{os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A deployment with one sandbox of each kind, by the state it is in."""

    env: dict[str, str]
    live: set[str]
    orphans: set[str]
    backend: DockerBackend

    async def rollway(self, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        """`rollway sandbox`: exit status, the JSON lines of stdout, stderr."""
        return await self.run(str(Path(sys.executable).parent / "rollway"), "sandbox", *arguments)

    async def run(self, *argv: str) -> tuple[int, list[dict[str, Any]], str]:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=os.environ | self.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        lines = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
        return process.returncode or 0, lines, err.decode()

    async def names(self) -> set[str]:
        return {info.name for info in await self.backend.list()}


@pytest.fixture
async def place(empty_redis_url: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with store_at(empty_redis_url) as store, DockerBackend(deployment_id=DEPLOYMENT, docker_host=docker_host()) as backend:
        stack = Stack(store)
        await stack.open_job(group_size=1)
        await stack.submit(1)
        lease = await stack.one()
        await store.heartbeat("w1", {"pools": [f"rw-{DEPLOYMENT}-pool-w1-aaa111-"]}, 60)
        live = {sandbox_name(DEPLOYMENT, lease.rollout_id, 1), f"rw-{DEPLOYMENT}-pool-w1-aaa111-0"}
        orphans = {sandbox_name(DEPLOYMENT, f"{stack.job_id}-g9-r0", 1), f"rw-{DEPLOYMENT}-pool-w1-bbb222-0"}
        env = {"ROLLWAY_REDIS_URL": empty_redis_url, "ROLLWAY_DEPLOYMENT_ID": DEPLOYMENT, "ROLLWAY_DATA_DIR": str(tmp_path)}
        if host := docker_host():
            env["ROLLWAY_DOCKER_HOST"] = host
        try:
            await asyncio.gather(*(backend.create(spec(), name=name) for name in live | orphans))
            yield Place(env=env, live=live, orphans=orphans, backend=backend)
        finally:
            await backend.sweep(keep=frozenset(), older_than_s=0)


async def test_ls_tells_whose_each_is(place: Place) -> None:
    code, boxes, _ = await place.rollway("ls", "--json")
    assert code == 0
    assert {box["name"] for box in boxes if box["state"] == "live"} == place.live
    assert {box["name"] for box in boxes if box["state"] == "orphan"} == place.orphans
    assert {(box["kind"], box["owner"]) for box in boxes if box["kind"] == "pool"} == {("pool", "w1")}
    assert all(box["alive"] and box["backend"] == "docker" and box["age_s"] >= 0 for box in boxes)


async def test_cleanup_asks_and_removes_what_nobody_owns(place: Place) -> None:
    code, _, said = await place.rollway("cleanup", "--older-than", "0")
    assert (code, "pass --yes" in said) == (1, True)
    assert await place.names() == place.live | place.orphans
    code, removed, _ = await place.rollway("cleanup", "--older-than", "0", "--yes", "--json")
    assert (code, {box["name"] for box in removed}) == (0, place.orphans)
    assert await place.names() == place.live
    everything = ("-m", "workers.inventory", "cleanup", "--all", "--keep-shared", "--yes", "--json")  # others use this engine too
    code, removed, _ = await place.run(sys.executable, *everything)
    assert (code, {box["name"] for box in removed}) == (0, place.live)
    assert await place.names() == set()


async def test_cleanup_of_everything_takes_the_deployments_snapshots_and_no_others(place: Place) -> None:
    name = sorted(place.live)[0]
    async with DockerBackend(deployment_id=f"{DEPLOYMENT}-other", docker_host=docker_host()) as other:
        mine = await (await place.backend.attach(name)).snapshot(ttl_s=600)
        theirs = await (await other.create(spec(), name="snapshot-of-others")).snapshot(ttl_s=600)
        try:
            code, _, _ = await place.run(sys.executable, "-m", "workers.inventory", "cleanup", "--all", "--keep-shared", "--yes")
            assert code == 0
            assert {mine, theirs} & await other.images() == {theirs}
        finally:
            await other.remove_snapshots()
            await other.sweep(keep=frozenset(), older_than_s=0)


async def test_without_a_backend_nothing_is_said_to_be_gone(place: Place, tmp_path: Path) -> None:
    place.env["ROLLWAY_DOCKER_HOST"] = f"unix://{tmp_path}/nobody.sock"
    for command in (("ls",), ("cleanup", "--all", "--yes")):
        code, _, said = await place.rollway(*command)
        assert (code, "no sandbox backend answers" in said) == (1, True)
