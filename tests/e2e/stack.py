"""The whole service as its users run it: real processes, real Valkey, real sandboxes, the stand-in generator."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

KEYS = {"alpha": "alpha-key-0001", "beta": "beta-key-00002"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def spawn(*arguments: str, env: dict[str, str], log: Path) -> asyncio.subprocess.Process:
    with log.open("ab") as out:
        return await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "rollway"), *arguments, env=os.environ | env, stdout=out, stderr=out
        )


async def end(process: asyncio.subprocess.Process, *, grace_s: float = 25.0) -> int:
    """SIGTERM, then wait; a process that does not leave in time is a failed test."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(grace_s):
        return await process.wait()


@dataclass(slots=True)
class Stack:
    """A running service. `api` speaks for tenant alpha."""

    folder: Path
    env: dict[str, str]
    url: str
    generator_url: str
    record: Path
    tokenizer: Path
    api: httpx.AsyncClient
    gateway: asyncio.subprocess.Process
    generator: asyncio.subprocess.Process | None
    renderer: str = "qwen3"

    async def job(self, name: str, **fields: Any) -> str:
        spec = {
            "name": name,
            "model": {"tokenizer": str(self.tokenizer), "renderer": self.renderer, "context_tokens": 8192},
            "generators": [self.generator_url],
            "group_size": 2,
            "sandbox": {"backend": "docker"},
            "limits": {"turns": 8, "tokens": 4096, "turn_tokens": 1024, "tool_s": 20},
        } | fields
        reply = await self.api.post("/v1/jobs", json=spec)
        assert reply.status_code == 201, reply.text
        job_id: str = reply.json()["job_id"]
        return job_id

    async def submit(self, job_id: str, *tasks: dict[str, Any]) -> list[str]:
        reply = await self.api.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": list(tasks)})
        assert reply.status_code == 202, reply.text
        return [group["group_id"] for group in reply.json()["groups"]]

    async def batch(self, job_id: str, groups: int, *, wait_s: float = 50) -> dict[str, Any]:
        async with asyncio.timeout(wait_s):
            while True:
                reply = await self.api.post(f"/v1/jobs/{job_id}/batches", json={"groups": groups, "wait_s": 10, "lease_s": 60}, timeout=30)
                if reply.status_code == 200:
                    body: dict[str, Any] = reply.json()
                    return body
                assert reply.status_code == 204, reply.text

    async def group(self, group_id: str, *states: str, wait_s: float = 40) -> dict[str, Any]:
        """The group once it is in one of these states."""
        job_id = group_id.partition("-")[0]
        async with asyncio.timeout(wait_s):
            while True:
                reply = await self.api.get(f"/v1/jobs/{job_id}/groups/{group_id}")
                assert reply.status_code == 200, reply.text
                body: dict[str, Any] = reply.json()
                if body["state"] in states:
                    return body
                await asyncio.sleep(0.1)

    def recorded(self) -> list[dict[str, Any]]:
        """What the generator says it sampled."""
        return [json.loads(line) for line in self.record.read_text().splitlines()]


def call(name: str, **arguments: Any) -> str:
    """A tool call as a Qwen3 model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def rule(match: str, *turns: str | list[str]) -> dict[str, Any]:
    """A policy rule: what a model that sees `match` in its prompt says turn by turn (several: candidates)."""
    return {
        "match": match,
        "turns": [[{"text": text, "weight": 1.0} for text in ([turn] if isinstance(turn, str) else turn)] for turn in turns],
    }


def task(task_id: str, **fields: Any) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "messages": [{"role": "user", "content": f"Please do {task_id}."}],
        "tools": ["bash", "edit_file", "submit"],
        "verifier": {"command": "test -f /work/done", "timeout_s": 20, "artifacts": ["/work/done"]},
    } | fields


async def ready(api: httpx.AsyncClient, path: str, *, wait_s: float = 90) -> None:
    async with asyncio.timeout(wait_s):
        while True:
            try:
                if (await api.get(path)).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def stand_in(folder: Path, tokenizer: Path, port: int, env: dict[str, str], tokens_per_s: float) -> asyncio.subprocess.Process:
    pace = ["--tokens-per-s", str(tokens_per_s)] if tokens_per_s else []
    return await spawn(
        "generator", "--tokenizer", str(tokenizer), "--policy", str(folder / "policy.json"), "--renderer", "qwen3",
        "--port", str(port), "--record", str(folder / "record.jsonl"), "--seed", "7", *pace,
        env=env, log=folder / "generator.log",
    )  # fmt: skip


def environment(folder: Path, tokenizer: Path, port: int) -> dict[str, str]:
    return {
        "ROLLWAY_DATA_DIR": str(folder / "data"),
        "ROLLWAY_TOKENIZER_ROOTS": str(tokenizer.parent),
        "ROLLWAY_API_KEYS": ",".join(f"{tenant}:{key}" for tenant, key in KEYS.items()),
        "ROLLWAY_DEPLOYMENT_ID": f"test-{port}",
        "ROLLWAY_LEASE_S": "6",
        "ROLLWAY_GRACE_S": "8",
        "ROLLWAY_SWEEP_S": "5",
        "ROLLWAY_PROCESS_BACKEND": "1",
    }


@asynccontextmanager
async def running(
    folder: Path,
    tokenizer: Path,
    policy: dict[str, Any],
    *,
    workers: int = 1,
    tokens_per_s: float = 0,
    generator_url: str | None = None,
    renderer: str = "qwen3",
) -> AsyncIterator[Stack]:
    """Generator (unless one is given), gateway and embedded workers, started and ended as processes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy.json").write_text(json.dumps(policy))
    port, generator_port = free_port(), free_port()
    env = environment(folder, tokenizer, port)
    generator = None if generator_url else await stand_in(folder, tokenizer, generator_port, env, tokens_per_s)
    generator_url = generator_url or f"http://127.0.0.1:{generator_port}"
    serve = ("serve", "--host", "127.0.0.1", "--port", str(port), "--workers", str(workers))
    gateway = await spawn(*serve, env=env, log=folder / "gateway.log")
    url = f"http://127.0.0.1:{port}"
    headers = {"Authorization": f"Bearer {KEYS['alpha']}"}
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as api:
            await ready(api, f"{generator_url}/ready")
            await ready(api, "/readyz" if workers else "/healthz")
            record = folder / "record.jsonl"
            yield Stack(folder, env, url, generator_url, record, tokenizer, api, gateway, generator, renderer)
    finally:
        await end(gateway)
        if generator is not None:
            await end(generator)
        await clean_up(env)


async def clean_up(env: dict[str, str]) -> None:
    """Remove what workers that were killed left: no sweep of their deployment comes any more."""
    argv = ("-m", "workers.inventory", "cleanup", "--all", "--keep-shared", "--yes", "--json")
    cleaning = await asyncio.create_subprocess_exec(sys.executable, *argv, env=os.environ | env, stdout=asyncio.subprocess.DEVNULL)
    assert await cleaning.wait() == 0
