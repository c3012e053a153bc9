"""What clients may do for ever without anything growing, or being done for nobody."""

import asyncio
import re
from urllib.parse import urlsplit

import httpx

from tests.gateway_play import job_body, play, task_body
from tests.gateway_stack import KEYS, OPERATOR_KEY, RunningGateway

LABELS = {"method", "route", "status", "le", "tenant", "job", "reason", "format", "fate", "figure", "part", "limit"}


async def test_case_079_metrics_do_not_grow_with_ids_and_paths(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    created = await asyncio.gather(*(client.post("/v1/jobs", json=job_body(f"job-{n}")) for n in range(50)))
    jobs = [answer.json()["job_id"] for answer in created]
    tasks = {"tasks": [task_body(n) for n in range(4)]}
    submitted = await asyncio.gather(*(client.post(f"/v1/jobs/{job_id}/tasks", json=tasks) for job_id in jobs))
    assert {answer.status_code for answer in submitted} == {202}
    for number, lease in enumerate(await gateway.leases.take(jobs[0], "w", n=8)):
        if lease.index == 0:
            await gateway.leases.restart(lease, f"sandbox: container {number} is gone", retry=False)
    for number in range(200):
        assert (await client.get(f"/nowhere/{number}")).status_code == 404
        assert (await client.get(f"/v1/rollouts/{jobs[number % 50]}-g{number + 1}-r0")).status_code in (200, 404)
        await client.request(f"ODD{number}", "/v1/jobs")
    async with gateway.client(None, Authorization=f"Bearer {OPERATOR_KEY}") as operator:
        text = (await operator.get("/metrics")).text
    series = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(series) < 5000  # 50 jobs with fewer than 100 series each
    assert len(text) < 400_000
    assert {label for line in series for label in re.findall(r'(\w+)="', line)} <= LABELS
    assert not re.search(r"j[0-9a-f]{16}|nowhere|ODD|container \d", text)
    assert 'rollway_job_failed{job="job-0",reason="sandbox",tenant="red"} 4.0' in series


async def leave_early(gateway: RunningGateway, path: str, body: str) -> None:
    """Send a request and hang up without waiting for its answer."""
    address = urlsplit(gateway.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {KEYS['red']}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    await writer.drain()
    await asyncio.sleep(0.3)
    writer.close()
    await writer.wait_closed()


async def test_case_076_a_trainer_that_hangs_up_gets_no_batch(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    """Nothing is leased for nobody; the one that stays, and the work itself, are not touched."""
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
    await client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": [task_body(0)]})
    await leave_early(gateway, f"/v1/jobs/{job_id}/batches", '{"groups": 1, "wait_s": 30}')
    await asyncio.sleep(0.7)
    await play(gateway.leases, job_id)
    await asyncio.sleep(0.7)
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["counts"]["ready"] == 1
    assert (await client.post(f"/v1/jobs/{job_id}/batches", json={"groups": 1})).status_code == 200


async def test_case_076_what_was_submitted_by_one_who_hung_up_is_there(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
    body = '{"tasks": [{"task_id": "t", "messages": [{"role": "user", "content": "2 + 2?"}]}]}'
    await leave_early(gateway, f"/v1/jobs/{job_id}/tasks", body)
    async with asyncio.timeout(5):
        while not (groups := (await client.get(f"/v1/jobs/{job_id}/groups")).json()["groups"]):
            await asyncio.sleep(0.05)
    assert [group["state"] for group in groups] == ["queued"]
    assert await play(gateway.leases, job_id) == 2
