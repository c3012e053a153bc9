"""The steps of a simulated trainer: wait for a batch, take the time of a step, publish."""

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from service.trainer.feed import Feed, backlog_for, tasks_of
from service.trainer.figures import Step, Summary, discards, summarise
from service.trainer.gateway import GONE, Gateway, GatewayError
from service.trainer.leaser import Held, Leaser, Order, hand_back
from service.trainer.options import Pace, TrainerOptions
from service.trainer.weights import Labels, Updates, Weights


@dataclass(slots=True, kw_only=True)
class Progress:
    """What was done so far, for whoever shows it."""

    version: int = 0
    steps: list[Step] = field(default_factory=list)
    lost_batches: int = 0


class Trainer:
    """One run over `job`, as the service describes it. `progress` is kept up to date."""

    def __init__(self, gateway: Gateway, job: Mapping[str, Any], options: TrainerOptions, progress: Progress) -> None:
        self._gateway = gateway
        self._job = dict(job)
        self._options = options
        self._progress = progress
        self._clock = Clock(options.pace)
        self._unpublished = 0
        """Batches trained since the last version."""
        progress.version = job["policy_version"]

    async def run(self) -> None:
        """Until the steps are done or the job is drained.

        Raises:
            GatewayError: the service refused a call.
            TrainerError: a generator or an update failed for good.
        """
        options, spec, job_id = self._options, self._job["spec"], self._job["job_id"]
        feed = Feed(self._gateway, job_id, tasks_of(options.tasks, options.epochs), groups=backlog_for(self._job))
        order = Order(
            job_id=job_id,
            groups=spec["groups_per_step"],
            lease_s=options.lease_s,
            prefetch=options.prefetch,
            version=self._progress.version,
            steps_per_version=spec["steps_per_version"],
        )
        await hand_back(self._gateway, job_id)  # what this job's trainer held before it was restarted
        async with httpx.AsyncClient(timeout=60.0) as http, Leaser(self._gateway, order, fed=lambda: feed.over) as leaser:
            try:
                async with asyncio.TaskGroup() as group:
                    feeding = group.create_task(feed.run())
                    await self._train(leaser, self._weights(http))
                    feeding.cancel()
            except BaseExceptionGroup as errors:  # of one: what the training or the feeding raised
                raise errors.exceptions[0] from None

    def _weights(self, http: httpx.AsyncClient) -> Weights:
        update_s = self._options.pace.update_s / self._options.pace.time_scale
        if self._options.weight_updates:
            return Updates(self._gateway, self._job["job_id"], update_s=update_s)
        return Labels(self._gateway, http, self._job, update_s=update_s)

    async def _train(self, leaser: Leaser, weights: Weights) -> None:
        while self._options.steps is None or len(self._progress.steps) < self._options.steps:
            began = self._clock.now()
            batch = await leaser.next()
            if batch is None:
                return
            leased = self._clock.now()
            await self._clock.compute()
            trained = self._clock.now()
            if batch.lost or not await self._published(batch, weights):
                leaser.lost(batch)
                self._progress.lost_batches += 1
                continue
            leaser.trained(batch)
            self._progress.steps.append(
                Step(
                    version=self._progress.version,
                    wait_s=leased - began,
                    train_s=trained - leased,
                    publish_s=self._clock.now() - trained,
                    staleness=batch.staleness,
                    samples=batch.samples,
                    tokens=batch.tokens,
                )
            )

    async def _published(self, batch: Held, weights: Weights) -> bool:
        """Ack the batch, with the next version where it is due. False: the batch is no longer ours, as if the step had not been."""
        batch.publishing = True
        due = self._unpublished + 1 == self._job["spec"]["steps_per_version"]
        try:
            if due:
                await weights.publish(self._progress.version + 1, ack=[batch.batch_id])
            else:
                await self._gateway.ack(batch.batch_id)
        except GatewayError as error:
            if error.status not in GONE:
                raise
            return False
        self._progress.version += due
        self._unpublished = 0 if due else self._unpublished + 1
        return True

    async def summary(self, *, interrupted: bool = False) -> Summary:
        after = await self._gateway.job(self._job["job_id"])
        return summarise(
            self._progress.steps,
            warm_up=self._options.warm_up,
            version=self._progress.version,
            discarded=discards(self._job["counts"], after["counts"]),
            lost_batches=self._progress.lost_batches,
            interrupted=interrupted,
        )


class Clock:
    """Simulated time."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._chance = random.Random(pace.seed)

    def now(self) -> float:
        """Simulated seconds since some moment."""
        return time.monotonic() * self._pace.time_scale

    async def compute(self) -> None:
        """One step's time."""
        pace = self._pace
        factor = self._chance.lognormvariate(-(pace.step_sigma**2) / 2, pace.step_sigma)
        await asyncio.sleep(pace.step_s * factor / pace.time_scale)
