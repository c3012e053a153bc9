"""A trainer that behaves as badly as trainers do: it acks, acks late, hands back, forgets, asks again, and publishes versions meanwhile."""

import asyncio
import random
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx

from tests.e2e.chaos.client import Client

SHORT_LEASE_S = 3.0
"""Of batches: those that are forgotten come back soon."""
FEED_S = 0.4
BACKLOG = 12
"""Groups: enough that workers have something to do while no gateway answers."""
PAUSE_S = 0.1
RELABEL_S = 0.3
ACTIONS = {"ack": 8, "publish_and_ack": 4, "ack_late": 2, "extend_and_ack": 2, "release": 2, "forget": 2}


ARRAYS = {"token_ids": "i", "loss_mask": "B", "logprobs": "f", "versions": "i"}


def packed(group: dict[str, Any]) -> dict[str, Any]:
    """The same, its samples in less memory: an hour's are kept."""
    for trajectory in group["trajectories"]:
        for sample in trajectory["samples"]:
            sample |= {name: array(code, sample[name]) for name, code in ARRAYS.items()}
    return group


class Trainer:
    """One job's client. deliveries: each group as it came, every time. acked: batch id -> its groups, where the service said so."""

    def __init__(self, client: Client, job_id: str, generator_urls: Sequence[str], *, chance: random.Random) -> None:
        self.submitted: list[str] = []
        self.deliveries: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.acked: dict[str, list[str]] = {}
        self.version = 0
        self._publishing = asyncio.Lock()
        self._client = client
        self._job_id = job_id
        self._generator_urls = generator_urls
        self._chance = chance

    # -------------------------------------------------------------------------------------------------------------------- feeding

    async def feed(self, make_task: Callable[[int], dict[str, Any]], *, until: asyncio.Event) -> None:
        """Keep a small backlog; now and then change one's mind about a group, or about the job."""
        while not until.is_set():
            job = (await self._client.call("GET", f"/v1/jobs/{self._job_id}")).json()
            if job["counts"]["backlog"] < BACKLOG:
                tasks = [make_task(len(self.submitted) + n) for n in range(BACKLOG)]
                reply = await self._client.call("POST", f"/v1/jobs/{self._job_id}/tasks", 202, json={"tasks": tasks})
                self.submitted += [group["group_id"] for group in reply.json()["groups"]]
                if self._chance.random() < 0.2:
                    victim = self._chance.choice(self.submitted[-15:])
                    await self._client.call("POST", f"/v1/groups/{victim}/cancel", 200, 409)
                if self._chance.random() < 0.2:
                    queue_groups = 256 + len(self.submitted)  # that the gate is off for
                    await self._client.call("PATCH", f"/v1/jobs/{self._job_id}", json={"queue_groups": queue_groups})
            await asyncio.sleep(FEED_S)

    # ------------------------------------------------------------------------------------------------------------------- training

    async def train(self, *, fed: asyncio.Event) -> None:
        """Until feeding has ended and nothing is left to come. The next batch is asked for while the last ones are in use."""
        async with asyncio.TaskGroup() as steps:
            while not (await self._lease(steps) and fed.is_set()):
                await asyncio.sleep(PAUSE_S)

    async def _lease(self, steps: asyncio.TaskGroup) -> bool:
        """Take a batch and use it, if one comes; whether nothing is left to come."""
        asked = {"groups": self._chance.randint(1, 6), "allow_fewer": True, "wait_s": 2, "lease_s": SHORT_LEASE_S}
        reply = await self._client.call("POST", f"/v1/jobs/{self._job_id}/batches", 200, 204, json=asked)
        if reply.status_code == 204:
            return reply.headers["Rollway-Drained"] == "true"
        batch = reply.json()
        for group in batch["groups"]:
            self.deliveries[group["group_id"]].append(packed(group))
        steps.create_task(self._use(batch, self._chance.choices(list(ACTIONS), weights=list(ACTIONS.values()))[0]))
        return False

    async def _use(self, batch: dict[str, Any], action: str) -> None:
        batch_id = batch["batch_id"]
        if action == "forget":
            return
        if action == "release":
            await self._client.call("POST", f"/v1/batches/{batch_id}/release", 200)
            return
        if action == "publish_and_ack":
            if await self.publish(ack=[batch_id]):
                self._ended(batch)
            return
        if action == "extend_and_ack":
            await self._client.call("POST", f"/v1/batches/{batch_id}/extend", 200, 410, json={"lease_s": SHORT_LEASE_S})
        if action == "ack_late":
            await asyncio.sleep(SHORT_LEASE_S * self._chance.uniform(0.5, 1.5))
        reply = await self._client.call("POST", f"/v1/batches/{batch_id}/ack", 200, 410)
        if reply.status_code == 200:
            self._ended(batch)
        await self.publish()

    def _ended(self, batch: dict[str, Any]) -> None:
        self.acked[batch["batch_id"]] = [group["group_id"] for group in batch["groups"]]

    async def publish(self, *, ack: Sequence[str] = ()) -> bool:
        """The next version; whether it was taken (it is not when a batch to ack has gone to somebody else)."""
        async with self._publishing:
            body = {"version": self.version + 1, "ack": list(ack)}
            reply = await self._client.call("PUT", f"/v1/jobs/{self._job_id}/policy", 200, 410, json=body)
            if reply.status_code == 200:
                self.version += 1
            return reply.status_code == 200

    # --------------------------------------------------------------------------------------------------------------------- labels

    async def label(self) -> None:
        """For ever: the generators carry the published version, also those that come back with their first one."""
        async with httpx.AsyncClient(timeout=2.0) as http:
            while True:
                for url in self._generator_urls:
                    with suppress(httpx.TransportError):
                        label = (await http.get(f"{url}/model_info")).json()["weight_version"]
                        if label != str(self.version):
                            body = {"new_version": str(self.version), "abort_all_requests": False}
                            await http.post(f"{url}/update_weight_version", json=body)
                await asyncio.sleep(RELABEL_S)
