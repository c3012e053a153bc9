"""Whole rollouts on a real SGLang, checked by an independent pass of the same engine over the exported ids.

`deploy/test --sglang` installs and starts one on the CPU and names it in the environment.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from service.generation_reply import read_label
from tests.e2e.stack import Stack, running, task
from tests.killed_client import assert_aborted_for_a_killed_client
from tests.recording_proxy import engine_versions, recording
from tests.weight_play import Trainer, engine_says, sampling

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
    return read_label(label, version=0, lineage=0)[1]


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


async def test_a_killed_clients_request_is_aborted(stack: Stack) -> None:
    """What a worker that is killed leaves at the engine is not sampled to its end."""
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}, "return_logprob": True}
    await assert_aborted_for_a_killed_client(stack.generator_url, body, within_s=30)


STORY = [{"role": "user", "content": "Write a long story about a ship and its crew. Begin now and do not stop."}]


@pytest.mark.parametrize("mode", ["in_flight", "in_flight_flushed", "abort_resume", "drain"])
async def test_an_update_in_the_middle_of_a_generation(stack: Stack, mode: str) -> None:
    """No request is lost, and every exported token has the version that the engine's own spans give it."""
    url = stack.generator_url
    async with recording(url) as (generator, replies), httpx.AsyncClient(timeout=60) as engine:
        path = (await engine.get(f"{url}/model_info")).json()["model_path"]
        await engine.post(f"{url}/update_weight_version", json={"new_version": "0.0", "abort_all_requests": False})
        kind = {"weight_update": mode.removesuffix("_flushed"), "flush_cache": mode.endswith("_flushed")}
        job_id = await stack.job(mode, generators=[generator], limits={"turns": 1, "tokens": 64, "turn_tokens": 64}, **kind)
        await stack.submit(job_id, task("story", messages=STORY, tools=[], verifier=None))
        await sampling(url, count=2)
        await asyncio.sleep(0.5)
        trainer = Trainer(stack.api, job_id)
        await trainer.until(await trainer.begun(1, from_disk=path), "done", wait_s=120)
        assert await engine_says(url) == "0.1"
        assert (await trainer.job())["policy_version"] == 1
        [found] = [samples(await stack.batch(job_id, 1, wait_s=120))]
        assert len(found) == 2
        for _, sample in found:
            start = sample["prompt_len"]
            assert sample["versions"][start:] == engine_versions(replies, sample["token_ids"][start:])
        versions = {version for _, sample in found for version in sample["versions"][sample["prompt_len"] :]}
        assert versions == ({0} if mode == "drain" else {0, 1})
        cut = [reply for reply in replies if reply["meta_info"]["finish_reason"]["type"] == "abort"]
        assert bool(cut) is (mode == "abort_resume")
        await stack.submit(job_id, task("after", messages=STORY, tools=[], verifier=None))
        after = samples(await stack.batch(job_id, 1, wait_s=120))
        assert {version for _, sample in after for version in sample["versions"][sample["prompt_len"] :]} == {1}
        assert (await stack.api.delete(f"/v1/jobs/{job_id}")).status_code == 204
