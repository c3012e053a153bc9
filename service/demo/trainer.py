"""A trainer in small: lease a batch, train on it (here: wait), publish the next version, ack; until nothing is left to come."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from service.trainer.gateway import Drained, Gateway

logger = logging.getLogger(__name__)

TRAIN_S = 0.3
"""What a step takes here."""
LEASE_S = 300.0
STALL_S = 240.0
"""A demo that gets nothing for so long will get nothing any more, and must end by itself."""


class StalledError(Exception):
    """Nothing became ready for STALL_S seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """One group as the trainer got it, and the policy version under which it was leased."""

    policy_version: int
    group: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Progress:
    """What the trainer has done so far. `seconds` runs from its start to its last step."""

    version: int = 0
    steps: int = 0
    delivered: list[Delivered] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def trajectories(self) -> list[Mapping[str, Any]]:
        return [trajectory for delivered in self.delivered for trajectory in delivered.group["trajectories"]]


async def train(gateway: Gateway, job_id: str, *, groups_per_step: int, generator_url: str, progress: Progress) -> None:
    """Run until the job is drained; `progress` is kept up to date for whoever shows it.

    Raises:
        GatewayError: the service refused a call.
        StalledError: nothing became ready any more.
    """
    started = time.monotonic()
    async with httpx.AsyncClient(base_url=generator_url, timeout=60.0) as generator:
        for allow_fewer in (False, True):  # what is left when no full batch can come any more is taken as it is
            try:
                while True:
                    batch = await gateway.lease(job_id, groups_per_step, lease_s=LEASE_S, allow_fewer=allow_fewer)
                    if batch is not None:
                        await _step(gateway, generator, job_id, batch, progress)
                        progress.seconds = time.monotonic() - started
                    elif time.monotonic() - started > progress.seconds + STALL_S:
                        raise StalledError(f"no batch for {STALL_S:.0f} s; see the gateway's log")
            except Drained:
                logger.info("drained after %d steps", progress.steps)


async def _step(gateway: Gateway, generator: httpx.AsyncClient, job_id: str, batch: Mapping[str, Any], progress: Progress) -> None:
    await asyncio.sleep(TRAIN_S)
    version = progress.version + 1
    labelled = await generator.post("/update_weight_version", json={"new_version": str(version), "abort_all_requests": False})
    labelled.raise_for_status()
    await gateway.publish(job_id, version, ack=[batch["batch_id"]])
    progress.version = version
    progress.steps += 1
    progress.delivered += [Delivered(policy_version=batch["policy_version"], group=group) for group in batch["groups"]]
