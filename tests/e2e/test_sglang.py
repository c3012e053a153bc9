"""Whole rollouts on a real SGLang, checked by an independent pass of the same engine over the exported ids.

`deploy/test --sglang` installs and starts one on the CPU and names it in the environment.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from tests.e2e.stack import Stack, running, task

URL = os.environ.get("ROLLWAY_TEST_SGLANG_URL")
TOKENIZER = os.environ.get("ROLLWAY_TEST_SGLANG_TOKENIZER")

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.sglang,
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (URL and TOKENIZER), reason="no real SGLang: deploy/test --sglang starts one and names it"),
]

GUIDED = (
    r'(<tool_call>\n\{"name": "bash", "arguments": \{"command": "(ls /work|cat /work/note\.txt|echo done > /work/done)"\}\}\n</tool_call>'
    r'|<tool_call>\n\{"name": "submit", "arguments": \{\}\}\n</tool_call>)'
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    assert URL is not None
    assert TOKENIZER is not None
    folder = tmp_path_factory.mktemp("sglang")
    async with running(folder, Path(TOKENIZER), {"rules": []}, generator_url=URL, renderer="chatml") as stack:
        yield stack


async def prefill(url: str, ids: list[int]) -> list[float]:
    """The engine's own log-probabilities of `ids` given what stands before each, in one pass over the whole."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with httpx.AsyncClient(timeout=300) as client:
        reply = await client.post(f"{url}/generate", json=body)
    assert reply.status_code == 200, reply.text
    entries = reply.json()["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == ids
    return [entry[0] or 0.0 for entry in entries]


def samples(batch: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(trajectory, sample) for group in batch["groups"] for trajectory in group["trajectories"] for sample in trajectory["samples"]]


async def test_exported_logprobs_are_the_engines_own(stack: Stack) -> None:
    """Unguided turns: a prefill of the exported ids gives the same log-probabilities; shifted by one token it does not."""
    job_id = await stack.job("unguided", group_size=2, limits={"turns": 1, "tokens": 40, "turn_tokens": 40})
    prompt = [{"role": "user", "content": "Write one sentence about the sea."}]
    await stack.submit(job_id, task("unguided", messages=prompt, tools=[], verifier=None))
    batch = await stack.batch(job_id, 1, wait_s=240)
    found = samples(batch)
    assert len(found) == 2
    for _, sample in found:
        mask = np.asarray(sample["loss_mask"], dtype=bool)
        exported = np.asarray(sample["logprobs"])
        again = np.asarray(await prefill(stack.generator_url, sample["token_ids"]))
        difference = np.abs(exported[mask] - again[mask])
        assert difference.mean() < 0.1, difference  # bf16 on a CPU: a cached prefix moves a log-probability by some hundredths
        shifted = np.abs(exported[mask][:-1] - again[mask][1:])
        assert shifted.mean() > 5 * difference.mean()


async def label_version(url: str) -> int:
    """The version that the engine's label names; a label that is no number ("default") leaves the job's, 0 here."""
    async with httpx.AsyncClient() as client:
        label = (await client.get(f"{url}/model_info")).json()["weight_version"]
    return int(label) if label.isdigit() else 0


async def test_a_small_model_makes_whole_rollouts_when_guided(stack: Stack) -> None:
    job_id = await stack.job(
        "guided",
        group_size=2,
        sampling={"temperature": 1.0, "regex": GUIDED},
        limits={"turns": 4, "tokens": 400, "turn_tokens": 100},
    )
    sandbox = {"backend": "docker", "files": {"/work/note.txt": "write done\n"}}
    await stack.submit(job_id, task("guided", sandbox=sandbox))
    batch = await stack.batch(job_id, 1, wait_s=400)
    found = samples(batch)
    assert max(trajectory["turns"] for trajectory, _ in found) >= 2
    version = await label_version(stack.generator_url)
    for trajectory, sample in found:
        assert trajectory["reward"] in (0.0, 1.0)
        assert trajectory["tool_calls"] >= 1
        mask = np.asarray(sample["loss_mask"], dtype=bool)
        assert mask.sum() > 10
        assert set(np.asarray(sample["versions"])[mask]) == {version}
        assert np.isfinite(sample["logprobs"]).all()
        edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(int), [0]))))
        assert len(edges) // 2 == trajectory["turns"]
