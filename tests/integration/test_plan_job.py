"""`rollway plan --job` against a real gateway: a job's own figures become a plan."""

import asyncio
import json
import os
import sys

import httpx
import pytest

from tests.gateway_play import job_body
from tests.gateway_stack import KEYS, RunningGateway
from tests.store_stack import Stack

pytestmark = pytest.mark.redis

SPENT = {"sandbox": 0.001, "generate": 0.006, "tool": 0.002, "verify": 0.001}
"""Less than the play itself takes."""


async def plan(url: str, job_id: str, *more: str, key: str = KEYS["red"]) -> tuple[int, str, str]:
    """The command as people run it; its exit status, stdout and stderr."""
    command = (sys.executable, "-c", "from service.cli import main; main()", "plan", "--job", f"{url}/{job_id}", "--groups", "1000", *more)
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "ROLLWAY_API_KEY": key}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_plan_of_a_real_job(gateway: RunningGateway, client: httpx.AsyncClient) -> None:
    job_id = (await client.post("/v1/jobs", json=job_body(name="run", staleness_budget=2))).json()["job_id"]
    status, _, problem = await plan(gateway.url, job_id)
    assert status == 2
    assert "has no consumption_samples_per_s, tail_multiplier yet" in problem
    stack = Stack(gateway.store)
    stack.job_id = job_id
    for _ in range(2):
        await stack.make_ready(2, seconds=SPENT, reward=1.0)
        batch = await stack.batch(2)
        await client.post(f"/v1/batches/{batch.batch_id}/ack")
    status, text, problem = await plan(gateway.url, job_id, "--json", "--group-size", "2")
    assert status == 0, problem
    found = json.loads(text)
    assert found["setting"]["tool_s"] == pytest.approx(0.002)
    assert found["setting"]["rule"].startswith("gate, budget 2")
    assert found["about"][0].startswith("the job says: ")
    status, _, problem = await plan(gateway.url, job_id, key=KEYS["blue"])
    assert status == 2
    assert "answered 404" in problem
