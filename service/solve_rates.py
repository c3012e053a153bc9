"""What the attempts at each task were worth, as service/lua/solve_rates.lua adds it up: also of groups that `zero_variance` drops."""

from dataclasses import dataclass

import msgspec

from service.keys import JobKeys
from service.store import Store, unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveRate:
    """One task since the job began. groups, rollouts: whose last member ended. rewarded: those with a reward of ours; solved: with one of
    at least 1. change: the number of its last change among all tasks of the job."""

    task_id: str
    change: int
    groups: int
    rollouts: int
    rewarded: int
    solved: int
    solve_rate: float | None
    mean_reward: float | None


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    groups: int
    rollouts: int
    rewarded: int
    solved: int
    sum: float


_decoder = msgspec.msgpack.Decoder(_Fields)


async def changed_since(store: Store, job_id: str, *, after: int, limit: int) -> list[SolveRate]:
    """Tasks by their last change, after the change `after`, at most `limit`: asked again with the last one, only what is new.

    Raises UnavailableError.
    """
    job = JobKeys(job_id)
    with unavailable():
        found = await store.redis.zrangebyscore(job.solve_order, f"({after}", "+inf", start=0, num=limit, withscores=True)
        raw = await store.redis.hmget(job.solve_rates, [task for task, _ in found]) if found else []
    return [_solve_rate(task, change, data) for (task, change), data in zip(found, raw, strict=True) if data is not None]


async def of_task(store: Store, job_id: str, task_id: str) -> SolveRate | None:
    """None: no group of it has come to its end, or it was forgotten. Raises UnavailableError."""
    job = JobKeys(job_id)
    with unavailable():
        change = await store.redis.zscore(job.solve_order, task_id)
        data = await store.redis.hget(job.solve_rates, task_id)
    return _solve_rate(task_id.encode(), change, data) if change is not None and data is not None else None


def _solve_rate(task: bytes, change: float, data: bytes) -> SolveRate:
    sums = _decoder.decode(data)
    return SolveRate(
        task_id=task.decode(),
        change=int(change),
        groups=sums.groups,
        rollouts=sums.rollouts,
        rewarded=sums.rewarded,
        solved=sums.solved,
        solve_rate=sums.solved / sums.rewarded if sums.rewarded else None,
        mean_reward=sums.sum / sums.rewarded if sums.rewarded else None,
    )
