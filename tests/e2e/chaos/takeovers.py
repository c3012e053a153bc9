"""How long the rollouts of a killed worker stand still, and what going on from their journals saves."""

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import redis.asyncio
from redis.exceptions import RedisError

from service.journal import decode
from service.keys import JobKeys
from service.progress import Progress

LOOK_S = 0.05
PATIENCE_S = 60.0
"""For one rollout to move again; work that is queued behind other work may wait."""


@dataclass(slots=True)
class Takeovers:
    """seconds: from each kill to the next journaled step of each rollout that the killed worker held. Tokens: sampled before the kill."""

    seconds: list[float] = field(default_factory=list)
    resumed: int = 0
    restarted: int = 0
    tokens_saved: int = 0
    tokens_lost: int = 0

    def __str__(self) -> str:
        p50, p99 = np.percentile(self.seconds, (50, 99)) if self.seconds else (0.0, 0.0)
        return (
            f"rollouts taken over: {self.resumed} resumed, {self.restarted} restarted; from kill -9 to the next step "
            f"p50 {p50:.1f} s, p99 {p99:.1f} s; sampled tokens kept {self.tokens_saved}, lost {self.tokens_lost}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A rollout as its dead worker left it."""

    rollout_id: str
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

    async def after_kill(self, pid: int) -> None:
        """Follow what the worker of this pid held until it moves again. Where the store is away just then, the kill is not counted."""
        killed_at = time.monotonic()
        try:
            held = await self._held(f"{socket.gethostname()}-{pid}")
        except (RedisError, OSError):
            return
        await asyncio.gather(*(self._follow(standing, killed_at) for standing in held))

    async def _records(self) -> dict[str, dict[str, object]]:
        raw = await self._redis.hgetall(self._job.rollouts)
        return {name.decode(): msgspec.msgpack.decode(record) for name, record in raw.items()}

    async def _held(self, worker: str) -> Sequence[Standing]:
        held = []
        for rollout_id, record in (await self._records()).items():
            if record["state"] == "leased" and record.get("worker") == worker:
                entries = [decode(entry) for entry in await self._redis.lrange(self._job.journal(rollout_id), 0, -1)]
                if entries:
                    attempt, sampled = int(str(record["attempt"])), Progress(entries).sampled
                    held.append(Standing(rollout_id=rollout_id, attempt=attempt, length=len(entries), sampled=sampled))
        return held

    async def _follow(self, standing: Standing, killed_at: float) -> None:
        while time.monotonic() < killed_at + PATIENCE_S:
            try:
                raw = await self._redis.hget(self._job.rollouts, standing.rollout_id)
                length = await self._redis.llen(self._job.journal(standing.rollout_id))
            except (RedisError, OSError):
                await asyncio.sleep(LOOK_S)
                continue
            record = msgspec.msgpack.decode(raw)
            if record["state"] in ("cancelled", "failed"):
                return
            if record["attempt"] != standing.attempt:
                self._count(standing, killed_at, resumed=False)
                return
            if length > standing.length or record["state"] == "ended":
                self._count(standing, killed_at, resumed=True)
                return
            await asyncio.sleep(LOOK_S)

    def _count(self, standing: Standing, killed_at: float, *, resumed: bool) -> None:
        self.found.seconds.append(time.monotonic() - killed_at)
        if resumed:
            self.found.resumed += 1
            self.found.tokens_saved += standing.sampled
        else:
            self.found.restarted += 1
            self.found.tokens_lost += standing.sampled
