"""Workers and gateways are killed before and after each step that the store is told of; others finish what they left, once."""

import asyncio
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.keys import JobKeys
from service.settings import Settings
from service.store import open_store
from tests.e2e.doomed import GATEWAYS, LOSERS, WORKERS, doomed, points
from tests.e2e.stack import KEYS, Stack, call, end, free_port, ready, rule, running, spawn
from tests.e2e.test_faults import docker
from tests.e2e.test_main_path import assert_equals_record, containers, flat
from tests.sandbox_backends import has_engine

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(not has_engine(), reason="needs a Docker engine"),
    pytest.mark.timeout(480),
]

FIRST, SECOND = "echo 1 >> /work/log; sleep 8", "echo 2 >> /work/log; sleep 8"
"""While one runs its sandbox is killed, by a machine that runs all the doomed at once."""
POLICY: dict[str, Any] = {
    "rules": [
        rule("do each.", call("bash", command=FIRST), call("bash", command=SECOND) + "\n" + call("submit")),
        rule("do destroy.", call("bash", command="tail /dev/zero; sleep 60; true")),
        rule("do nothing.", "Done."),
    ]
}
EACH = {
    "messages": [{"role": "user", "content": "Please do each."}],
    "tools": ["bash", "submit"],
    "verifier": {"command": 'test "$(cat /work/log)" = "$(printf \'1\\n2\')"', "timeout_s": 20, "artifacts": ["/work/log"]},
    "sandbox": {"shell": "per_call", "snapshot": {"every_turns": 1}},
}
DESTROY = {
    "messages": [{"role": "user", "content": "Please do destroy."}],
    "tools": ["bash", "submit"],
    "limits": {"tool_s": 100},
    "sandbox": {"memory_mib": 64},
}
NOTHING = {"messages": [{"role": "user", "content": "Please do nothing."}], "tools": []}
ONE_BY_ONE = {"ROLLWAY_WORKER_ROLLOUTS": "1", "ROLLWAY_SANDBOX_POOL": "0", "ROLLWAY_LEASE_S": "10", "ROLLWAY_GRACE_S": "60"}
"""So many workers start at once: the lease must last that long. One that is told to leave comes to its next step, after a command's end."""


# ------------------------------------------------------------------------------------------------------------------------- workers


async def held(stack: Stack, job_id: str, pid: int) -> dict[str, Any]:
    """The rollout that a worker holds, as the API tells it, once its sandbox is there."""
    name = f"{socket.gethostname()}-{pid}"
    async with asyncio.timeout(150):
        while True:
            groups = (await stack.api.get(f"/v1/jobs/{job_id}/groups")).json()["groups"]
            for member in (member for group in groups for member in group["members"]):
                if member["worker"] == name and (found := await detail(stack, member["rollout_id"]))["sandbox_id"]:
                    return found
            await asyncio.sleep(0.25)


async def detail(stack: Stack, rollout_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await stack.api.get(f"/v1/rollouts/{rollout_id}")).json()
    return found


async def trouble(stack: Stack, job_id: str, step: str, pid: int) -> None:
    """What brings a worker to a step that no other comes to, while its rollout's first or second command runs."""
    found = await held(stack, job_id, pid)
    if step in ("handed_back", "release"):
        os.kill(pid, signal.SIGTERM)
        return
    async with asyncio.timeout(100):
        while step == "restored" and (found := await detail(stack, found["rollout_id"]))["turns"] < 2:
            await asyncio.sleep(0.1)
    await docker("kill", found["sandbox_id"])


async def all_swept(stack: Stack) -> None:
    """What nobody owns any more goes with a sweep, as soon as no worker that might has been heard of for a while."""
    async with asyncio.timeout(100):
        while await containers(stack, ""):
            sweep = await spawn("sandbox", "cleanup", "--older-than=0", "--yes", env=stack.env, log=stack.folder / "sweep.log")
            assert await sweep.wait() == 0


async def test_workers_killed_at_any_step_leave_what_others_finish(tmp_path: Path, qwen3_dir: Path) -> None:
    """Each takes one rollout and dies at its point; the side effects and the tokens tell whether it was gone on with well."""
    lives = points(WORKERS)
    async with running(tmp_path, qwen3_dir, POLICY, workers=0) as stack:
        job_id = await stack.job("each", group_size=1, groups_per_step=len(lives))
        groups = await stack.submit(job_id, *(EACH | {"task_id": f"each-{number}"} for number in range(len(lives))))
        async with doomed(stack.env | ONE_BY_ONE, tmp_path / "doomed.log", qwen3_dir, lives) as workers, asyncio.timeout(200):
            async with asyncio.TaskGroup() as group:
                for step in ("restart", "restored", "handed_back", "release"):
                    for point in points([step]):
                        group.create_task(trouble(stack, job_id, step, workers.pids[point]))
            assert await workers.end() == dict.fromkeys(lives, -signal.SIGKILL)
        healthy = await spawn("worker", env=stack.env, log=tmp_path / "healthy.log")
        try:
            batch = await stack.batch(job_id, len(lives), wait_s=180)
        finally:
            await end(healthy)
        assert sorted(group["group_id"] for group in batch["groups"]) == sorted(groups)
        assert {(t["reward"], t["stop_reason"]) for t, _ in flat(batch)} == {(1.0, "submitted")}, "a command ran twice, or never"
        attempts = sorted(t["attempt"] for t, _ in flat(batch))
        assert attempts == [1] * (len(lives) - 2) + [2, 2], "an attempt was given up that could have been gone on with"
        assert assert_equals_record(stack, batch) == 2 * len(lives)
        await all_swept(stack)


async def destroying(stack: Stack) -> None:
    """Whatever sandbox has run out of memory ends."""
    while True:
        for box in await containers(stack, ""):
            if "sleep 60\n" in await docker("top", box):
                await docker("kill", box)
        await asyncio.sleep(0.1)


async def test_workers_killed_when_the_model_destroyed_its_sandbox(tmp_path: Path, qwen3_dir: Path) -> None:
    """Once is infrastructure's doing, twice is the model's answer: whoever comes to write that, and however often nobody has seen it."""
    lives = points(LOSERS)
    async with running(tmp_path, qwen3_dir, POLICY, workers=0) as stack:
        job_id = await stack.job("destroy", group_size=1, groups_per_step=len(lives))
        await stack.submit(job_id, *(DESTROY | {"task_id": f"destroy-{number}"} for number in range(len(lives))))
        ending = asyncio.create_task(destroying(stack))
        try:
            async with doomed(stack.env | ONE_BY_ONE, tmp_path / "doomed.log", qwen3_dir, lives) as workers, asyncio.timeout(200):
                assert await workers.end() == dict.fromkeys(lives, -signal.SIGKILL)
            healthy = await spawn("worker", env=stack.env, log=tmp_path / "healthy.log")
            try:
                batch = await stack.batch(job_id, len(lives), wait_s=180)
            finally:
                await end(healthy)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
        assert sorted((t["attempt"], t["reward"], t["stop_reason"]) for t, _ in flat(batch)) == [
            (2, 0.0, "sandbox_destroyed"),
            (3, 0.0, "sandbox_destroyed"),
        ]


# ------------------------------------------------------------------------------------------------------------------------ gateways


@dataclass(frozen=True, slots=True)
class Gateways:
    """One that is well, and for each point one that dies there."""

    stack: Stack
    doomed: Mapping[str, httpx.AsyncClient]
    done: list[str]

    async def asked(self, step: str, method: str, path: str, json: Any = None) -> httpx.Response:
        """The answer that a careful client gets in the end: it asks with one key, and both gateways it asked first have died."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        for point in points([step]):
            with pytest.raises(httpx.TransportError):
                await self.doomed[point].request(method, path, json=json, headers=headers)
            self.done.append(point)
        reply = await self.stack.api.request(method, path, json=json, headers=headers)
        assert reply.is_success, reply.text
        return reply


@asynccontextmanager
async def gateways(stack: Stack, lives: Sequence[str]) -> AsyncIterator[Gateways]:
    ports = {free_port(): point for point in lives}
    assert len(ports) == len(lives)
    headers = {"Authorization": f"Bearer {KEYS['alpha']}"}
    born = [f"{port} {point}" for port, point in ports.items()]
    async with doomed(stack.env, stack.folder / "doomed.log", stack.tokenizer, born) as processes:
        clients = {
            point: httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=20) for port, point in ports.items()
        }
        try:
            for client in clients.values():
                await ready(client, "/healthz")
            yield (made := Gateways(stack, clients, []))
        finally:
            for client in clients.values():
                await client.aclose()
        assert sorted(made.done) == sorted(lives)
        async with asyncio.timeout(60):
            assert await processes.end() == dict.fromkeys(born, -signal.SIGKILL)


async def damage(stack: Stack, job_id: str, group_id: str) -> None:
    async with open_store(Settings(data_dir=Path(stack.env["ROLLWAY_DATA_DIR"]))) as store:
        await store.redis.lset(JobKeys(job_id).journal(f"{group_id}-r0"), 0, b"\xc1")


async def test_gateways_killed_at_any_step_did_it_once_or_not_at_all(tmp_path: Path, qwen3_dir: Path) -> None:
    """Each step is asked of a gateway that dies before it, of one that dies after it, and of one that lives, under one key."""
    async with running(tmp_path, qwen3_dir, POLICY) as stack, gateways(stack, points(GATEWAYS)) as gates:
        spec = (await stack.api.get(f"/v1/jobs/{await stack.job('model')}")).json()["spec"]
        changes = {"name": "each", "group_size": 1, "groups_per_step": 4, "backlog_limit": 50}
        job_id = (await gates.asked("publish", "POST", "/v1/jobs", spec | changes)).json()["job_id"]
        jobs = (await stack.api.get("/v1/jobs")).json()["jobs"]
        assert sorted(job["name"] for job in jobs) == ["each", "model"]
        path = f"/v1/jobs/{job_id}"

        tasks = {"tasks": [NOTHING | {"task_id": f"t{number}"} for number in range(5)]}
        submitted = (await gates.asked("submit", "POST", f"{path}/tasks", tasks)).json()["groups"]
        ids = [group["group_id"] for group in submitted]
        assert [group["group_id"] for group in (await stack.api.get(f"{path}/groups")).json()["groups"]] == ids
        assert (await gates.asked("patch_job", "PATCH", path, {"backlog_limit": 60})).json()["spec"]["backlog_limit"] == 60

        for group_id in ids:
            await stack.group(group_id, "ready")
        await damage(stack, job_id, ids[0])
        batch = (await gates.asked("spoil", "POST", f"{path}/batches", {"groups": 1})).json()
        assert [group["group_id"] for group in batch["groups"]] == ids[1:2]
        assert (await stack.api.get(f"{path}/groups/{ids[0]}")).json()["reason"].startswith("journal: ")
        assert (await gates.asked("ack_batch", "POST", f"/v1/batches/{batch['batch_id']}/ack")).json()["state"] == "acked"

        batch = (await gates.asked("lease_batch", "POST", f"{path}/batches", {"groups": 1})).json()
        assert [live["batch_id"] for live in (await stack.api.get(f"{path}/batches")).json()["batches"]] == [batch["batch_id"]]
        until = (await gates.asked("hold_batch", "POST", f"/v1/batches/{batch['batch_id']}/extend", {"lease_s": 2000})).json()[
            "lease_until"
        ]
        assert until > batch["lease_until"] + 1000
        told = await gates.asked("policy", "PUT", f"{path}/policy", {"version": 1, "ack": [batch["batch_id"]]})
        assert told.json()["policy_version"] == 1
        assert (await gates.asked("stop_stale", "PUT", f"{path}/policy", {"version": 1})).json()["policy_version"] == 1
        assert (await gates.asked("cancel", "POST", f"/v1/groups/{ids[4]}/cancel")).json()["state"] == "cancelled"

        counts = (await stack.api.get(path)).json()["counts"]
        assert {name: counts[name] for name in ("acked", "cancelled", "failed", "ready", "leased", "running", "backlog")} == {
            "acked": 2, "cancelled": 1, "failed": {"journal": 1}, "ready": 1, "leased": 0, "running": 0, "backlog": 0,
        }  # fmt: skip
        assert (await gates.asked("delete_job", "DELETE", path)).status_code == 204
        assert [job["name"] for job in (await stack.api.get("/v1/jobs")).json()["jobs"]] == ["model"]
