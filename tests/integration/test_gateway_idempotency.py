"""The same POST again gives the first answer again, and does nothing twice."""

import asyncio

import httpx
import pytest
from starlette.responses import Response

from service.errors import ConflictError, UnavailableError
from service.idempotency import Idempotency, RequestKey
from tests.gateway_play import job_body, task_body
from tests.gateway_stack import RunningGateway


@pytest.fixture
async def job_id(client: httpx.AsyncClient) -> str:
    return str((await client.post("/v1/jobs", json=job_body(backlog_limit=3))).json()["job_id"])


async def submit(client: httpx.AsyncClient, job_id: str, count: int, key: str) -> httpx.Response:
    body = {"tasks": [task_body(number) for number in range(count)]}
    return await client.post(f"/v1/jobs/{job_id}/tasks", json=body, headers={"Idempotency-Key": key})


async def test_a_repeated_submit_is_the_same_groups(client: httpx.AsyncClient, job_id: str) -> None:
    first, again = await submit(client, job_id, 2, "a"), await submit(client, job_id, 2, "a")
    assert (first.status_code, first.content) == (again.status_code, again.content)
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["counts"]["backlog"] == 2


async def test_the_same_key_with_another_body_is_refused(client: httpx.AsyncClient, job_id: str) -> None:
    await submit(client, job_id, 1, "a")
    assert (await submit(client, job_id, 2, "a")).status_code == 409
    assert (await submit(client, job_id, 2, "b")).status_code == 202


async def test_copies_in_flight_do_it_once(client: httpx.AsyncClient, job_id: str) -> None:
    answers = await asyncio.gather(*(submit(client, job_id, 2, "a") for _ in range(8)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({str(answer.json()["groups"]) for answer in answers}) == 1
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["counts"]["backlog"] == 2


async def test_a_refusal_is_remembered_and_a_full_backlog_is_not(client: httpx.AsyncClient, job_id: str) -> None:
    assert (await submit(client, job_id, 4, "a")).status_code == 429
    await client.patch(f"/v1/jobs/{job_id}", json={"backlog_limit": 10})
    assert (await submit(client, job_id, 4, "a")).status_code == 202
    wrong = {"tasks": [{"task_id": "x"}]}
    answers = [await client.post(f"/v1/jobs/{job_id}/tasks", json=wrong, headers={"Idempotency-Key": "w"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [422, 422]
    assert answers[0].content == answers[1].content
    assert answers[1].headers["content-type"] == "application/problem+json"


async def test_keys_belong_to_a_tenant_and_a_call(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "same"}
    red = await client.post("/v1/jobs", json=job_body("one"), headers=headers)
    async with gateway.client("blue") as blue:
        other = await blue.post("/v1/jobs", json=job_body("two"), headers=headers)
    assert (red.status_code, other.status_code) == (201, 201)
    again = await client.post("/v1/jobs", json=job_body("one"), headers=headers)
    assert (again.status_code, again.headers["location"]) == (201, red.headers["location"])


@pytest.mark.parametrize("key", ["", "k" * 256])
async def test_a_key_has_a_length(client: httpx.AsyncClient, job_id: str, key: str) -> None:
    assert (await submit(client, job_id, 1, key)).status_code == 422


async def test_a_failure_that_may_have_taken_effect_keeps_its_body(gateway: RunningGateway) -> None:
    idempotency = Idempotency(gateway.store, retain_s=60)
    first, other = (RequestKey.of(tenant="red", call="POST /x", key="k", body=body) for body in (b"1", b"2"))

    async def away() -> Response:
        raise UnavailableError("written, but not seen to be on the disk", retry_after_s=1)

    async def done() -> Response:
        return Response("done")

    assert (await idempotency.run(first, away)).status_code == 503
    with pytest.raises(ConflictError):
        await idempotency.run(other, done)
    assert (await idempotency.run(first, done)).body == b"done"
