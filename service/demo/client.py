"""The gateway's HTTP API as a trainer sees it: nothing of the service is imported, only spoken to."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx

PAGE = 200
WAIT_S = 20.0
"""How long the gateway holds a lease call open while nothing is ready."""


class GatewayError(Exception):
    """The gateway refused a call, or did not answer. The message is its problem's."""


class Drained(Exception):
    """Nothing is left to lease, and nothing will come."""


class Gateway:
    """One tenant's calls. Each raises GatewayError when it is refused."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def create_job(self, spec: Mapping[str, Any]) -> str:
        job_id: str = (await self._call("POST", "/v1/jobs", spec)).json()["job_id"]
        return job_id

    async def job(self, job_id: str) -> dict[str, Any]:
        return await self._get(f"/v1/jobs/{job_id}")

    async def submit(self, job_id: str, tasks: Sequence[Mapping[str, Any]]) -> list[str]:
        """Enqueue `tasks`; the ids of their groups."""
        answer = (await self._call("POST", f"/v1/jobs/{job_id}/tasks", {"tasks": list(tasks)})).json()
        return [group["group_id"] for group in answer["groups"]]

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

    async def lease(self, job_id: str, groups: int, *, allow_fewer: bool = False) -> dict[str, Any] | None:
        """A batch, or None when nothing was ready in time.

        Raises:
            Drained: nothing is left to come for such a lease.
        """
        wanted = {"groups": groups, "wait_s": WAIT_S, "lease_s": 300.0, "allow_fewer": allow_fewer}
        answer = await self._call("POST", f"/v1/jobs/{job_id}/batches", wanted)
        if answer.status_code != 204:
            batch: dict[str, Any] = answer.json()
            return batch
        if answer.headers.get("Rollway-Drained") == "true":
            raise Drained
        return None

    async def publish(self, job_id: str, version: int, *, ack: Sequence[str]) -> None:
        """Tell the service that weights `version` are out, and ack the batches they were trained on."""
        await self._call("PUT", f"/v1/jobs/{job_id}/policy", {"version": version, "ack": list(ack)})

    async def _get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = (await self._call("GET", path)).json()
        return answer

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        headers = {"Idempotency-Key": uuid4().hex} if method == "POST" else {}
        try:
            answer = await self._http.request(method, path, json=body, headers=headers)
        except httpx.TransportError as error:
            raise GatewayError(f"{method} {path} got no answer: {error!r}") from error
        if answer.is_error:
            raise GatewayError(f"{method} {path} answered {answer.status_code}: {answer.text[:2000]}")
        return answer


@asynccontextmanager
async def open_gateway(url: str, key: str) -> AsyncIterator[Gateway]:
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S + 40) as http:
        yield Gateway(http)
