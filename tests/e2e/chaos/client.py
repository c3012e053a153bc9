"""A client as a careful trainer writes it: whatever is lost on the way is asked again, at the other gateway, with the same key."""

import asyncio
import random
import time
import uuid
from typing import Any

import httpx

PATIENCE_S = 60.0
"""For one request, all tries together: longer than anything is away."""
TRY_S = 8.0
PAUSE_S = 0.2


class Client:
    """Speaks to any of `urls`."""

    def __init__(self, urls: list[str], key: str, *, chance: random.Random) -> None:
        self._urls = urls
        self._chance = chance
        self._http = httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=TRY_S)
        self.tries = 0

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._http.aclose()

    async def call(self, method: str, path: str, *expected: int, json: Any = None, **params: Any) -> httpx.Response:
        """The answer, which is one of `expected`. 5xx, 429 and lost connections are tried again.

        Raises:
            AssertionError: another answer, or none within `PATIENCE_S`.
        """
        headers = {"Idempotency-Key": uuid.uuid4().hex} if method == "POST" else {}
        ends_at, last = time.monotonic() + PATIENCE_S, "nothing tried"
        while time.monotonic() < ends_at:
            self.tries += 1
            url = self._chance.choice(self._urls) + path
            try:
                reply = await self._http.request(method, url, json=json, params=params, headers=headers)
            except httpx.TransportError as error:
                last = repr(error)
            else:
                last = f"{reply.status_code} {reply.text[:500]}"
                if reply.status_code < 500 and reply.status_code != 429:
                    assert reply.status_code in (expected or (200,)), f"{method} {path}: {last}"
                    return reply
            await asyncio.sleep(PAUSE_S)
        raise AssertionError(f"{method} {path}: no answer for {PATIENCE_S:.0f} s; last: {last}")
