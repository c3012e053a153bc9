"""Drive a running compose deployment through HTTP, as a trainer would: job, tasks, batches, acks. Exits non-zero if anything is missing.

usage: compose_check.py GATEWAY_URL KEY
"""

import sys
import time
from typing import Any

import httpx

GROUPS, GROUP_SIZE, STEP = 8, 2, 4
DEADLINE_S = 180.0

JOB = {
    "name": "compose-check",
    "model": {"tokenizer": "/opt/rollway/tokenizers/qwen3", "renderer": "qwen3", "context_tokens": 8192},
    "generators": ["http://generator:30000"],
    "group_size": GROUP_SIZE,
    "groups_per_step": STEP,
    "staleness_budget": GROUPS,
}


def task(number: int) -> dict[str, Any]:
    return {
        "task_id": f"answer/{number}",
        "messages": [{"role": "user", "content": "Write 42 into answer.txt, then submit."}],
        "tools": ["bash", "submit"],
        "verifier": {"command": 'test "$(cat /work/answer.txt)" = 42', "artifacts": ["/work/answer.txt"]},
    }


def check(trajectory: dict[str, Any]) -> float:
    """One trajectory's reward, after its arrays are seen to be aligned."""
    if trajectory["stop_reason"] != "submitted" or trajectory["tool_calls"] != 2:
        sys.exit(f"{trajectory['rollout_id']} ended {trajectory['stop_reason']!r} after {trajectory['tool_calls']} tool calls")
    for sample in trajectory["samples"]:
        lengths = {len(sample[name]) for name in ("token_ids", "loss_mask", "logprobs", "versions")}
        if len(lengths) != 1 or not any(sample["loss_mask"]):
            sys.exit(f"{trajectory['rollout_id']} has a misaligned sample: lengths {lengths}")
    return float(trajectory["reward"])


def train(client: httpx.Client, job_id: str) -> list[float]:
    """Lease and ack until every group is seen; the rewards."""
    rewards: list[float] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(rewards) < GROUPS * GROUP_SIZE:
        if time.monotonic() > deadline:
            sys.exit(f"only {len(rewards)} rollouts after {DEADLINE_S:g} s: {client.get(f'/v1/jobs/{job_id}').text}")
        answer = client.post(f"/v1/jobs/{job_id}/batches", json={"groups": STEP, "wait_s": 20}).raise_for_status()
        if answer.status_code == httpx.codes.NO_CONTENT:
            continue
        batch = answer.json()
        rewards += [check(trajectory) for group in batch["groups"] for trajectory in group["trajectories"]]
        client.post(f"/v1/batches/{batch['batch_id']}/ack").raise_for_status()
    return rewards


def main(url: str, key: str) -> None:
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
        created = client.post("/v1/jobs", json=JOB)
        if created.is_error:
            sys.exit(f"no job: {created.text}")
        job_id = created.json()["job_id"]
        client.post(f"/v1/jobs/{job_id}/tasks", json={"tasks": [task(number) for number in range(GROUPS)]}).raise_for_status()
        rewards = train(client, job_id)
        client.delete(f"/v1/jobs/{job_id}").raise_for_status()
    sys.stdout.write(f"compose: {GROUPS} groups, {len(rewards)} rollouts acked, mean reward {sum(rewards) / len(rewards):.2f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
