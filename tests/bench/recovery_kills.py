"""Workers of a real fleet are killed, and told to leave: how long their rollouts stand still, and the tokens that their journals save."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from service.tokenizers import make_qwen3
from tests.e2e.chaos.fleet import Fleet, Member, running
from tests.e2e.chaos.takeovers import Takeovers, Watch
from tests.e2e.stack import KEYS, call, clean_up, rule

LEASE_S = 5.0
IN_FLIGHT = 12
TURNS = 40
TOKENS_PER_S = 100
PACE_S = 3.0
"""Between two strikes: rollouts get on with their turns."""
LOADED_S = 60.0
"""For a worker to have a rollout worth killing it for: it loads its tokenizer first."""
SETTINGS = {"ROLLWAY_LEASE_S": str(LEASE_S), "ROLLWAY_GRACE_S": "10", "ROLLWAY_WORKER_ROLLOUTS": "16", "ROLLWAY_SANDBOX_POOL": "2"}
THOUGHT = "I look at the file before I change it. " * 4
POLICY: dict[str, Any] = {"rules": [rule("do it.", *[THOUGHT + call("bash", command="wc -l < /etc/passwd")] * TURNS, "Done.")]}


@dataclass(slots=True)
class Found:
    """generated: tokens of the whole run, by the job's own books. failures: why attempts ended, and how many."""

    killed: Takeovers
    left: Takeovers
    kills: int
    terms: int
    generated: int
    failures: dict[str, int]


async def measure(folder: Path, *, kills: int, terms: int) -> Found:
    """Three workers, about a dozen rollouts of many short turns; one worker after the other goes, the others take over."""
    tokenizer = make_qwen3(Path(".rollway/tokenizers/qwen3").resolve())
    (folder / "policy.json").write_text(json.dumps(POLICY))
    headers = {"Authorization": f"Bearer {KEYS['alpha']}"}
    async with running(folder, tokenizer, settings=SETTINGS, tokens_per_s=TOKENS_PER_S) as fleet:
        try:
            await fleet.up()
            async with httpx.AsyncClient(base_url=fleet.urls[0], headers=headers, timeout=60) as api:
                return await play(fleet, api, tokenizer, kills=kills, terms=terms)
        finally:
            for worker in fleet.workers:
                await worker.leave()
            await clean_up(fleet.env)


async def play(fleet: Fleet, api: httpx.AsyncClient, tokenizer: Path, *, kills: int, terms: int) -> Found:
    spec = {
        "name": "recovery",
        "model": {"tokenizer": str(tokenizer), "renderer": "qwen3", "context_tokens": 32_768},
        "generators": fleet.generator_urls,
        "group_size": 1,
        "staleness_budget": None,
        "queue_groups": 100_000,
        "max_in_flight_rollouts": IN_FLIGHT,
        "limits": {"turns": TURNS + 1, "tokens": 30_000},
    }
    job_id = (await api.post("/v1/jobs", json=spec)).raise_for_status().json()["job_id"]
    tasks = [
        {
            "task_id": f"t{n}",
            "messages": [{"role": "user", "content": "Please do it."}],
            "tools": ["bash"],
            "sandbox": {"backend": "docker"},
        }
        for n in range(20 * (kills + terms))
    ]
    (await api.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": tasks})).raise_for_status()
    found = []
    for times, go in ((kills, kill), (terms, leave)):
        watch = Watch(fleet.redis_url, job_id)
        try:
            for _ in range(times):
                await strike(fleet, watch, go)
                await asyncio.sleep(PACE_S)
        finally:
            await watch.aclose()
        found.append(watch.found)
    counts = (await api.get(f"/v1/jobs/{job_id}")).raise_for_status().json()["counts"]
    why = await failures(api, job_id)
    await api.delete(f"/v1/jobs/{job_id}")
    return Found(killed=found[0], left=found[1], kills=kills, terms=terms, generated=counts["tokens_generated"], failures=why)


async def failures(api: httpx.AsyncClient, job_id: str) -> dict[str, int]:
    why: Counter[str] = Counter()
    after: dict[str, str] = {}
    while True:
        page = (await api.get(f"/v1/jobs/{job_id}/groups", params=after)).raise_for_status().json()
        why.update(reason for group in page["groups"] for member in group["members"] for reason in member["failures"])
        if page["next"] is None:
            return dict(why)
        after = {"after": page["next"]}


async def strike(fleet: Fleet, watch: Watch, go: Callable[[Member], None]) -> None:
    """The worker that holds the most goes, while the others are at work."""
    async with asyncio.timeout(LOADED_S):
        while True:
            busy = {worker: len(await watch.held(worker.pid)) if worker.pid else 0 for worker in fleet.workers}
            victim = max(fleet.workers, key=lambda worker: busy[worker])
            if busy[victim] > 0 and all(worker.working for worker in fleet.workers):
                break
            await asyncio.sleep(0.1)
    pid = victim.pid
    assert pid is not None
    go(victim)
    await watch.after(pid)


def kill(worker: Member) -> None:
    worker.kill(away_s=0.3)


def leave(worker: Member) -> None:
    worker.signal(signal.SIGTERM)
