"""Jobs over HTTP: created once, read, changed, deleted; what is wrong is named by its field."""

from typing import Any

import httpx
import pytest

from tests.gateway_play import DEAD_GENERATOR, job_body, task_body
from tests.gateway_stack import RunningGateway


def fields(answer: httpx.Response) -> dict[str, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return {entry["field"]: entry["problem"] for entry in answer.json().get("fields", [])}


async def test_create_is_once(client: httpx.AsyncClient) -> None:
    first = await client.post("/v1/jobs", json=job_body())
    again = await client.post("/v1/jobs", json=job_body())
    other = await client.post("/v1/jobs", json=job_body(group_size=4))
    assert (first.status_code, again.status_code, other.status_code) == (201, 200, 409)
    assert first.json()["job_id"] == again.json()["job_id"]
    assert first.headers["location"] == f"/v1/jobs/{first.json()['job_id']}"
    assert first.json()["counts"]["capacity"] == 8
    assert "differ in group_size; group_size cannot change" in other.json()["detail"]
    patchable = await client.post("/v1/jobs", json=job_body(staleness_budget=7, limits={"turns": 7}))
    assert f"differ in staleness_budget, limits; PATCH /v1/jobs/{first.json()['job_id']} " in patchable.json()["detail"]


async def test_a_generator_that_is_down_is_a_warning(client: httpx.AsyncClient) -> None:
    [warning] = (await client.post("/v1/jobs", json=job_body())).json()["warnings"]
    assert warning["field"] == "generators.0.url"
    assert DEAD_GENERATOR in warning["problem"]
    assert warning["cure"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"model": {"tokenizer": "no-such", "renderer": "qwen3", "context_tokens": 4096}}, "model.tokenizer", id="tokenizer"),
        pytest.param({"model": {"tokenizer": "qwen3", "renderer": "nope", "context_tokens": 4096}}, "model.renderer", id="renderer"),
        pytest.param({"generators": ["http://169.254.169.254/latest"]}, "generators.0.url", id="metadata-address"),
        pytest.param({"generators": [DEAD_GENERATOR, {"url": "http://10.0.0.1:30000"}]}, "generators.1.url", id="private-address"),
        pytest.param({"generators": ["ftp://x.example"]}, "generators.0", id="scheme"),
        pytest.param({"generators": [{"url": "nonsense"}]}, "generators.0.url", id="no-url"),
        pytest.param({"limits": {"turns": 0}}, "limits.turns", id="default-limit"),
        pytest.param({"sandbox": {"bakend": "docker"}}, "sandbox.bakend", id="unknown-default"),
        pytest.param({"sandbox": {"backend": "process"}}, "sandbox.backend", id="backend-not-offered"),
        pytest.param({"sandbox": {"network": "open"}}, "sandbox.network", id="case-080-network-not-allowed"),
        pytest.param({"group_size": 8, "max_in_flight_rollouts": 4}, "max_in_flight_rollouts", id="contradiction"),
        pytest.param({"group_size": "2"}, "group_size", id="type"),
        pytest.param({"min_group_size": 3}, "min_group_size", id="min-above-the-group"),
        pytest.param({"min_group_size": 0}, "min_group_size", id="min-of-nobody"),
        pytest.param({"group_retries": -1}, "group_retries", id="negative-retries"),
        pytest.param({"weight": 0}, "weight", id="no-weight"),
        pytest.param({"weight": 101}, "weight", id="too-much-weight"),
        pytest.param({"extra_members": -1}, "extra_members", id="fewer-than-none"),
        pytest.param({"extra_members": 1023}, "extra_members", id="more-members-than-a-group-can-have"),
        pytest.param({"extra_members": 255}, "max_in_flight_rollouts", id="no-room-for-the-extra-members"),
        pytest.param({"name": "no spaces"}, "name", id="name"),
        pytest.param({"unknown": 1}, "unknown", id="unknown-field"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, change: dict[str, Any], field: str) -> None:
    answer = await client.post("/v1/jobs", json=job_body(**change))
    assert answer.status_code == 422
    assert list(fields(answer)) == [field]
    assert (await client.get("/v1/jobs")).json() == {"jobs": []}


async def test_all_that_is_wrong_is_named_at_once(client: httpx.AsyncClient) -> None:
    wrong = job_body(group_size=0, limits={"turns": 0}, sandbox={"cpus": "two"}, sampling=3)
    answer = await client.post("/v1/jobs", json=wrong)
    assert fields(answer).keys() == {"group_size", "limits.turns", "sandbox.cpus", "sampling"}


async def test_a_default_image_that_no_worker_has_is_a_warning(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    await gateway.store.heartbeat("w1", {"backends": ["docker"], "images": {"docker": ["here:1"]}}, 30)
    for image, warned in [("here:1", []), ("gone:1", ["sandbox.image"])]:
        answer = await client.post("/v1/jobs", json=job_body(image.partition(":")[0], sandbox={"image": image}))
        assert [warning["field"] for warning in answer.json()["warnings"][1:]] == warned


async def test_secrets_are_never_read_back(client: httpx.AsyncClient) -> None:
    generator = {"url": DEAD_GENERATOR, "api_key": "sesame", "admin_api_key": "sesame", "headers": {"X-Key": "sesame"}}
    created = await client.post("/v1/jobs", json=job_body(generators=[generator]))
    assert "sesame" not in created.text
    assert created.json()["spec"]["generators"][0]["api_key"] == "***"


async def test_patch_changes_what_it_names(client: httpx.AsyncClient) -> None:
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
    changed = await client.patch(f"/v1/jobs/{job_id}", json={"staleness_budget": None, "limits": {"turns": 3}})
    assert changed.status_code == 200
    assert changed.json()["counts"]["capacity"] is None
    assert changed.json()["spec"]["limits"] == {"turns": 3}
    short = {"min_group_size": 1, "group_retries": 0}
    off: dict[str, Any] = {"min_group_size": None, "group_retries": None}
    for change in (short, off, {"weight": 2.5}):
        spec = (await client.patch(f"/v1/jobs/{job_id}", json=change)).json()["spec"]
        assert {name: spec[name] for name in change} == change
    refused = [({"limits": {"turns": -1}}, "limits.turns"), ({"groups_per_step": None}, "groups_per_step"), ({"name": "x"}, "name")]
    refused += [({"min_group_size": 3}, "min_group_size"), ({"group_retries": 1.5}, "group_retries")]
    refused += [({"weight": None}, "weight"), ({"weight": -1.0}, "weight"), ({"extra_members": 1}, "extra_members")]
    for wrong, field in refused:
        answer = await client.patch(f"/v1/jobs/{job_id}", json=wrong)
        assert answer.status_code == 422
        assert list(fields(answer)) == [field]
    told = fields(await client.patch(f"/v1/jobs/{job_id}", json={"group_size": 3, "grup_size": 3}))
    assert told["group_size"] == "cannot change after creation; make a new job"
    assert "is not a known field" in told["grup_size"]


async def test_delete_frees_the_name(client: httpx.AsyncClient) -> None:
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
    await client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": [task_body()]})
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 204
    assert (await client.delete(f"/v1/jobs/{job_id}")).status_code == 204
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["deleted"] is True
    assert (await client.post("/v1/jobs", json=job_body(group_size=4))).status_code == 201


async def test_preflight_names_what_would_fail(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
    found = (await client.post(f"/v1/jobs/{job_id}/preflight")).json()
    assert found["ok"] is False
    assert {finding["field"] for finding in found["findings"]} == {"generators.0.url", "sandbox.backend"}
    await gateway.store.heartbeat("w1", {"backends": ["docker"]}, 30)
    found = (await client.post(f"/v1/jobs/{job_id}/preflight")).json()
    assert {finding["field"] for finding in found["findings"]} == {"generators.0.url"}


async def test_policy_is_monotonic(client: httpx.AsyncClient) -> None:
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
    path = f"/v1/jobs/{job_id}/policy"
    statuses = [(await client.put(path, json={"version": version})).status_code for version in (3, 3, 2)]
    assert statuses == [200, 200, 409]
    rolled_back = await client.put(path, json={"version": 2, "rollback": True})
    assert (rolled_back.json()["policy_version"], rolled_back.json()["lineage"]) == (2, 1)
    foreign = await client.put(path, json={"version": 4, "ack": ["j0123456789abcdef-b1"]})
    assert foreign.status_code == 404
