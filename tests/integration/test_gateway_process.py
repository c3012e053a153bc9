"""`rollway serve` as a process: says where it listens, refuses what is unsafe, leaves in time with streams open, keeps its workers."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from service.groups import Groups
from service.settings import Settings
from service.store import open_store
from tests.gateway_play import job_body, task_body

ROLLWAY = str(Path(sys.executable).with_name("rollway"))


def environment(**settings: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROLLWAY_")}
    return inherited | {f"ROLLWAY_{name.upper()}": value for name, value in settings.items()}


@asynccontextmanager
async def serving(*arguments: str, env: Mapping[str, str]) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process and its URL."""
    process = await asyncio.create_subprocess_exec(
        ROLLWAY, "serve", "--port", "0", *arguments, env=dict(env), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        yield process, line.removeprefix("listening on ").strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # or its pipe warns after the loop is closed


async def run(*arguments: str, env: Mapping[str, str]) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        ROLLWAY, *arguments, env=dict(env), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, output.decode()


async def test_sigterm_leaves_in_time_with_streams_open(empty_redis_url: str, qwen3_dir: Path, tmp_path: Path) -> None:
    settings = {"redis_url": empty_redis_url, "data_dir": str(tmp_path), "tokenizer_roots": str(qwen3_dir.parent), "grace_s": "20"}
    async with serving(env=environment(**settings)) as (process, url), httpx.AsyncClient(base_url=url, timeout=30) as client:
        job_id = (await client.post("/v1/jobs", json=job_body())).json()["job_id"]
        [group] = (await client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": [task_body()]})).json()["groups"]
        async with client.stream("GET", f"/v1/rollouts/{group['group_id']}-r0/events") as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            assert [line async for line in lines] == [""]  # a clean end, not a cut connection
        assert await asyncio.wait_for(process.wait(), 10) == 0
    async with open_store(Settings(redis_url=empty_redis_url, data_dir=tmp_path)) as store:
        assert (await Groups(store, retain_s=60).get(group["group_id"])).state == "queued"


async def test_a_worker_that_is_killed_comes_back_and_leaves_with_the_gateway(empty_redis_url: str, tmp_path: Path) -> None:
    env = environment(redis_url=empty_redis_url, data_dir=str(tmp_path), docker_host="unix:///nowhere.sock")
    async with serving("--workers", "1", env=env) as (process, _):
        first = await worker_of(process.pid)
        first.kill()
        second = await worker_of(process.pid, other_than=first.pid)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert not second.is_running()


async def worker_of(pid: int, *, other_than: int = 0) -> psutil.Process:
    """The gateway's worker process, once it is there."""
    for _ in range(200):
        for child in psutil.Process(pid).children():
            if child.pid != other_than and child.status() != psutil.STATUS_ZOMBIE and "workers" in child.cmdline():
                return child
        await asyncio.sleep(0.1)
    pytest.fail("no worker process")


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        pytest.param(["--host", "0.0.0.0"], {}, "ROLLWAY_API_KEYS", id="open-without-keys"),
        pytest.param([], {"api_keys": "red:short"}, "ROLLWAY_API_KEYS: must be tenant:key", id="bad-setting"),
        pytest.param([], {"lease_s": "0.5"}, "ROLLWAY_LEASE_S: Input should be greater than 1 (it is '0.5')", id="bad-value"),
        pytest.param([], {"redis_url": "redis://:sesame@127.0.0.1:1"}, "unset the setting for an embedded Valkey", id="no-redis"),
        pytest.param([], {"redis_url": "redis://:s/esame@h:1"}, "ROLLWAY_REDIS_URL is no URL of a Redis", id="no-url"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_cure(
    tmp_path: Path, arguments: list[str], settings: dict[str, str], words: str
) -> None:
    status, output = await run("serve", "--port", "0", *arguments, env=environment(data_dir=str(tmp_path), **settings))
    assert status not in (0, None)
    assert words in output
    assert "Traceback" not in output
    assert "esame" not in output


async def test_a_port_in_use_is_refused_before_anything_is_announced(qwen3_dir: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text('{"rules": [], "default": [[{"text": "yes", "weight": 1.0}]]}')
    generator = ["generator", "--tokenizer", str(qwen3_dir), "--policy", str(policy)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command in (["serve"], generator):
            status, output = await run(*command, "--port", port, env=environment(data_dir=str(tmp_path)))
            assert status == 1
            last = output.splitlines()[-1]
            assert last == f"rollway {command[0]}: port {port} on 127.0.0.1 is in use: stop what listens there or give --port"
            assert "Traceback" not in output
            assert "startup complete" not in output


async def test_a_setting_that_is_none_is_named() -> None:
    status, output = await run("config", "show", env=environment(grace="3", demo_backend="process"))
    assert status == 0
    assert output.splitlines()[0] == "ROLLWAY_GRACE is no setting; did you mean ROLLWAY_GRACE_S?"
    assert "ROLLWAY_DEMO_BACKEND" not in output


async def test_config_show_masks_secrets(tmp_path: Path) -> None:
    env = environment(data_dir=str(tmp_path), api_keys="red:sesame-open", redis_url="redis://:sesame@h:1", operator_key="sesame-too")
    status, output = await run("config", "show", env=env)
    assert status == 0
    assert "sesame" not in output
    assert "red:***" in output
    row = {line.split()[1]: line for line in output.splitlines() if "ROLLWAY_" in line}
    assert "environment" in row["ROLLWAY_API_KEYS"]
    assert "default" in row["ROLLWAY_LEASE_S"]


async def test_humaneval_tasks_are_a_submit_body() -> None:
    status, output = await run("tasks", "humaneval", "--limit", "2", env=environment())
    assert status == 0
    assert output.startswith('{"tasks":[{"task_id":"')
