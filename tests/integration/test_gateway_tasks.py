"""Tasks, groups and rollouts over HTTP: all or nothing, every problem named, hostile bodies refused."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.bodies import SMALL_BYTES
from tests.gateway_play import job_body, play, take_all, task_body, turns
from tests.gateway_stack import RunningGateway, gateway_settings, running_gateway


@pytest.fixture
async def job_id(client: httpx.AsyncClient) -> str:
    answer = await client.post("/v1/jobs", json=job_body(limits={"turns": 7}, backlog_limit=200))
    return str(answer.json()["job_id"])


def fields(answer: httpx.Response) -> dict[str, str]:
    return {entry["field"]: entry["problem"] for entry in answer.json()["fields"]}


async def submit(client: httpx.AsyncClient, job_id: str, *tasks: dict[str, Any]) -> httpx.Response:
    return await client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": tasks})


async def test_a_task_is_laid_over_the_jobs_defaults(gateway: RunningGateway, client: httpx.AsyncClient, job_id: str) -> None:
    answer = await submit(client, job_id, task_body(0), task_body(1, limits={"tokens": 5000}))
    assert answer.status_code == 202
    assert answer.json()["backlog"] == 2
    group_id = answer.json()["groups"][1]["group_id"]
    stored = await gateway.groups.task(group_id)
    assert (stored.limits.turns, stored.limits.tokens) == (7, 5000)
    shown = (await client.get(f"/v1/jobs/{job_id}/groups/{group_id}")).json()
    assert (shown["state"], shown["task_id"], len(shown["members"])) == ("queued", "task/1", 2)


async def test_every_problem_of_every_task_is_named_and_none_is_accepted(client: httpx.AsyncClient, job_id: str) -> None:
    answer = await submit(
        client,
        job_id,
        task_body(0),
        task_body(1, limits={"turns": 0, "turn_tokens": "many"}, tools=["bsh"]),
        task_body(2, verifier={"command": "true", "files": {"verify.py": ""}}, extra=1),
        task_body(3, limits={"tokens": 10, "turn_tokens": 20}),
        {"task_id": "no messages"},
    )
    assert answer.status_code == 422
    assert set(fields(answer)) == {
        "tasks.1.limits.turns",
        "tasks.1.limits.turn_tokens",
        "tasks.1.tools.0",
        "tasks.2.verifier.files.verify.py",
        "tasks.2.extra",
        "tasks.3.limits.turn_tokens",
        "tasks.4.messages",
    }
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["counts"]["backlog"] == 0


async def test_a_network_by_its_old_name_is_told_the_new_one(client: httpx.AsyncClient, job_id: str) -> None:
    answer = await submit(client, job_id, task_body(0, sandbox={"network": "bridge"}))
    assert fields(answer) == {"tasks.0.sandbox.network": "must be 'none' or 'open': 'bridge' is called 'open' now"}


async def test_case_080_an_open_network_is_the_operators_to_allow(empty_redis_url: str, qwen3_dir: Path, tmp_path: Path) -> None:
    settings = gateway_settings(empty_redis_url, qwen3_dir, tmp_path, allow_network=True)
    async with running_gateway(settings) as gateway, gateway.client() as client:
        job_id = (await client.post("/v1/jobs", json=job_body(sandbox={"network": "open"}))).json()["job_id"]
        assert (await submit(client, job_id, task_body(0))).status_code == 202
        await gateway.store.heartbeat("w1", {"backends": ["docker"], "disk": {"docker": "watch: the agent kills"}}, 30)
        told = (await client.post(f"/v1/jobs/{job_id}/preflight")).json()
        warned = {finding["field"] for finding in told["findings"] if finding["severity"] == "warning"}
        assert warned >= {"sandbox.network", "sandbox.disk_mib"}
        assert told["disk_limits"] == {"docker": ["watch: the agent kills"]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages", id="prompt-too-long"),
        pytest.param({"sandbox": {"backend": "process"}}, "sandbox.backend", id="backend"),
        pytest.param({"sandbox": {"network": "open"}}, "sandbox.network", id="case-080-network"),
        pytest.param({"sandbox": {"network": "bridge"}}, "sandbox.network", id="network-by-its-old-name"),
        pytest.param({"sandbox": {"user": "0:0:0"}}, "sandbox.user", id="user"),
        pytest.param({"verifier": {"url": "http://192.168.1.1/reward"}}, "verifier.url", id="private-verifier"),
        pytest.param(
            {"verifier": {"command": "true", "files": {"/work/tests/t.py": ""}, "artifacts": ["/work"]}},
            "verifier.files",
            id="reachable-file",
        ),
    ],
)
async def test_what_fails_later_is_refused_now(client: httpx.AsyncClient, job_id: str, change: dict[str, Any], field: str) -> None:
    answer = await submit(client, job_id, task_body(0), task_body(1, **change))
    assert answer.status_code == 422
    assert list(fields(answer)) == [f"tasks.1.{field}"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"", 422, id="empty"),
        pytest.param(b"{", 400, id="cut"),
        pytest.param(b"[]", 422, id="list"),
        pytest.param(b'{"tasks": []}', 422, id="no-tasks"),
        pytest.param(b'{"tasks": [NaN]}', 400, id="nan"),
        pytest.param(b'{"tasks": [1e999]}', 400, id="infinity"),
        pytest.param(b'{"tasks": ["\\ud800"]}', 400, id="lone-surrogate"),
        pytest.param(b'{"tasks": [' + b"[" * 5000 + b"]" * 5000 + b"]}", 400, id="very-deep"),
        pytest.param(b'{"tasks": [' + b"[" * 200 + b"]" * 200 + b"]}", 422, id="deep"),
        pytest.param(b'{"tasks": [' + b"9" * 4000 + b"]}", 400, id="huge-integer"),
        pytest.param(b'{"tasks": [7], "tasks": [8]}', 422, id="equal-keys"),
        pytest.param(b"\xff\xfe", 400, id="not-utf-8"),
        pytest.param(b'{"tasks": ["' + b"x" * 3_000_000 + b'"]}', 413, id="too-large"),
    ],
)
async def test_hostile_bodies_are_refused(client: httpx.AsyncClient, job_id: str, body: bytes, status: int) -> None:
    answer = await client.post(f"/v1/jobs/{job_id}/tasks", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")


async def test_a_body_of_unknown_length_is_cut_off(client: httpx.AsyncClient, job_id: str) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 65_536

    answer = await client.post(f"/v1/jobs/{job_id}/tasks", content=endless(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


async def test_a_form_is_not_json(client: httpx.AsyncClient, job_id: str) -> None:
    assert (await client.post(f"/v1/jobs/{job_id}/tasks", data={"tasks": "x"})).status_code == 415


async def test_a_full_backlog_says_when_to_come_back(client: httpx.AsyncClient, job_id: str) -> None:
    assert (await submit(client, job_id, *(task_body(n) for n in range(200)))).status_code == 202
    full = await submit(client, job_id, task_body(200))
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) > 0
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["counts"]["backlog"] == 200


async def test_groups_are_listed_page_by_page(client: httpx.AsyncClient, job_id: str) -> None:
    submitted = (await submit(client, job_id, *(task_body(n) for n in range(5)))).json()["groups"]
    found: list[str] = []
    page: dict[str, Any] = {"next": None}
    while not found or page["next"]:
        params = {"limit": 2} | ({"after": page["next"]} if page["next"] else {})
        page = (await client.get(f"/v1/jobs/{job_id}/groups", params=params)).json()
        found += [group["group_id"] for group in page["groups"]]
    assert found == [group["group_id"] for group in submitted]
    assert (await client.get(f"/v1/jobs/{job_id}/groups", params={"state": "ready"})).json()["groups"] == []
    for wrong in ({"state": "done"}, {"limit": 0}, {"after": job_id}):
        assert (await client.get(f"/v1/jobs/{job_id}/groups", params=wrong)).status_code == 422


async def test_a_rollout_shows_its_messages_and_samples(gateway: RunningGateway, client: httpx.AsyncClient, job_id: str) -> None:
    [group] = (await submit(client, job_id, task_body())).json()["groups"]
    rollout_id = f"{group['group_id']}-r0"
    assert (await client.get(f"/v1/rollouts/{rollout_id}")).json()["state"] == "waiting"
    leases = await take_all(gateway.leases, job_id)
    await gateway.leases.append(leases[0], turns(2)[:5], at_index=0)
    live = (await client.get(f"/v1/rollouts/{leases[0].rollout_id}?include=messages")).json()
    assert (live["state"], live["turns"], live["tool_calls"], live["sampled_tokens"]) == ("leased", 1, 1, 5)
    assert [message["role"] for message in live["messages"]] == ["user", "assistant"]
    assert live["timings"]["generate_s"] == 0.25
    whole = (await client.get(f"/v1/rollouts/{leases[0].rollout_id}?include=samples")).json()
    assert whole["messages"] is None
    assert [len(sample["token_ids"]) for sample in whole["samples"]] == [8]
    assert (await client.get(f"/v1/rollouts/{rollout_id}?include=all")).status_code == 422


async def test_cancelling_is_idempotent(gateway: RunningGateway, client: httpx.AsyncClient, job_id: str) -> None:
    first, second = (await submit(client, job_id, task_body(0), task_body(1))).json()["groups"]
    for _ in range(2):
        answer = await client.post(f"/v1/groups/{first['group_id']}/cancel")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
        answer = await client.post(f"/v1/rollouts/{second['group_id']}-r1/cancel", json={})
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert (await client.post(f"/v1/groups/{first['group_id']}/cancel", json={"x": 1})).status_code == 422
    assert await play(gateway.leases, job_id) == 0


@pytest.mark.parametrize("tail", ["-g9", "-g9-r0", "-g9-r7"])
async def test_what_is_not_there_is_named_as_it_was_asked_for(client: httpx.AsyncClient, job_id: str, tail: str) -> None:
    kind = "rollouts" if "-r" in tail else "groups"
    answers = [await client.post(f"/v1/{kind}/{job_id}{tail}/cancel")]
    if kind == "rollouts":
        answers += [await client.get(f"/v1/rollouts/{job_id}{tail}{rest}") for rest in ("", "/events")]
    for answer in answers:
        assert (answer.status_code, answer.json()["detail"]) == (404, f"there is no '{job_id}{tail}'")


async def test_only_a_list_of_tasks_may_be_large(client: httpx.AsyncClient, job_id: str) -> None:
    blank = b" " * (SMALL_BYTES + 1)
    for method, path in [("POST", "/v1/jobs"), ("PATCH", f"/v1/jobs/{job_id}"), ("POST", f"/v1/jobs/{job_id}/batches")]:
        answer = await client.request(method, path, content=blank + b"{}", headers={"Content-Type": "application/json"})
        assert answer.status_code == 413, path
    answer = await client.post(
        f"/v1/jobs/{job_id}/tasks",
        content=blank + json.dumps({"tasks": [task_body()]}).encode(),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 202


async def test_large_defaults_are_not_multiplied_without_bound(client: httpx.AsyncClient) -> None:
    heavy = job_body("heavy", sandbox={"files": {"/work/data": "x" * 900_000}}, backlog_limit=1000)
    job_id = (await client.post("/v1/jobs", json=heavy)).json()["job_id"]
    answer = await submit(client, job_id, *(task_body(number) for number in range(400)))
    assert (answer.status_code, answer.json()["title"]) == (413, "Body too large")
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["counts"]["backlog"] == 0
