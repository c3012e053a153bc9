"""Batches over HTTP: leased once, in both forms, acked, extended, released; the same request is the same batch."""

import asyncio
import json

import httpx
import numpy as np
import pyarrow as pa
import pytest

from service.arrow import MEDIA_TYPE
from service.journal import Extended, encode
from service.keys import JobKeys
from tests.gateway_play import finish, job_body, play, take_all, task_body, turns
from tests.gateway_stack import RunningGateway

ARRAYS = ("token_ids", "loss_mask", "logprobs", "versions")


@pytest.fixture
async def job_id(client: httpx.AsyncClient) -> str:
    return str((await client.post("/v1/jobs", json=job_body(group_size=3))).json()["job_id"])


async def make_ready(gateway: RunningGateway, client: httpx.AsyncClient, job_id: str, count: int) -> None:
    tasks = [task_body(number, metadata={"number": number}) for number in range(count)]
    assert (await client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": tasks})).status_code == 202
    assert await play(gateway.leases, job_id) == 3 * count


async def lease(client: httpx.AsyncClient, job_id: str, groups: int, *, key: str | None = None, **more: object) -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return await client.post(f"/v1/jobs/{job_id}/batches", json={"groups": groups, **more}, headers=headers)


async def test_a_batch_is_leased_once_and_acked(gateway: RunningGateway, client: httpx.AsyncClient, job_id: str) -> None:
    await make_ready(gateway, client, job_id, 4)
    first, second = await lease(client, job_id, 3), await lease(client, job_id, 3)
    assert (first.status_code, second.status_code, second.headers["rollway-drained"]) == (200, 204, "false")
    batch = first.json()
    assert [len(group["trajectories"]) for group in batch["groups"]] == [3, 3, 3]
    trajectory = batch["groups"][0]["trajectories"][0]
    assert (trajectory["reward"], trajectory["reward_detail"], trajectory["metadata"]) == (1.0, {"passed": 3}, {"number": 0})
    assert trajectory["versions"] == {"oldest": 0, "newest": 0, "environment_gap": 0}
    [sample] = trajectory["samples"]
    assert {len(sample[name]) for name in ARRAYS} == {17}
    assert sample["loss_mask"] == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    [live] = (await client.get(f"/v1/jobs/{job_id}/batches")).json()["batches"]
    assert live["batch_id"] == batch["batch_id"]
    assert (await client.get(f"/v1/batches/{batch['batch_id']}")).json() == batch
    for _ in range(2):
        assert (await client.post(f"/v1/batches/{batch['batch_id']}/ack")).status_code == 200
    assert (await client.get(f"/v1/batches/{batch['batch_id']}")).status_code == 410
    assert (await client.post(f"/v1/batches/{batch['batch_id']}/extend", json={"lease_s": 5})).status_code == 410


async def test_a_group_that_the_trainer_holds_is_not_cancelled(gateway: RunningGateway, client: httpx.AsyncClient, job_id: str) -> None:
    await make_ready(gateway, client, job_id, 1)
    batch = (await lease(client, job_id, 1)).json()
    group_id, rollout_id = batch["groups"][0]["group_id"], batch["groups"][0]["trajectories"][0]["rollout_id"]
    for path in (f"/v1/groups/{group_id}/cancel", f"/v1/rollouts/{rollout_id}/cancel"):
        answer = await client.post(path)
        assert (answer.status_code, answer.headers["content-type"]) == (409, "application/problem+json")
        assert batch["batch_id"] in answer.json()["detail"]
    assert (await client.get(f"/v1/batches/{batch['batch_id']}")).json() == batch


async def test_arrow_says_what_json_says(gateway: RunningGateway, client: httpx.AsyncClient, job_id: str) -> None:
    await make_ready(gateway, client, job_id, 4)
    batch = (await lease(client, job_id, 4)).json()
    answer = await client.get(f"/v1/batches/{batch['batch_id']}", headers={"Accept": MEDIA_TYPE})
    assert answer.headers["content-type"] == MEDIA_TYPE
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table.schema.metadata[b"batch_id"].decode() == batch["batch_id"]
    expected = [
        (group, trajectory, sample) for group in batch["groups"] for trajectory in group["trajectories"] for sample in trajectory["samples"]
    ]
    rows = table.to_pylist()
    assert len(rows) == len(expected) == 12
    for row, (group, trajectory, sample) in zip(rows, expected, strict=True):
        for name in ("group_id", "task_id", "staleness", "requested_size", "size"):
            assert row[name] == group[name]
        for name in ("rollout_id", "index", "attempt", "outcome", "stop_reason", "reward", "turns", "tool_calls", "timing"):
            assert row[name] == trajectory[name]
        assert json.loads(row["reward_detail"]) == trajectory["reward_detail"]
        assert json.loads(row["metadata"]) == trajectory["metadata"]
        assert (row["oldest_version"], row["newest_version"]) == (trajectory["versions"]["oldest"], trajectory["versions"]["newest"])
        assert row["prompt_len"] == sample["prompt_len"]
        for name in ("token_ids", "loss_mask", "versions"):
            assert row[name] == sample[name]
        assert np.array_equal(np.float32(row["logprobs"]), np.float32(sample["logprobs"]))


async def test_case_051_a_short_group_carries_its_size_in_both_forms(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    body = job_body(group_size=3, min_group_size=2, group_retries=0)
    job_id = (await client.post("/v1/jobs", json=body)).json()["job_id"]
    await client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": [task_body(0), task_body(1)]})
    lost, *others = await take_all(gateway.leases, job_id)
    assert await gateway.leases.restart(lost, "sandbox: its engine is gone", retry=True) == "left_out"
    for other in others:
        await finish(gateway.leases, other, turns(2))
    batch = (await lease(client, job_id, 2)).json()
    sizes = {group["group_id"]: (group["size"], group["requested_size"]) for group in batch["groups"]}
    assert sorted(sizes.values()) == [(2, 3), (3, 3)]
    assert [len(group["trajectories"]) for group in batch["groups"]] == [group["size"] for group in batch["groups"]]
    arrow = await client.get(f"/v1/batches/{batch['batch_id']}", headers={"Accept": MEDIA_TYPE})
    rows = pa.ipc.open_stream(arrow.content).read_all().to_pylist()
    assert {row["group_id"]: (row["size"], row["requested_size"]) for row in rows} == sizes
    assert sorted((row["size"], row["index"]) for row in rows) == [(2, 1), (2, 2), (3, 0), (3, 1), (3, 2)]
    [short] = [group for group in (await client.get(f"/v1/jobs/{job_id}/groups")).json()["groups"] if group["size"] == 2]
    assert (short["requested_size"], short["failed_attempts"], short["members"][0]["state"]) == (3, 1, "failed")
    assert short["members"][0]["failures"] == ["sandbox: its engine is gone"]
    rollout = (await client.get(f"/v1/rollouts/{lost.rollout_id}?include=messages,samples")).json()
    assert (rollout["outcome"], rollout["reward"], rollout["samples"]) == ("failed", None, None)


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        pytest.param("text/html", 406, id="html"),
        pytest.param("*/*", 204, id="any"),
        pytest.param("application/json;q=0.5", 204, id="json"),
        pytest.param(f"text/html, {MEDIA_TYPE}", 204, id="arrow-among-others"),
    ],
)
async def test_the_form_is_negotiated(client: httpx.AsyncClient, job_id: str, accept: str, status: int) -> None:
    answer = await client.post(f"/v1/jobs/{job_id}/batches", json={"groups": 1}, headers={"Accept": accept})
    assert answer.status_code == status


async def test_the_same_key_is_the_same_batch(gateway: RunningGateway, client: httpx.AsyncClient, job_id: str) -> None:
    nothing = await lease(client, job_id, 2, key="k")
    assert (nothing.status_code, nothing.headers["rollway-drained"]) == (204, "true")
    await make_ready(gateway, client, job_id, 4)
    first, again, other = (
        await lease(client, job_id, 2, key="k"),
        await lease(client, job_id, 2, key="k"),
        await lease(client, job_id, 1, key="k"),
    )
    assert (first.status_code, again.status_code, other.status_code) == (200, 200, 409)
    assert first.json() == again.json()


async def test_more_than_the_gate_lets_out_is_refused(client: httpx.AsyncClient, job_id: str) -> None:
    answer = await lease(client, job_id, 9)
    assert answer.status_code == 422
    assert answer.json()["fields"][0]["field"] == "groups"


@pytest.mark.parametrize("wrong", [{"wait_s": 61}, {"lease_s": 0}, {"groups": 0}, {"groups": 1.5}, {"trains_version": -1}], ids=str)
async def test_bounds(client: httpx.AsyncClient, job_id: str, wrong: dict[str, float]) -> None:
    answer = await client.post(f"/v1/jobs/{job_id}/batches", json={"groups": 1} | wrong)
    assert answer.status_code == 422
    assert answer.json()["fields"][0]["field"] == next(iter(wrong))


async def test_waiting_ends_when_a_batch_is_there(gateway: RunningGateway, client: httpx.AsyncClient, job_id: str) -> None:
    tasks = {"tasks": [task_body()]}
    await client.post(f"/v1/jobs/{job_id}/tasks", json=tasks)
    waiting = asyncio.create_task(lease(client, job_id, 1, wait_s=20))
    await asyncio.sleep(0.2)
    await play(gateway.leases, job_id)
    assert (await waiting).status_code == 200


async def test_a_released_batch_comes_back_first(gateway: RunningGateway, client: httpx.AsyncClient, job_id: str) -> None:
    await make_ready(gateway, client, job_id, 2)
    batch = (await lease(client, job_id, 1)).json()
    assert (await client.post(f"/v1/batches/{batch['batch_id']}/extend", json={"lease_s": 60})).status_code == 200
    for _ in range(2):
        assert (await client.post(f"/v1/batches/{batch['batch_id']}/release")).status_code == 200
    assert (await lease(client, job_id, 1)).json()["groups"][0]["group_id"] == batch["groups"][0]["group_id"]


async def test_policy_acks_in_the_same_step(gateway: RunningGateway, client: httpx.AsyncClient, job_id: str) -> None:
    await make_ready(gateway, client, job_id, 2)
    batch = (await lease(client, job_id, 2)).json()
    answer = await client.put(f"/v1/jobs/{job_id}/policy", json={"version": 1, "ack": [batch["batch_id"]]})
    assert (answer.status_code, answer.json()["counts"]["acked"], answer.json()["counts"]["charged"]) == (200, 2, 0)
    shown = (await client.get(f"/v1/rollouts/{batch['groups'][0]['group_id']}-r0?include=messages,samples")).json()
    assert (shown["state"], shown["messages"], shown["samples"]) == ("ended", None, None)


@pytest.mark.parametrize("damage", [b"\xc1", encode(Extended(at=1.0, token_ids=b"123"))], ids=["undecodable", "half-an-id"])
async def test_a_damaged_journal_fails_its_group_and_no_other(
    gateway: RunningGateway, client: httpx.AsyncClient, job_id: str, damage: bytes
) -> None:
    await make_ready(gateway, client, job_id, 3)
    hurt = f"{job_id}-g2"
    await gateway.store.redis.lset(JobKeys(job_id).journal(f"{hurt}-r1"), 2, damage)
    answer = await lease(client, job_id, 2, key="k")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert hurt in answer.json()["detail"]
    group = (await client.get(f"/v1/jobs/{job_id}/groups/{hurt}")).json()
    assert (group["state"], group["reason"].startswith(f"journal: {hurt}-r1: ")) == ("failed", True)
    batch = (await lease(client, job_id, 2, key="k")).json()
    assert [group["group_id"] for group in batch["groups"]] == [f"{job_id}-g1", f"{job_id}-g3"]
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["counts"]["charged"] == 2
