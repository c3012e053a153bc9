"""Weights move again and again under real workers: every rollout ends, and every token is exported with the version that sampled it."""

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.e2e.stack import Stack, call, rule, task
from tests.e2e.test_main_path import flat
from tests.weight_play import Trainer, pair, sampling

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker, pytest.mark.timeout(180)]

TALK = "Let me think about it once more, and then again. " * 8
POLICY: dict[str, Any] = {
    "rules": [rule("do talk.", TALK + call("bash", command="echo 1"), TALK + call("bash", command="touch /work/done"), call("submit"))],
    "default": [],
}
ASKED = [{"role": "user", "content": "Please do talk."}]
TOKENS_PER_S = 60.0
GROUPS = 4
UPDATES = 5


def pieces(stack: Stack, sample: dict[str, Any]) -> int:
    """Each run of mask 1 is one recorded generation, or several that go on from each other's ids; how many there were."""
    known: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for line in stack.recorded():
        known.setdefault(tuple(line["input_ids"]), []).append(line)
    ids, mask, count = sample["token_ids"], sample["loss_mask"], 0
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        at = int(start)
        while at < end:
            line = max((line for line in known[tuple(ids[:at])] if is_at(line, at, sample)), key=lambda line: len(line["output_ids"]))
            then = at + len(line["output_ids"])
            assert sample["versions"][at:then] == [pair(label)[1] for label in line["versions"]]
            at, count = then, count + 1
    return count


def is_at(line: dict[str, Any], at: int, sample: dict[str, Any]) -> bool:
    """Whether this is what was sampled there: rollouts of one prompt often say the same, but never with the same log-probabilities."""
    then = at + len(line["output_ids"])
    same = sample["token_ids"][at:then] == line["output_ids"] != []
    return same and np.float32(sample["logprobs"][at:then]).tolist() == np.float32(line["logprobs"]).tolist()


@pytest.mark.parametrize("mode", ["in_flight", "abort_resume", "drain"])
async def test_no_token_is_lost_and_each_knows_its_version(stack: Stack, mode: str) -> None:
    job_id = await stack.job(mode, group_size=2, groups_per_step=GROUPS, staleness_budget=None, weight_update=mode)
    try:
        await moved_under(Trainer(stack.api, job_id), stack, job_id, mode)
    finally:
        await stack.api.delete(f"/v1/jobs/{job_id}")  # the generator is the next one's


async def moved_under(trainer: Trainer, stack: Stack, job_id: str, mode: str) -> None:
    await trainer.until(await trainer.begun(10), "paused")  # the versions of the job before are no business of this one
    await trainer.say(f"{job_id}-u1", "finish")
    await trainer.until(f"{job_id}-u1", "done")
    await stack.submit(job_id, *[task(f"talk-{number}", messages=ASKED) for number in range(GROUPS)])
    await sampling(stack.generator_url)
    for version in range(11, 11 + UPDATES):
        update_id = await trainer.begun(version, from_disk="next" if version % 2 else None)
        if version % 2 == 0:
            await trainer.until(update_id, "paused")
            await trainer.say(update_id, "finish")
        await trainer.until(update_id, "done", wait_s=60)
        await asyncio.sleep(1.0)
    batch = await stack.batch(job_id, GROUPS, wait_s=120)
    found = flat(batch)
    assert len(found) == GROUPS * 2
    assert {trajectory["outcome"] for trajectory, _ in found} == {"completed"}
    counts = [pieces(stack, sample) for _, sample in found]
    if mode == "abort_resume":
        assert sum(counts) > sum(trajectory["turns"] for trajectory, _ in found)
    else:
        assert counts == [trajectory["turns"] for trajectory, _ in found]
    versions = {version for _, sample in found for version in sample["versions"] if version >= 0}
    assert len(versions) > 1
    assert versions <= set(range(10, 11 + UPDATES))
    job = await trainer.job()
    assert (job["policy_version"], job["counts"]["failed"]) == (10 + UPDATES, {})
