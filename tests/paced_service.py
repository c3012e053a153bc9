"""The whole service beside stand-ins that sample at a given speed, and a trainer that looks at every sampled token's version."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from service.standin import create_standin, drawn_lengths
from service.trainer.feed import Feed, endless
from service.trainer.gateway import Drained, Gateway, open_gateway
from service.trainer.weights import Labels
from tests.e2e.stack import KEYS, end, environment, free_port, ready, spawn

WORKERS = 1
FED_S = 0.1
"""Until a feed that fell behind may have caught up."""


@asynccontextmanager
async def service_running(folder: Path, tokenizer: Path) -> AsyncIterator[str]:
    """Gateway, workers and embedded Valkey as processes; the gateway's URL."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    env = environment(folder, tokenizer, port) | {"ROLLWAY_SANDBOX_POOL": "0", "ROLLWAY_LEASE_S": "60", "ROLLWAY_WORKER_ROLLOUTS": "1024"}
    serve = ("serve", "--host", "127.0.0.1", "--port", str(port), "--workers", str(WORKERS))
    gateway = await spawn(*serve, env=env, log=folder / "gateway.log")
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEYS['alpha']}"}, timeout=20) as api:
            await ready(api, "/readyz", wait_s=120)
        yield url
    finally:
        await end(gateway, grace_s=60)


@asynccontextmanager
async def generator(model: dict[str, Any], *, mean_tokens: float, sigma: float, tokens_per_s: float, seed: int) -> AsyncIterator[str]:
    """A stand-in in this process; its URL."""
    app = create_standin(**model, policy=drawn_lengths(mean_tokens, sigma), tokens_per_s=tokens_per_s, seed=seed)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    port = free_port()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def job_spec(name: str, tokenizer: Path, generator_url: str, **fields: Any) -> dict[str, Any]:
    model = {"tokenizer": str(tokenizer), "renderer": "qwen3", "context_tokens": 16_384}
    limits = {"tokens": 12_000, "turn_tokens": 12_000, "wall_s": 36_000.0}
    return {"name": name, "model": model, "generators": [{"url": generator_url, "max_concurrency": 1000}], "limits": limits} | fields


@dataclass(slots=True, kw_only=True)
class Delivered:
    """staleness_max: worked out here, from the versions of the sampled tokens."""

    groups: int = 0
    staleness_max: int = 0
    above: int = 0
    requeued: int = 0
    dropped: int = 0


def oldest_version(group: dict[str, Any]) -> int:
    samples = [sample for trajectory in group["trajectories"] for sample in trajectory["samples"]]
    return min(version for sample in samples for version, mask in zip(sample["versions"], sample["loss_mask"], strict=True) if mask)


async def deliver(
    url: str, tokenizer: Path, model: dict[str, Any], *, groups: int, budget: int = 1, step: int = 8, rollout_s: float = 0.5
) -> Delivered:
    """Train `groups` groups as fast as they come, with rollouts so long-tailed that many come too late."""
    found = Delivered()
    async with AsyncExitStack() as parts:
        generating = generator(model, mean_tokens=24, sigma=1.0, tokens_per_s=24 / rollout_s, seed=1)
        generator_url = await parts.enter_async_context(generating)
        gateway = await parts.enter_async_context(open_gateway(url, KEYS["alpha"]))
        fields = {"group_size": 2, "groups_per_step": step, "staleness_budget": budget, "max_in_flight_rollouts": 256, "max_requeues": 5}
        job, _ = await gateway.create_job(job_spec("requeue", tokenizer, generator_url, stale_policy="requeue", **fields))
        http = await parts.enter_async_context(httpx.AsyncClient(timeout=60))
        feeding = asyncio.create_task(Feed(gateway, job["job_id"], endless(), groups=200).run())
        try:
            await _train(gateway, Labels(gateway, http, job, update_s=0.0), job["job_id"], found, groups=groups, budget=budget, step=step)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        counts = (await gateway.job(job["job_id"]))["counts"]
        found.requeued, found.dropped = counts["requeued"], sum(counts["dropped"].values())
        await gateway.delete_job(job["job_id"])
    return found


async def _train(gateway: Gateway, weights: Labels, job_id: str, found: Delivered, *, groups: int, budget: int, step: int) -> None:
    version = 0
    while found.groups < groups:
        try:
            batch = await gateway.lease(job_id, step, lease_s=60)
        except Drained:
            await asyncio.sleep(FED_S)
            continue
        if batch is None:
            continue
        for group in batch["groups"]:
            staleness = batch["policy_version"] - oldest_version(group)
            found.groups += 1
            found.above += staleness > budget
            found.staleness_max = max(found.staleness_max, staleness)
        version += 1
        await weights.publish(version, ack=[batch["batch_id"]])
