"""Who may see what: keys, tenants, the operator, loopback without keys; every answer a problem."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway_play import job_body, play, task_body
from tests.gateway_stack import OPERATOR_KEY, RunningGateway, gateway_settings, running_gateway


@pytest.mark.parametrize("path", ["/readyz", "/metrics", "/openapi.json", "/docs", "/v1/jobs", "/nothing"])
@pytest.mark.parametrize("header", [None, "Bearer wrong-key", "Basic cmVkOg==", "Bearer", "Bearer \u00ff"])
async def test_without_a_key_nothing_is_answered(gateway: RunningGateway, path: str, header: str | None) -> None:
    headers = {"Authorization": header.encode("latin-1")} if header else {}
    async with gateway.client(None) as nobody:
        answer = await nobody.get(path, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert (await nobody.get("/healthz")).status_code == 200


async def test_the_operator_reaches_metrics_and_no_tenants_objects(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    await client.post("/v1/jobs", json=job_body("measured"))
    async with gateway.client(None, Authorization=f"Bearer {OPERATOR_KEY}") as operator:
        metrics = await operator.get("/metrics")
        assert 'rollway_job_capacity{job="measured",tenant="red"} 8.0' in metrics.text
        assert 'route="/v1/jobs",status="201"' in metrics.text
        assert (await operator.get("/v1/jobs")).status_code == 401
    assert (await client.get("/metrics")).status_code == 401


async def test_another_tenants_objects_are_not_there(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
    [group] = (await client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": [task_body()]})).json()["groups"]
    await play(gateway.leases, job_id)
    batch_id = (await client.post(f"/v1/jobs/{job_id}/batches", json={"groups": 1})).json()["batch_id"]
    unknown = "j" + "0" * 16
    async with gateway.client("blue") as blue:
        assert (await blue.get("/v1/jobs")).json() == {"jobs": []}
        for method, path, body in calls(job_id, group["group_id"], batch_id):
            foreign = await blue.request(method, path, json=body)
            missing = await blue.request(method, path.replace(job_id, unknown), json=body)
            assert foreign.status_code == missing.status_code == 404, (method, path)
            assert foreign.text.replace(job_id, unknown) == missing.text
    job = (await client.get(f"/v1/jobs/{job_id}")).json()
    assert (job["policy_version"], job["counts"]["leased"], job["deleted"]) == (0, 1, False)


def calls(job_id: str, group_id: str, batch_id: str) -> list[tuple[str, str, Any]]:
    """Every call with an id in it."""
    rollout = f"/v1/rollouts/{group_id}-r0"
    return [
        ("GET", f"/v1/jobs/{job_id}", None),
        ("PATCH", f"/v1/jobs/{job_id}", {"max_requeues": 1}),
        ("DELETE", f"/v1/jobs/{job_id}", None),
        ("POST", f"/v1/jobs/{job_id}/preflight", {}),
        ("POST", f"/v1/jobs/{job_id}/tasks", {"tasks": [task_body()]}),
        ("GET", f"/v1/jobs/{job_id}/groups", None),
        ("GET", f"/v1/jobs/{job_id}/groups/{group_id}", None),
        ("POST", f"/v1/jobs/{job_id}/batches", {"groups": 1}),
        ("GET", f"/v1/jobs/{job_id}/batches", None),
        ("PUT", f"/v1/jobs/{job_id}/policy", {"version": 1}),
        ("POST", f"/v1/groups/{group_id}/cancel", {}),
        ("GET", rollout, None),
        ("GET", f"{rollout}/events", None),
        ("POST", f"{rollout}/cancel", {}),
        ("GET", f"/v1/batches/{batch_id}", None),
        ("POST", f"/v1/batches/{batch_id}/ack", {}),
        ("POST", f"/v1/batches/{batch_id}/extend", {"lease_s": 5}),
        ("POST", f"/v1/batches/{batch_id}/release", {}),
    ]


@pytest.mark.parametrize("an_id", ["x", "j0", "%00", "j" + "0" * 16 + "-g99999999999999999999", "..%2Fjobs", "é", "j" + "0" * 16 + "-r0"])
async def test_a_malformed_id_is_an_unknown_one(client: httpx.AsyncClient, an_id: str) -> None:
    for method, path, body in calls(an_id, an_id, an_id):
        answer = await client.request(method, path, json=body)
        assert answer.status_code in (404, 405), (method, path, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"


async def test_a_wrong_method_says_which_are_right(client: httpx.AsyncClient) -> None:
    answer = await client.put("/v1/jobs")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")


@pytest.fixture
async def keyless(empty_redis_url: str, qwen3_dir: Path, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    settings = gateway_settings(empty_redis_url, qwen3_dir, tmp_path, api_keys={}, operator_key=None)
    async with running_gateway(settings) as running:
        yield running


async def test_without_keys_loopback_is_served_as_one_tenant(keyless: RunningGateway) -> None:
    async with keyless.client(None) as local:
        job_id = (await local.post("/v1/jobs", json=job_body())).json()["job_id"]
        assert (await keyless.jobs.get(job_id)).tenant == "local"
        assert (await local.get("/metrics")).status_code == 200
        rebound = await local.get("/v1/jobs", headers={"Host": "evil.example:80"})
        assert rebound.status_code == 401


async def test_readiness_needs_a_worker(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    assert (await client.get("/readyz")).status_code == 503
    await gateway.store.heartbeat("w1", {"backends": []}, 30)
    assert (await client.get("/readyz")).json() == {"status": "ready", "workers": 1}
