"""The gateway's HTTP API as a trainer sees it: nothing of the service is imported, only spoken to.

A call that got no answer, or one that says "later" (429, 502, 503, 504), is made again with the same Idempotency-Key, so that a restart
of the gateway costs time and nothing else.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
import orjson

logger = logging.getLogger(__name__)

PAGE = 200
WAIT_S = 20.0
"""How long the gateway holds a call open while there is nothing to tell."""
RETRY_S = 300.0
"""Longer than a deployment takes."""
FIRST_RETRY_S = 5.0
"""Until the first answer: a gateway that was never there is a wrong URL."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
LATER = frozenset({429, 502, 503, 504})
GONE = frozenset({404, 410})
"""A batch that is no longer the caller's."""


class GatewayError(Exception):
    """The gateway refused a call (`status`), or did not answer for RETRY_S (`status` None). The message is its problem's."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class Drained(Exception):
    """Nothing is left to lease, and nothing will come."""


class Gateway:
    """One tenant's calls. Each raises GatewayError when it is refused."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._answered = False

    async def create_job(self, spec: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The job, and whether this call created it; the same name and spec again is the same job."""
        answer = await self._call("POST", "/v1/jobs", spec)
        return orjson.loads(answer.content), answer.status_code == 201

    async def job(self, job_id: str) -> dict[str, Any]:
        return await self._get(f"/v1/jobs/{job_id}")

    async def delete_job(self, job_id: str) -> None:
        await self._call("DELETE", f"/v1/jobs/{job_id}")

    async def submit(self, job_id: str, tasks: Sequence[Mapping[str, Any]]) -> list[str]:
        """Enqueue `tasks`, when there is room for them; the ids of their groups."""
        answer = await self._call("POST", f"/v1/jobs/{job_id}/tasks", {"tasks": list(tasks)})
        return [group["group_id"] for group in orjson.loads(answer.content)["groups"]]

    async def groups(self, job_id: str) -> list[dict[str, Any]]:
        """Every group of the job, page by page."""
        found: list[dict[str, Any]] = []
        after = ""
        while True:
            page = await self._get(f"/v1/jobs/{job_id}/groups?limit={PAGE}{after}")
            found += page["groups"]
            if page["next"] is None:
                return found
            after = f"&after={page['next']}"

    async def lease(
        self, job_id: str, groups: int, *, lease_s: float, allow_fewer: bool = False, trains_version: int | None = None
    ) -> dict[str, Any] | None:
        """A batch, or None when nothing was ready in time.

        Raises:
            Drained: nothing is left to come for such a lease.
        """
        wanted = {"groups": groups, "wait_s": WAIT_S, "lease_s": lease_s, "allow_fewer": allow_fewer, "trains_version": trains_version}
        answer = await self._call("POST", f"/v1/jobs/{job_id}/batches", wanted)
        if answer.status_code != 204:
            batch: dict[str, Any] = orjson.loads(answer.content)
            return batch
        if answer.headers.get("Rollway-Drained") == "true":
            raise Drained
        return None

    async def live_batches(self, job_id: str) -> list[str]:
        return [batch["batch_id"] for batch in (await self._get(f"/v1/jobs/{job_id}/batches"))["batches"]]

    async def extend(self, batch_id: str, lease_s: float) -> None:
        await self._call("POST", f"/v1/batches/{batch_id}/extend", {"lease_s": lease_s})

    async def ack(self, batch_id: str) -> None:
        await self._call("POST", f"/v1/batches/{batch_id}/ack")

    async def release(self, batch_id: str) -> None:
        await self._call("POST", f"/v1/batches/{batch_id}/release")

    async def publish(self, job_id: str, version: int, *, ack: Sequence[str]) -> None:
        """Tell the service that weights `version` are out, and ack the batches they were trained on."""
        await self._call("PUT", f"/v1/jobs/{job_id}/policy", {"version": version, "ack": list(ack)})

    async def begin_update(self, job_id: str, version: int) -> str:
        """Pause the job's generators for weights `version`, in the job's way; the update's id."""
        update_id: str = orjson.loads((await self._call("POST", f"/v1/jobs/{job_id}/weight_updates", {"version": version})).content)[
            "update_id"
        ]
        return update_id

    async def update(self, update_id: str) -> dict[str, Any]:
        """The update, when its state has changed or after a while."""
        return await self._get(f"/v1/weight_updates/{update_id}?wait_s={WAIT_S:g}")

    async def finish_update(self, update_id: str) -> None:
        """The weights are there: label the generators, let them go on, bump the version."""
        await self._call("POST", f"/v1/weight_updates/{update_id}/finish")

    async def _get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = orjson.loads((await self._call("GET", path)).content)
        return answer

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        headers = {"Idempotency-Key": uuid4().hex} if method == "POST" else {}
        retry_s = RETRY_S if self._answered else FIRST_RETRY_S
        deadline, pause_s = time.monotonic() + retry_s, FIRST_PAUSE_S
        while True:
            status, wait_s = None, pause_s
            try:
                answer = await self._http.request(method, path, json=body, headers=headers)
            except httpx.TransportError as error:
                problem = f"{method} {self._http.base_url.join(path)} got no answer: {error!r}"
            else:
                self._answered = True
                if not answer.is_error:
                    return answer
                status, problem = answer.status_code, f"{method} {path} answered {answer.status_code}: {_problem(answer)}"
                if status not in LATER:
                    raise GatewayError(problem, status)
                wait_s = max(pause_s, _retry_after_s(answer))
            if time.monotonic() + wait_s > deadline:
                raise GatewayError(f"{problem} (tried for {retry_s:g} s)", status)
            logger.warning("%s; trying again in %.1f s", problem, wait_s)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, MAX_PAUSE_S)


def _problem(answer: httpx.Response) -> str:
    """What the problem document says, or else the body."""
    try:
        told = orjson.loads(answer.content)
        fields = "; ".join(f"{field['field']} {field['problem']}" for field in told.get("fields") or [])
        return f"{told['detail']}: {fields}" if fields else str(told["detail"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return answer.text[:2000]


def _retry_after_s(answer: httpx.Response) -> float:
    given = answer.headers.get("Retry-After", "")
    return min(float(given), MAX_PAUSE_S) if given.isdecimal() else 0.0


@asynccontextmanager
async def open_gateway(url: str, key: str) -> AsyncIterator[Gateway]:
    """key: empty where the gateway has none."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=WAIT_S + 40) as http:
        yield Gateway(http)
