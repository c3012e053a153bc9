"""A rollout's journal as server-sent events: followed, resumed, bounded, ended when the gateway leaves."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from service import journal
from service.keys import JobKeys
from tests.gateway_play import finish, job_body, take_all, task_body, turns
from tests.gateway_stack import RunningGateway, gateway_settings, running_gateway

Event = tuple[str, str, dict[str, Any]]


async def read_events(client: httpx.AsyncClient, rollout_id: str, *, last: str | None = None, count: int = 10_000) -> list[Event]:
    """(id, name, data) of the stream's events, until its end or `count` of them."""
    found: list[Event] = []
    async with client.stream("GET", f"/v1/rollouts/{rollout_id}/events", headers={"Last-Event-ID": last} if last else {}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        block: dict[str, str] = {}
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if line:
                block[name] = value
                continue
            if "data" in block:
                found.append((block["id"], block["event"], json.loads(block["data"])))
            block = {}
            if len(found) == count:
                break
    return found


async def start_one(gateway: RunningGateway, client: httpx.AsyncClient) -> tuple[str, Any]:
    """The id of a fresh rollout's group, and the leases of its two members."""
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
    await client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": [task_body()]})
    return job_id, await take_all(gateway.leases, job_id)


async def test_a_rollout_is_followed_to_its_end(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    _, (lease, _) = await start_one(gateway, client)
    reading = asyncio.create_task(read_events(client, lease.rollout_id))
    entries = turns(1)
    await finish(gateway.leases, lease, entries)
    events = await reading
    assert [event_id for event_id, _, _ in events] == [f"1-{index}" for index in range(len(entries))] + ["1-end"]
    names = [name for _, name, _ in events]
    assert names == ["opened", "prompted", "generated", "replied", "observed", "extended", "stopped", "scored", "ended"]
    data = {name: data for _, name, data in events}
    assert data["observed"]["text"] == "a\nb ü"
    assert (data["prompted"]["tokens"], data["generated"]["tokens"]) == (3, 5)
    assert data["scored"]["detail"] == {"passed": 3}
    assert "token_ids" not in data["generated"]


async def test_a_stream_resumes_where_it_was(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    _, (lease, _) = await start_one(gateway, client)
    await finish(gateway.leases, lease, turns(1))
    assert [event_id for event_id, _, _ in await read_events(client, lease.rollout_id, last="1-5")] == ["1-6", "1-7", "1-end"]
    assert len(await read_events(client, lease.rollout_id, last="nonsense")) == 9
    seen = await client.get(f"/v1/rollouts/{lease.rollout_id}/events", headers={"Last-Event-ID": "1-end"})
    assert seen.status_code == 204


async def test_a_new_attempt_starts_over(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    job_id, (lease, _) = await start_one(gateway, client)
    await gateway.leases.append(lease, turns(1)[:4], at_index=0)
    await gateway.leases.restart(lease, "generator: gone", retry=True)
    [again] = [found for found in await take_all(gateway.leases, job_id) if found.rollout_id == lease.rollout_id]
    opened = journal.Opened(at=9.0, attempt=2, worker="test")
    await gateway.leases.append(again, [opened], at_index=0)
    [(event_id, name, data)] = await read_events(client, lease.rollout_id, last="1-3", count=1)
    assert (event_id, name, data["attempt"]) == ("2-0", "opened", 2)


@pytest.mark.parametrize(
    ("damaged", "error", "event"),
    [
        pytest.param(b"\xc1", "journal: entry 4: an entry cannot be decoded", "damaged", id="undecodable"),
        pytest.param(journal.encode(turns(1)[0]), "journal: entry 4 (opened) is out of place", "opened", id="cannot-follow"),
    ],
)
async def test_a_damaged_journal_is_told_as_far_as_it_goes(
    gateway: RunningGateway, client: httpx.AsyncClient, damaged: bytes, error: str, event: str
) -> None:
    job_id, (lease, _) = await start_one(gateway, client)
    await finish(gateway.leases, lease, turns(1))
    await gateway.store.redis.lset(JobKeys(job_id).journal(lease.rollout_id), 4, damaged)
    answer = await client.get(f"/v1/rollouts/{lease.rollout_id}", params={"include": "messages,samples"})
    assert answer.status_code == 200
    told = answer.json()
    assert told["error"].startswith(error)
    assert (told["state"], told["reward"], told["timings"]["generate_s"], told["samples"]) == ("ended", 1.0, 0.25, None)
    assert [message["role"] for message in told["messages"]] == ["user", "assistant"]
    events = await read_events(client, lease.rollout_id)
    assert [name for _, name, _ in events][3:6] == ["replied", event, "extended"]
    assert events[-1][0] == "1-end"
    if event == "damaged":
        assert events[4][2]["error"].startswith("journal: an entry cannot be decoded")


async def test_streams_are_bounded_and_given_back(empty_redis_url: str, qwen3_dir: Path, tmp_path: Path) -> None:
    settings = gateway_settings(empty_redis_url, qwen3_dir, tmp_path, max_event_streams=1)
    async with running_gateway(settings) as gateway, gateway.client() as client:
        _, (lease, _) = await start_one(gateway, client)
        path = f"/v1/rollouts/{lease.rollout_id}/events"
        async with client.stream("GET", path):
            full = await client.get(path)
            assert (full.status_code, full.headers["retry-after"]) == (429, "5")
        await finish(gateway.leases, lease, turns(1))
        for _ in range(50):  # the gateway notices the closed connection at its next write
            if (await client.get(path)).status_code == 200:
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail("the place was never given back")


async def test_open_streams_and_long_polls_end_when_the_gateway_leaves(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    job_id, (lease, _) = await start_one(gateway, client)
    stream = asyncio.create_task(read_events(client, lease.rollout_id))
    poll = asyncio.create_task(client.post(f"/v1/jobs/{job_id}/batches", json={"groups": 1, "wait_s": 60}))
    await asyncio.sleep(0.3)
    gateway.server.leave()
    async with asyncio.timeout(4):  # far under the stream's 100 s and the poll's 60 s
        assert await stream == []
        assert (await poll).status_code == 204
