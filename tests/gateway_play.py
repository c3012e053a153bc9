"""Playing the worker against a gateway's store: rollouts with a real journal, without generators and sandboxes."""

import random
from collections.abc import Sequence
from typing import Any

from service import journal
from service.journal import AnyEntry
from service.leases import Ended, Lease, Leases
from service.progress import Progress
from service.records import Outcome

DEAD_GENERATOR = "http://127.0.0.1:9"
"""Nothing listens on the discard port."""


def job_body(name: str = "run", **changes: Any) -> dict[str, Any]:
    model = {"tokenizer": "qwen3", "renderer": "qwen3", "context_tokens": 4096}
    body = {"name": name, "model": model, "generators": [DEAD_GENERATOR], "group_size": 2, "groups_per_step": 4}
    return body | changes


def task_body(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {"task_id": f"task/{number}", "messages": [{"role": "user", "content": "2 + 2?"}]} | changes


def turns(count: int, *, version: int = 0, tokens: int = 5, seed: int = 0) -> list[AnyEntry]:
    """A rollout of `count` turns of `tokens` sampled tokens, each with one call, then its end and score."""
    draw = random.Random(seed)
    entries: list[AnyEntry] = [
        journal.Opened(at=1.0, attempt=1, worker="test", queued_s=0.5),
        journal.Prompted(at=1.0, token_ids=journal.pack_ids([1, 2, 3])),
    ]
    for turn in range(count):
        ids = [draw.randrange(10, 1000) for _ in range(tokens)]
        entries += [
            journal.Generated(
                at=2.0,
                token_ids=journal.pack_ids(ids),
                logprobs=journal.pack_logprobs([-draw.random() for _ in ids]),
                spans=[(version, 0, 0, tokens)],
                finish="stop",
                generator=DEAD_GENERATOR,
                seconds=0.25,
            ),
            journal.Replied(at=2.0, content=f"turn {turn}", calls=[journal.Call(id=f"c{turn}", name="bash", arguments='{"command":"ls"}')]),
            journal.Observed(at=3.0, call_id=f"c{turn}", name="bash", text="a\nb ü", seconds=0.1),
            journal.Extended(at=3.0, token_ids=journal.pack_ids([7, 8])),
        ]
    return [*entries, journal.Stopped(at=4.0, reason="submitted"), journal.Scored(at=4.0, reward=1.0, detail='{"passed": 3}', seconds=0.2)]


async def take_all(leases: Leases, job_id: str) -> list[Lease]:
    return await leases.take(job_id, "test", n=1000)


async def finish(leases: Leases, lease: Lease, entries: Sequence[AnyEntry]) -> None:
    """Append and end the rollout as it says."""
    await leases.append(lease, entries, at_index=0)
    end = Progress(entries)
    assert end.stop is not None
    assert end.scored is not None
    ended = Ended(
        outcome=Outcome.COMPLETED,
        stop_reason=end.stop.reason,
        reward=end.scored.reward,
        reward_detail=end.scored.detail,
        turns=end.turns,
        tool_calls=end.tool_calls,
        sampled_tokens=end.sampled,
        oldest_version=end.oldest_version,
        newest_version=end.newest_version,
        oldest_lineage=end.oldest_lineage,
    )
    await leases.finish(lease, ended)


async def play(leases: Leases, job_id: str, *, count: int = 2) -> int:
    """Run every rollout that the gate lets out; how many."""
    taken = await take_all(leases, job_id)
    for lease in taken:
        await finish(leases, lease, turns(count, version=lease.policy_version, seed=lease.index))
    return len(taken)
