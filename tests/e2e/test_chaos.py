"""Everything at once: processes die, sleep and leave at random while a bad trainer trains, and afterwards the books must add up.

ROLLWAY_TEST_CHAOS_S: seconds of chaos (default 45; a long run: 3600). ROLLWAY_TEST_CHAOS_SEED: another schedule (default 4).
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from tokenizers import Tokenizer

from tests.e2e.chaos import books, schedule
from tests.e2e.chaos.client import Client
from tests.e2e.chaos.fleet import Fleet, running
from tests.e2e.chaos.schedule import Event, Kind
from tests.e2e.chaos.takeovers import Watch
from tests.e2e.chaos.trainer import Trainer
from tests.e2e.stack import KEYS, call, clean_up, rule
from tests.e2e.test_faults import docker
from tests.sandbox_backends import has_engine, has_namespaces

SECONDS = float(os.environ.get("ROLLWAY_TEST_CHAOS_S", "45"))
SEED = int(os.environ.get("ROLLWAY_TEST_CHAOS_SEED", "4"))
LEASE_S = 5.0
GAP_S = 2.5
DRAIN_S = 120.0
SWEPT_S = 75.0
"""A sandbox whose owner died before it was journaled is swept at this age at the latest."""
SETTINGS = {
    "ROLLWAY_LEASE_S": str(LEASE_S),
    "ROLLWAY_SWEEP_S": "3",
    "ROLLWAY_GRACE_S": "5",
    "ROLLWAY_WORKER_ROLLOUTS": "8",
    "ROLLWAY_MAX_ATTEMPTS": "8",
    "ROLLWAY_SANDBOX_POOL": "2",
}

BACKENDS = [name for name, there in (("docker", has_engine()), ("process", has_namespaces())) if there]

pytestmark = [
    pytest.mark.docker,
    pytest.mark.process,
    pytest.mark.skipif(not BACKENDS, reason="needs a Docker engine, or root and namespaces"),
    pytest.mark.timeout(SECONDS + DRAIN_S + SWEPT_S + 120),
]

SHORT, LONG = "I look. ", "I think about it for a while. " * 8


def step(number: int, pause: str) -> list[str]:
    """One side effect that tells whose it is and which; slow and short ones."""
    command = f'echo "$(cat /work/name) {number}" >> /work/log; sleep {pause}; wc -l < /work/log'
    return [text + call("bash", command=command) for text in (SHORT, LONG)]


POLICY: dict[str, Any] = {
    "rules": [
        rule("do one-", step(1, "0.3"), call("submit")),
        rule("do two-", step(1, "0.05"), step(2, "0.5"), [text + call("submit") for text in (SHORT, LONG)]),
        rule("do three-", step(1, "0.02"), step(2, "0.3"), step(3, "0.02"), call("submit")),
    ]
}
STEPS = {"one": 1, "two": 2, "three": 3}


def make_task(number: int) -> dict[str, Any]:
    """Its verifier passes exactly where each command's line is in the log once, in order."""
    word = list(STEPS)[number % 3]
    task_id = f"{word}-{number}"
    lines = "\\n".join(f"{task_id} {step}" for step in range(1, STEPS[word] + 1))
    return {
        "task_id": task_id,
        "messages": [{"role": "user", "content": f"Please do {task_id}."}],
        "tools": ["bash", "submit"],
        "sandbox": {"backend": BACKENDS[number % len(BACKENDS)], "files": {"/work/name": task_id}},
        "verifier": {"command": f'test "$(cat /work/log)" = "$(printf \'{lines}\')" || {{ cat /work/log >&2; exit 1; }}',
                     "timeout_s": 20, "artifacts": ["/work/log"]},
    }  # fmt: skip


async def happen(event: Event, fleet: Fleet, watch: Watch, chance: random.Random) -> None:
    if event.kind.noun == "sandbox":
        await strike_sandbox(event, fleet, chance)
        return
    member = fleet.of(event)
    match event.kind.verb:
        case "pause":
            await member.pause(event.seconds)
        case "term":
            member.signal(signal.SIGTERM, away_s=event.seconds)
        case _:
            pid = member.pid
            member.signal(signal.SIGKILL, away_s=event.seconds)
            if event.kind is Kind.KILL_WORKER and pid is not None:
                await watch.after_kill(pid)


async def strike_sandbox(event: Event, fleet: Fleet, chance: random.Random) -> None:
    """Any of the deployment's containers: in use, warm, or a verifier's."""
    found = (await docker("ps", "-q", "--filter", f"label=rollway={fleet.env['ROLLWAY_DEPLOYMENT_ID']}")).split()
    if found:
        await docker(*(("kill",) if event.kind is Kind.KILL_SANDBOX else ("rm", "-f")), chance.choice(sorted(found)))


async def disturb(events: list[Event], fleet: Fleet, watch: Watch) -> None:
    """Each at its time, overlapping as they come."""
    started, chance = time.monotonic(), random.Random(SEED)
    async with asyncio.TaskGroup() as group:
        for event in events:
            await asyncio.sleep(max(0.0, started + event.at_s - time.monotonic()))
            group.create_task(happen(event, fleet, watch, chance))
        await asyncio.sleep(max(0.0, started + SECONDS - time.monotonic()))


async def boxes(fleet: Fleet) -> list[dict[str, Any]]:
    """Every sandbox of the deployment, as `rollway sandbox ls` shows it."""
    argv = (sys.executable, "-m", "workers.inventory", "ls", "--json")
    listing = await asyncio.create_subprocess_exec(
        *argv, env=os.environ | fleet.env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    out, _ = await listing.communicate()
    assert listing.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


async def assert_swept(fleet: Fleet) -> None:
    """No rollout's sandbox is left, and no dead worker's."""
    ends_at = time.monotonic() + SWEPT_S
    while left := [box for box in await boxes(fleet) if box["kind"] != "pool" or box["state"] != "live"]:
        assert time.monotonic() < ends_at, f"sandboxes were left: {left}"
        await asyncio.sleep(2.0)


async def every_group(client: Client, job_id: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    after: dict[str, str] = {}
    while True:
        page = (await client.call("GET", f"/v1/jobs/{job_id}/groups", **after)).json()
        found |= {group["group_id"]: group for group in page["groups"]}
        if page["next"] is None:
            return found
        after = {"after": page["next"]}


async def assert_forgotten(fleet: Fleet, client: Client, job_id: str) -> None:
    """Gateways that remember for a second only delete the job: then no key of it is left that does not go by itself."""
    for gateway in fleet.gateways:
        gateway.env["ROLLWAY_RETAIN_S"] = "1"
        gateway.signal(signal.SIGTERM)
    await asyncio.sleep(1.0)
    await client.call("GET", "/healthz")
    await client.call("DELETE", f"/v1/jobs/{job_id}", 204, 404)
    async with redis.asyncio.Redis.from_url(fleet.redis_url) as store:
        ends_at = time.monotonic() + 15
        while left := [key async for key in store.scan_iter(match=f"*{job_id}*") if await store.ttl(key) == -1]:
            assert time.monotonic() < ends_at, f"keys were left: {left}"
            await asyncio.sleep(0.2)


def read_records(fleet: Fleet, tokenizer: Path, groups: dict[str, dict[str, Any]]) -> list[books.Sampled]:
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    by_task = {group["task_id"]: group_id for group_id, group in groups.items()}
    lines = [line for record in fleet.records for line in record.read_text().splitlines()]
    return list(books.read_record(lines, lambda ids: by_task[books.task_of(decoder.decode(list(ids)))]))


async def test_chaos_leaves_the_books_in_order(tmp_path: Path, qwen3_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = schedule.draw(SEED, seconds=SECONDS, gap_s=GAP_S, lease_s=LEASE_S)
    sys.stdout.write("\n".join([f"seed {SEED}, {SECONDS:.0f} s:", *map(str, events)]) + "\n")  # shown where the test fails
    (tmp_path / "policy.json").write_text(json.dumps(POLICY))
    chance = random.Random(SEED)
    async with running(tmp_path, qwen3_dir, settings=SETTINGS, tokens_per_s=150) as fleet:
        try:
            async with Client(fleet.urls, KEYS["alpha"], chance=chance) as client:
                report = await play(fleet, client, events, qwen3_dir, chance)
        finally:
            statuses = {worker.name: await worker.leave() for worker in fleet.workers}
            left = await boxes(fleet)
            await clean_up(fleet.env)
    with capsys.disabled():
        sys.stdout.write(f"\n{report}\n")
    assert set(statuses.values()) == {0}
    assert left == []


async def play(fleet: Fleet, client: Client, events: list[Event], tokenizer: Path, chance: random.Random) -> str:
    await fleet.up()
    spec = {
        "name": "chaos",
        "model": {"tokenizer": str(tokenizer), "renderer": "qwen3", "context_tokens": 4096},
        "generators": fleet.generator_urls,
        "group_size": 3,
        "groups_per_step": 4,
        "staleness_budget": 8,
        "limits": {"turns": 8, "tokens": 2048, "turn_tokens": 512, "tool_s": 20},
    }
    job_id = (await client.call("POST", "/v1/jobs", 200, 201, json=spec)).json()["job_id"]
    trainer, watch, fed = Trainer(client, job_id, fleet.generator_urls, chance=chance), Watch(fleet.redis_url, job_id), asyncio.Event()
    labelling = asyncio.create_task(trainer.label())
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(trainer.feed(make_task, until=fed))
            group.create_task(within(SECONDS + DRAIN_S, trainer.train(fed=fed)))
            await disturb(events, fleet, watch)
            fed.set()
        await trainer.publish()
    finally:
        labelling.cancel()
        await asyncio.gather(labelling, return_exceptions=True)
        await watch.aclose()
    groups = await every_group(client, job_id)
    counts = (await client.call("GET", f"/v1/jobs/{job_id}")).json()["counts"]
    found = books.Found(
        submitted=trainer.submitted, groups=groups, counts=counts, deliveries=trainer.deliveries, acked=trainer.acked,
        record=read_records(fleet, tokenizer, groups),
    )  # fmt: skip
    audit = books.audit(found)
    report = "\n".join([
        f"chaos: seed {SEED}, {len(events)} events in {SECONDS:.0f} s; {len(groups)} groups, "
        f"{sum(group['size'] for group in groups.values())} rollouts; {client.tries} requests; counts {counts}",
        f"tokens sampled: {dict(audit.tokens)}; attempts ended: {dict(audit.attempts)}",
        f"lease {LEASE_S:.0f} s; {watch.found}",
    ])  # fmt: skip
    sys.stdout.write(report + "\n")
    assert audit.problems == []
    assert audit.generations > 0
    await assert_swept(fleet)
    await assert_forgotten(fleet, client, job_id)
    return report


async def within(seconds: float, what: Any) -> None:
    async with asyncio.timeout(seconds):
        await what
