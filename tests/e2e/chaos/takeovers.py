"""How long the rollouts of a worker that went stand still, and what going on from their journals saves."""

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import redis.asyncio
from redis.exceptions import RedisError

from service.journal import decode
from service.keys import JobKeys
from service.progress import Progress

LOOK_S = 0.02
PATIENCE_S = 60.0
"""For one rollout to move again; work that is queued behind other work may wait."""


@dataclass(slots=True)
class Takeovers:
    """From each worker's kill (or SIGTERM), of each rollout that it held: taken_s: until another worker had it; stepped_s: until that one
    journaled a step. Tokens: sampled by then, which a restart would have to sample again."""

    taken_s: list[float] = field(default_factory=list)
    stepped_s: list[float] = field(default_factory=list)
    resumed: int = 0
    restarted: int = 0
    tokens_saved: int = 0
    tokens_lost: int = 0

    def __str__(self) -> str:
        times = ", ".join(
            f"{what} p50 {percentile(seconds, 50):.2f} s, p99 {percentile(seconds, 99):.2f} s"
            for what, seconds in (("taken after", self.taken_s), ("next step after", self.stepped_s))
        )
        return (
            f"rollouts of killed workers: {self.resumed} resumed, {self.restarted} restarted; {times}; "
            f"sampled tokens kept {self.tokens_saved}, lost {self.tokens_lost}"
        )


def percentile(values: Sequence[float], part: float) -> float:
    return float(np.percentile(values, part)) if values else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A rollout as its worker left it. `length`: of its journal."""

    rollout_id: str
    worker: str
    attempt: int
    length: int
    sampled: int


class Watch:
    """Looks into the store, since no API tells when a journal grew. It is only ever asked to read."""

    def __init__(self, redis_url: str, job_id: str) -> None:
        self.found = Takeovers()
        self._redis = redis.asyncio.Redis.from_url(redis_url)
        self._job = JobKeys(job_id)

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def after(self, pid: int) -> None:
        """Follow what the worker of this pid, which has just been told to go, held, until it moves again. Where the store is away just
        then, nothing is counted."""
        went_at = time.monotonic()
        try:
            held = await self.held(pid)
        except (RedisError, OSError):
            return
        await asyncio.gather(*(self._follow(standing, went_at) for standing in held))

    async def held(self, pid: int) -> Sequence[Standing]:
        """The rollouts of the worker of this pid that have a journal. Raises RedisError, OSError."""
        worker, held = f"{socket.gethostname()}-{pid}", []
        raw = await self._redis.hgetall(self._job.rollouts)
        for rollout_id, record in ((name.decode(), msgspec.msgpack.decode(data)) for name, data in raw.items()):
            if record["state"] == "leased" and record["worker"] == worker:
                entries = [decode(entry) for entry in await self._redis.lrange(self._job.journal(rollout_id), 0, -1)]
                if entries:
                    sampled = Progress(entries).sampled
                    standing = {"rollout_id": rollout_id, "worker": worker, "attempt": record["attempt"]}
                    held.append(Standing(**standing, length=len(entries), sampled=sampled))
        return held

    async def _follow(self, standing: Standing, went_at: float) -> None:
        """A worker that leaves in order goes on for a moment: what counts as a step is what comes once another worker has the rollout."""
        taken_s, length = 0.0, standing.length
        while time.monotonic() < went_at + PATIENCE_S:
            try:
                record, found = await self._look(standing.rollout_id)
            except (RedisError, OSError):
                await asyncio.sleep(LOOK_S)
                continue
            passed_s = time.monotonic() - went_at
            anew = record["attempt"] != standing.attempt
            if record["state"] in ("cancelled", "failed") or (record["state"] == "ended" and not taken_s):
                return
            if not taken_s and record.get("worker") not in (None, standing.worker):
                taken_s, length = passed_s, 0 if anew else length
            elif not taken_s:
                length = found
            if taken_s and (found > length or record["state"] == "ended"):
                self._count(standing, taken_s, passed_s, resumed=not anew)
                return
            await asyncio.sleep(LOOK_S)

    async def _look(self, rollout_id: str) -> tuple[dict[str, Any], int]:
        """Its record, and how long its journal is."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hget(self._job.rollouts, rollout_id)
        pipeline.llen(self._job.journal(rollout_id))
        raw, length = await pipeline.execute()
        return msgspec.msgpack.decode(raw), length

    def _count(self, standing: Standing, taken_s: float, stepped_s: float, *, resumed: bool) -> None:
        self.found.taken_s.append(taken_s)
        self.found.stepped_s.append(stepped_s)
        if resumed:
            self.found.resumed += 1
            self.found.tokens_saved += standing.sampled
        else:
            self.found.restarted += 1
            self.found.tokens_lost += standing.sampled
