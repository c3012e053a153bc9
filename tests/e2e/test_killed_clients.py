"""A client that is killed leaves no work behind at the generator: its connection closes, and what was sampled for it is aborted."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.e2e.stack import end, running, spawn, task
from tests.killed_client import assert_aborted_for_a_killed_client, running_requests

pytestmark = [pytest.mark.docker, pytest.mark.timeout(360)]

TOKENS_PER_S = 5.0
POLICY = {"rules": [], "default": [[{"text": "I think about it for a while. " * 200, "weight": 1.0}]]}
"""Some 1400 tokens: minutes."""


async def test_a_killed_workers_request_is_aborted(tmp_path: Path, qwen3_dir: Path) -> None:
    async with running(tmp_path, qwen3_dir, POLICY, workers=0, tokens_per_s=TOKENS_PER_S) as stack:
        worker = await spawn("worker", env=stack.env, log=tmp_path / "worker.log")
        job_id = await stack.job("killed", group_size=1)
        try:
            await stack.submit(job_id, task("long", tools=[], verifier=None))
            async with asyncio.timeout(60), httpx.AsyncClient(base_url=stack.generator_url) as generator:
                while await running_requests(generator) == 0:
                    await asyncio.sleep(0.05)
                await asyncio.sleep(1.0)  # some tokens
                worker.kill()
                while await running_requests(generator):
                    await asyncio.sleep(0.05)
        finally:
            await end(worker)
        (cut,) = stack.recorded()
        assert cut["finish"] == "abort"
        assert 0 < len(cut["output_ids"]) < 1000


async def test_any_killed_clients_request_is_aborted(tmp_path: Path, qwen3_dir: Path) -> None:
    """The same for a bare client, as it is asked of a real SGLang in test_sglang.py."""
    async with running(tmp_path, qwen3_dir, POLICY, workers=0, tokens_per_s=TOKENS_PER_S) as stack:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1000}, "return_logprob": True}
        await assert_aborted_for_a_killed_client(stack.generator_url, body, within_s=20)
