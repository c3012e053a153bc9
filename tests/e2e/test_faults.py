"""What breaks around a rollout costs that rollout at most, and never reaches the trainer as if the model had done it."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.stack import Stack, call, free_port, rule, task
from tests.e2e.test_main_path import assert_equals_record, containers, flat, messages

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker, pytest.mark.timeout(120)]

TOKENS_PER_S = 120
LONG = "I think about it for a while. " * 20
POLICY: dict[str, Any] = {
    "rules": [
        rule("do lost.", call("bash", command="echo begun; sleep 3; touch /work/done"), call("submit")),
        rule("do waiting.", "Done."),
        rule("do updated.", LONG + call("bash", command="echo ran >> /work/log; wc -l < /work/log"), "Done."),
    ],
}


async def docker(*words: str) -> str:
    process = await asyncio.create_subprocess_exec("docker", *words, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return out.decode()


async def test_case_050_a_lost_sandbox_costs_one_attempt_of_one_member(stack: Stack) -> None:
    job_id = await stack.job("lost", group_size=3)
    (group_id,) = await stack.submit(job_id, task("lost"))
    async with asyncio.timeout(40):
        while not (victim := await containers(stack, f"{group_id}-r1-")) or "sleep 3" not in await docker("top", victim[0]):
            await asyncio.sleep(0.1)
    await docker("rm", "-f", victim[0])
    batch = await stack.batch(job_id, 1)
    (group,) = batch["groups"]
    assert (group["size"], group["requested_size"]) == (3, 3)
    found = [(t["index"], t["attempt"], t["reward"], t["stop_reason"]) for t in group["trajectories"]]
    assert found == [(0, 1, 1.0, "submitted"), (1, 2, 1.0, "submitted"), (2, 1, 1.0, "submitted")]
    (failure,) = (await stack.api.get(f"/v1/rollouts/{group_id}-r1")).json()["failures"]
    assert failure.startswith("sandbox: ")
    observations = [message["content"] for message in await messages(stack, group_id, 1) if message["role"] == "tool"]
    assert observations == ["begun\n"]
    assert assert_equals_record(stack, batch) == 6


async def sampling(stack: Stack) -> None:
    """Until the generator is in the middle of a reply."""
    async with asyncio.timeout(40), httpx.AsyncClient(base_url=stack.generator_url) as generator:
        while (await generator.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == 0:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)


def generations(stack: Stack, sample: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Per run of mask 1, the recorded generations that it consists of, each sent exactly the ids before it."""
    ids, mask = sample["token_ids"], sample["loss_mask"]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    turns = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        turns.append(found := [])
        at = int(start)
        while at < end:
            (record,) = (r for r in stack.recorded() if r["input_ids"] == ids[:at] and r["output_ids"])
            until = at + len(record["output_ids"])
            assert ids[at:until] == record["output_ids"]
            np.testing.assert_array_equal(np.float32(sample["logprobs"][at:until]), np.float32(record["logprobs"]))
            found.append(record)
            at = until
        assert at == end
    return turns


async def test_case_060_a_turn_cut_by_an_update_goes_on_and_is_no_answer(stack: Stack) -> None:
    """case-059 too: each token keeps the version it was sampled under."""
    job_id = await stack.job("updated", group_size=1)
    (group_id,) = await stack.submit(job_id, task("updated", verifier=None))
    await sampling(stack)
    async with httpx.AsyncClient(base_url=stack.generator_url) as generator:
        assert (await generator.post("/pause_generation", json={"mode": "abort"})).status_code == 200
        await asyncio.sleep(0.3)
        shown = (await stack.api.get(f"/v1/rollouts/{group_id}-r0")).json()
        assert (shown["tool_calls"], shown["state"]) == (0, "leased")
        body = {"model_path": "models/next", "weight_version": "1"}
        assert (await generator.post("/update_weights_from_disk", json=body)).status_code == 200
        assert (await generator.post("/continue_generation", json={})).status_code == 200
    batch = await stack.batch(job_id, 1)
    ((trajectory, sample),) = flat(batch)
    assert (trajectory["attempt"], trajectory["turns"], trajectory["tool_calls"]) == (1, 2, 1)
    assert trajectory["versions"] == {"oldest": 0, "newest": 1, "environment_gap": 0}
    first, second = generations(stack, sample)
    assert [record["finish"] for record in first] == ["abort", "stop"]
    assert [record["finish"] for record in second] == ["stop"]
    cut = len(first[0]["output_ids"])
    trained = [version for version, mask in zip(sample["versions"], sample["loss_mask"], strict=True) if mask]
    assert trained == [0] * cut + [1] * (len(trained) - cut)
    observations = [message["content"] for message in await messages(stack, group_id) if message["role"] == "tool"]
    assert observations == ["1\n"]


async def test_a_generator_that_is_away_is_seen_at_the_job_and_costs_nothing(stack: Stack) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    job_id = await stack.job("waiting", group_size=1, generators=[away])
    (group_id,) = await stack.submit(job_id, task("waiting", verifier=None))
    async with asyncio.timeout(30):
        while not (warnings := (await stack.api.get(f"/v1/jobs/{job_id}")).json()["warnings"]):
            await asyncio.sleep(0.2)
    assert away in warnings[0]["problem"]
    assert (await stack.api.patch(f"/v1/jobs/{job_id}", json={"generators": [stack.generator_url]})).status_code == 200
    group = await stack.group(group_id, "ready")
    assert group["members"][0]["attempt"] == 1
