"""The OpenAPI document is complete and true: every call is in it, every answer is one that it names, and no body makes a 5xx."""

import itertools
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.app import create_app
from service.settings import Settings
from tests.gateway_play import job_body
from tests.gateway_stack import RunningGateway

CALLS = {
    "/healthz": "get",
    "/readyz": "get",
    "/metrics": "get",
    "/v1/jobs": "get post",
    "/v1/jobs/{job_id}": "get patch delete",
    "/v1/jobs/{job_id}/preflight": "post",
    "/v1/jobs/{job_id}/policy": "put",
    "/v1/jobs/{job_id}/tasks": "post",
    "/v1/jobs/{job_id}/throughput": "get",
    "/v1/jobs/{job_id}/groups": "get",
    "/v1/jobs/{job_id}/solve_rates": "get",
    "/v1/jobs/{job_id}/groups/{group_id}": "get",
    "/v1/jobs/{job_id}/batches": "get post",
    "/v1/groups/{group_id}/cancel": "post",
    "/v1/rollouts/{rollout_id}": "get",
    "/v1/rollouts/{rollout_id}/events": "get",
    "/v1/rollouts/{rollout_id}/cancel": "post",
    "/v1/batches/{batch_id}": "get",
    "/v1/batches/{batch_id}/ack": "post",
    "/v1/batches/{batch_id}/extend": "post",
    "/v1/batches/{batch_id}/release": "post",
    "/v1/jobs/{job_id}/weight_updates": "post",
    "/v1/weight_updates/{update_id}": "get",
    "/v1/weight_updates/{update_id}/finish": "post",
    "/v1/weight_updates/{update_id}/abandon": "post",
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = create_app(Settings()).openapi()
    return found


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, operation) for path, methods in document["paths"].items() for method, operation in methods.items()]


def references(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for inner in value.values() for ref in references(inner)]
    return [ref for inner in value for ref in references(inner)] if isinstance(value, list) else []


def test_every_call_is_in_it(document: dict[str, Any]) -> None:
    assert {path: set(methods) for path, methods in document["paths"].items()} == {
        path: set(names.split()) for path, names in CALLS.items()
    }


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for reference in references(document):
        found: Any = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]


def test_every_call_names_its_bodies_keys_and_problems(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        if path == "/healthz":
            continue
        assert "application/problem+json" in operation["responses"]["401"]["content"], path
        assert ("requestBody" in operation) == (method in ("post", "put", "patch")), path
        headers = {parameter["name"] for parameter in operation.get("parameters", []) if parameter["in"] == "header"}
        assert ("Idempotency-Key" in headers) == (method == "post"), path


def test_what_is_no_json_does_not_say_so(document: dict[str, Any]) -> None:
    for path, form in [("/v1/rollouts/{rollout_id}/events", "text/event-stream"), ("/metrics", "text/plain")]:
        assert list(document["paths"][path]["get"]["responses"]["200"]["content"]) == [form]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = [
    "name",
    "model",
    "generators",
    "limits",
    "sandbox",
    "tasks",
    "groups",
    "wait_s",
    "lease_s",
    "version",
    "ack",
    "rollback",
    "trains_version",
]
bodies = st.dictionaries(st.sampled_from(NAMES), anything, max_size=5) | anything


async def test_no_body_makes_a_5xx_or_an_unnamed_status(
    gateway: RunningGateway, client: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
    ids = {"job_id": job_id, "group_id": f"{job_id}-g1", "rollout_id": f"{job_id}-g1-r0", "batch_id": f"{job_id}-b1"}
    ids["update_id"] = f"{job_id}-u1"
    takers = [(path, method, operation) for path, method, operation in operations(document) if "requestBody" in operation]
    examples: list[Any] = []

    @settings(max_examples=60, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(bodies)
    def collect(body: Any) -> None:
        examples.append(body)

    collect()
    for body, (path, method, operation) in zip(examples, itertools.cycle(takers), strict=False):
        answer = await client.request(
            method,
            path.format(**ids),
            content=json.dumps(body).encode("utf-8", "surrogatepass"),
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code < 500, (path, body, answer.text)
        assert str(answer.status_code) in operation["responses"], (path, body, answer.status_code)
