"""Everything at once: processes die at random and at named points, sleep, leave and are cut off, while a bad trainer trains; then the
books must add up.

Chaos lasts CHAOS_S; work is submitted until then, so a slow machine plays fewer rollouts and is asked nothing else. What is left drains
without any fault. `pytest tests/e2e/test_chaos.py --long` has an hour of chaos: ROLLWAY_TEST_CHAOS_S sets another time (seconds), and
ROLLWAY_TEST_CHAOS_SEED another schedule.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from tokenizers import Tokenizer

from service import keys
from service.tokenizers import QWEN3_ADDED, QWEN3_SPECIAL
from service.weight_updates import DRIVER_S
from tests.chatml_vocabulary import SPECIAL, make_tiny_chatml
from tests.e2e.chaos import books, schedule
from tests.e2e.chaos.client import Client
from tests.e2e.chaos.fleet import Fleet, running
from tests.e2e.chaos.schedule import Event, Kind
from tests.e2e.chaos.takeovers import Watch
from tests.e2e.chaos.trainer import Trainer
from tests.e2e.doomed import GATEWAYS, WORKERS, points
from tests.e2e.stack import KEYS, call, clean_up, rule
from tests.e2e.test_faults import docker
from tests.sandbox_backends import has_engine, has_namespaces

CHAOS_S = float(os.environ.get("ROLLWAY_TEST_CHAOS_S", "120"))
SEED = int(os.environ.get("ROLLWAY_TEST_CHAOS_SEED", "4"))
LEASE_S = 5.0
GAP_S = 2.5
DRAIN_S = 240.0
"""For all that was submitted to end, on a machine that is busy with other things."""
SWEPT_S = 90.0
"""A sandbox whose owner died before it was journaled is swept at the age of a minute."""
GROUP_SIZE = 3
FLOOR = 20
"""Groups that also the slowest machine plays: fewer would show little."""
RETAIN_S = 4.0
"""Of the gateways that delete the job at the end."""
SETTINGS = {
    "ROLLWAY_LEASE_S": str(LEASE_S),
    "ROLLWAY_SWEEP_S": "3",
    "ROLLWAY_GRACE_S": "5",
    "ROLLWAY_WORKER_ROLLOUTS": "12",
    "ROLLWAY_MAX_ATTEMPTS": "8",
    "ROLLWAY_SANDBOX_POOL": "2",
    "ROLLWAY_RETAIN_S": str(CHAOS_S + 3600),
}

POINTS = {"worker": points(WORKERS), "gateway": points(GATEWAYS)}
SYNCED_S = 60.0
"""How long the mark of a wait for the disk stays at most."""

BACKENDS = [name for name, there in (("docker", has_engine()), ("process", has_namespaces())) if there]

pytestmark = [
    pytest.mark.docker,
    pytest.mark.process,
    pytest.mark.skipif(not BACKENDS, reason="needs a Docker engine, or root and namespaces"),
    pytest.mark.timeout(CHAOS_S + DRAIN_S + SWEPT_S + 240),
]

SHORT, LONG = "I look. ", "I think about it for a while. " * 8


def step(number: int, pause: str) -> list[str]:
    """One side effect that tells whose it is and which; slow and short ones."""
    command = f'echo "$(cat /work/name) {number}" >> /work/log; sleep {pause}; wc -l < /work/log'
    return [text + call("bash", command=command) for text in (SHORT, LONG)]


POLICY: dict[str, Any] = {
    "rules": [
        rule("do one-", step(1, "0.1"), call("submit")),
        rule("do two-", step(1, "0.02"), step(2, "0.2"), [text + call("submit") for text in (SHORT, LONG)]),
        rule("do three-", step(1, "0.02"), step(2, "0.1"), step(3, "0.02"), call("submit")),
        rule("do kept-", step(1, "0.02"), step(2, "0.1"), step(3, "0.02"), call("submit")),
    ]
}
STEPS = {"one": 1, "two": 2, "three": 3, "kept": 3}
CYCLE = ("one", "two", "one", "three", "two", "kept" if "docker" in BACKENDS else "one")


def make_task(number: int) -> dict[str, Any]:
    """Its verifier passes exactly where each command's line is in the log once, in order. Those that are `kept` have snapshots."""
    word = CYCLE[number % len(CYCLE)]
    task_id = f"{word}-{number}"
    lines = "\\n".join(f"{task_id} {step}" for step in range(1, STEPS[word] + 1))
    sandbox: dict[str, Any] = {"backend": BACKENDS[0 if number // len(CYCLE) % 3 == 0 else -1]}  # containers are the dearer ones
    if word == "kept":
        sandbox = {"backend": "docker", "shell": "per_call", "snapshot": {"every_turns": 1}}
    return {
        "task_id": task_id,
        "messages": [{"role": "user", "content": f"Please do {task_id}."}],
        "tools": ["bash", "submit"],
        "sandbox": sandbox | {"files": {"/work/name": task_id}},
        "verifier": {"command": f'test "$(cat /work/log)" = "$(printf \'{lines}\')" || {{ cat /work/log >&2; exit 1; }}',
                     "timeout_s": 20, "artifacts": ["/work/log"]},
    }  # fmt: skip


def tiny_qwen3(folder: Path) -> Path:
    """A vocabulary of Qwen3's markers and little else: every process that is started again loads it, in a third of the time."""
    return make_tiny_chatml(folder, template=None, added=[marker for marker in (*QWEN3_SPECIAL, *QWEN3_ADDED) if marker not in SPECIAL])


async def happen(event: Event, fleet: Fleet, watch: Watch, chance: random.Random) -> None:
    if event.kind.noun == "sandbox":
        await strike_sandbox(event, fleet, chance)
        return
    member = fleet.of(event)
    match event.kind.verb:
        case "pause":
            await member.pause(event.seconds)
        case "cut" if member.link is not None:
            await member.link.cut(event.seconds)
        case "silence" if member.link is not None:
            await member.link.silence(event.seconds)
        case "term":
            member.signal(signal.SIGTERM, away_s=event.seconds)
        case "kill":
            pid = member.pid
            member.kill(away_s=event.seconds, point=event.point)
            if event.kind is Kind.KILL_WORKER and pid is not None:
                await watch.after(pid)


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
        await asyncio.sleep(max(0.0, started + CHAOS_S - time.monotonic()))
    for member in fleet.members:
        member.calm()


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
    """Gateways that remember for seconds only delete the job: its tombstone is left for that long, and then no key of it."""
    for gateway in fleet.gateways:
        gateway.env["ROLLWAY_RETAIN_S"] = str(RETAIN_S)
    await asyncio.gather(*(gateway.replace() for gateway in fleet.gateways))
    await client.call("DELETE", f"/v1/jobs/{job_id}", 204, 404)
    async with redis.asyncio.Redis.from_url(fleet.redis_url, decode_responses=True) as store:

        async def left(may_stay_s: Mapping[str, float]) -> list[str]:
            return books.left_keys({key: await store.ttl(key) async for key in store.scan_iter(match=f"*{job_id}*")}, may_stay_s)

        # Who deletes a job lets its generators go on, and keeps the right to for a moment.
        assert await left({"job": RETAIN_S, "synced": SYNCED_S, "driver": DRIVER_S}) == []
        assert not await store.sismember(keys.JOBS, job_id)
        assert job_id not in await store.hvals(keys.names("alpha"))
        ends_at = time.monotonic() + RETAIN_S + 30
        while found := await left({"synced": SYNCED_S}):
            assert time.monotonic() < ends_at, f"keys were left: {found}"
            await asyncio.sleep(0.2)


def read_records(fleet: Fleet, tokenizer: Path, groups: dict[str, dict[str, Any]]) -> list[books.Sampled]:
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    by_task = {group["task_id"]: group_id for group_id, group in groups.items()}
    lines = [line for record in fleet.records for line in record.read_text().splitlines()]
    return list(books.read_record(lines, lambda ids: by_task[books.task_of(decoder.decode(list(ids)))]))


async def test_chaos_leaves_the_books_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = schedule.draw(SEED, seconds=CHAOS_S, gap_s=GAP_S, lease_s=LEASE_S, points=POINTS)
    sys.stdout.write("\n".join([f"seed {SEED}, {CHAOS_S:.0f} s:", *map(str, events)]) + "\n")  # shown where the test fails
    (tmp_path / "policy.json").write_text(json.dumps(POLICY))
    tokenizer, chance = tiny_qwen3(tmp_path / "tokenizers" / "tiny"), random.Random(SEED)
    async with running(tmp_path, tokenizer, settings=SETTINGS, tokens_per_s=400) as fleet:
        try:
            async with Client(fleet.urls, KEYS["alpha"], chance=chance) as client:
                report = await play(fleet, client, events, tokenizer, chance)
        finally:
            statuses = {worker.name: await worker.leave() for worker in fleet.workers}
            left = await boxes(fleet)
            await clean_up(fleet.env)
    with capsys.disabled():
        sys.stdout.write(f"\n{report}\n")
    assert set(statuses.values()) == {0}
    assert left == []


async def play(fleet: Fleet, client: Client, events: list[Event], tokenizer: Path, chance: random.Random) -> str:
    began = time.monotonic()
    await fleet.up()
    spec = {
        "name": "chaos",
        "model": {"tokenizer": str(tokenizer), "renderer": "qwen3", "context_tokens": 8192},
        "generators": fleet.linked_generator_urls,
        "group_size": GROUP_SIZE,
        "groups_per_step": 4,
        "staleness_budget": 12,
        "limits": {"turns": 8, "tokens": 4096, "turn_tokens": 1024, "tool_s": 20},
    }
    job_id = (await client.call("POST", "/v1/jobs", 200, 201, json=spec)).json()["job_id"]
    trainer, watch, fed = Trainer(client, job_id, fleet.generator_urls, chance=chance), Watch(fleet.redis_url, job_id), asyncio.Event()
    labelling = asyncio.create_task(trainer.label())
    at = [time.monotonic()]
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(trainer.feed(make_task, until=fed))
            group.create_task(within(CHAOS_S + DRAIN_S, trainer.train(fed=fed)))
            await disturb(events, fleet, watch)
            at.append(time.monotonic())
            fed.set()
        await trainer.publish()
    finally:
        labelling.cancel()
        await asyncio.gather(labelling, return_exceptions=True)
        await watch.aclose()
    at.append(time.monotonic())
    groups = await every_group(client, job_id)
    counts = (await client.call("GET", f"/v1/jobs/{job_id}")).json()["counts"]
    found = books.Found(
        submitted=trainer.submitted, groups=groups, counts=counts, deliveries=trainer.deliveries, acked=trainer.acked,
        record=read_records(fleet, tokenizer, groups),
    )  # fmt: skip
    audit = books.audit(found)
    crashes = [point for member in fleet.members for point in member.crashes]
    report = "\n".join([
        f"chaos: seed {SEED}, {len(events)} events in {CHAOS_S:.0f} s; {len(groups)} groups, "
        f"{sum(group['requested_size'] for group in groups.values())} rollouts; {client.tries} requests; counts {counts}",
        f"tokens sampled: {dict(audit.tokens)}; attempts ended: {dict(audit.attempts)}",
        f"died at named points: {sorted(crashes)} of {sorted({event.point for event in events if event.point})}",
        f"lease {LEASE_S:.0f} s; {watch.found}",
    ])  # fmt: skip
    sys.stdout.write(report + "\n")
    assert audit.problems == []
    assert audit.generations > 0
    assert len(groups) >= FLOOR
    assert crashes
    await assert_swept(fleet)
    at.append(time.monotonic())
    await assert_forgotten(fleet, client, job_id)
    sys.stdout.write(f"phases: {[round(a - began, 1) for a in [*at, time.monotonic()]]}\n")
    return report


async def within(seconds: float, what: Any) -> None:
    async with asyncio.timeout(seconds):
        await what
