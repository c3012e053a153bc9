"""How the generators come to a new version: a stand-in has no weights, so it is told a label; a simulated trainer has none either."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import httpx

from service.trainer.gateway import Gateway
from service.trainer.options import TrainerError

logger = logging.getLogger(__name__)

LABEL_TRIES = 5
PAUSE_S = 0.5
POLL_S = 0.05


class Weights(Protocol):
    async def publish(self, version: int, *, ack: Sequence[str]) -> None:
        """Bring weights `version` to the generators and the version to the service; ack the batches that made them."""
        ...


class Labels:
    """Labels each generator itself, while it samples, then says so to the service. update_s: before the labels, in real seconds."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient, job: dict[str, Any], *, update_s: float) -> None:
        self._gateway = gateway
        self._http = http
        self._job_id: str = job["job_id"]
        self._urls = [url for generator in job["spec"]["generators"] for url in _engines(generator)]
        self._update_s = update_s

    async def publish(self, version: int, *, ack: Sequence[str]) -> None:
        await asyncio.sleep(self._update_s)
        await asyncio.gather(*(self._label(url, version) for url in self._urls))
        await self._gateway.publish(self._job_id, version, ack=ack)

    async def _label(self, url: str, version: int) -> None:
        """Without a label of its own an engine's tokens would count as older and older.

        Raises:
            TrainerError: it cannot be labelled.
        """
        problem = ""
        for number in range(LABEL_TRIES):
            await asyncio.sleep(PAUSE_S * number)
            body = {"new_version": str(version), "abort_all_requests": False}
            try:
                answer = await self._http.post(f"{url.rstrip('/')}/update_weight_version", json=body)
            except httpx.TransportError as error:
                problem = f"no answer: {error!r}"
            else:
                if answer.is_success:
                    return
                problem = f"answered {answer.status_code}: {answer.text[:500]}"
            logger.warning("%s could not be labelled %d: %s", url, version, problem)
        raise TrainerError(f"{url} cannot be labelled ({problem}); if it needs a key, let the service do it: --weight-updates")


def _engines(generator: str | dict[str, Any]) -> list[str]:
    if isinstance(generator, str):
        return [generator]
    return generator.get("control_urls") or [generator["url"]]


class Updates:
    """Through the service's weight updates: generators stand still for `update_s` (real seconds), then are labelled and go on."""

    def __init__(self, gateway: Gateway, job_id: str, *, update_s: float) -> None:
        self._gateway = gateway
        self._job_id = job_id
        self._update_s = update_s

    async def publish(self, version: int, *, ack: Sequence[str]) -> None:
        update_id = await self._gateway.begin_update(self._job_id, version)
        await self._reach(update_id, "paused")
        await asyncio.sleep(self._update_s)
        await self._gateway.finish_update(update_id)
        await self._reach(update_id, "done")
        for batch_id in ack:
            await self._gateway.ack(batch_id)

    async def _reach(self, update_id: str, state: str) -> None:
        """Raises TrainerError where the update fails."""
        while (update := await self._gateway.update(update_id))["state"] != state:
            if update["state"] in ("failed", "done"):
                told = [f"{part['url']}: {part['detail']}" for part in update["generators"] if part["detail"]]
                raise TrainerError(f"weight update {update_id} is {update['state']} instead of {state}: {update['reason']} {told}")
            await asyncio.sleep(POLL_S)
