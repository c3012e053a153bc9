"""A generator that misbehaves on demand: it answers each call by the next of its `moods`, and well when none is left."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Reply = dict[str, Any]

MOODS: dict[str, Callable[[Reply], web.Response]] = {
    "409": lambda _: web.json_response({"error": "weights are moving"}, status=409, headers={"Retry-After": "0"}),
    "429": lambda _: web.json_response({"error": "slow down"}, status=429, headers={"Retry-After": "0"}),
    "503": lambda _: web.json_response({"object": "error", "message": "The request queue is full.", "code": 503}, status=503),
    "500": lambda _: web.Response(text="Internal Server Error", status=500),
    "400": lambda _: web.json_response({"error": {"message": "temperature must be a non-negative finite number"}}, status=400),
    "duplicate": lambda reply: web.json_response({"error": {"message": f"Duplicate request ID detected: {rid_of(reply)}"}}, status=400),
    "401": lambda _: web.json_response({"error": "Unauthorized"}, status=401),
    "303": lambda _: web.Response(status=303, headers={"Location": "http://127.0.0.1:9/elsewhere"}),
    "garbage": lambda _: web.Response(body=b"<html>hello</html>"),
    "nan": lambda reply: web.Response(body=str(reply).replace("'", '"').replace("-0.5", "NaN").replace("None", "null").encode()),
    "null": lambda reply: web.json_response(reply | {"meta_info": reply["meta_info"] | {"output_token_logprobs": [[None, 7, None]] * 2}}),
    "no spans": lambda reply: web.json_response(reply | {"meta_info": reply["meta_info"] | {"weight_versions": None}}),
    "short": lambda reply: web.json_response(reply | {"output_ids": [7]}),
    "huge": lambda _: web.Response(body=b" " * 8_000_000),
}


def rid_of(reply: Reply) -> str:
    return str(reply["meta_info"]["id"])


class HostileGenerator:
    """Moods beside those of MOODS: `hang` (no answer until aborted, then partial output), `close` (the connection is reset)."""

    def __init__(self, *moods: str) -> None:
        self.moods = deque(moods)
        self.calls: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts: list[str] = []
        self.ready = True
        self.probes = 0
        self.running = 0
        self.most_running = 0
        self.delay_s = 0.0
        self.meta: dict[str, Any] = {}
        """What its answers say of themselves otherwise."""
        self._aborted: dict[str, asyncio.Event] = {}

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.post("/generate", self._generate), web.post("/abort_request", self._abort), web.get("/ready", self._ready)])
        app.on_shutdown.append(self._leave)
        return app

    @property
    def hanging(self) -> int:
        return len(self._aborted)

    def abort_all(self) -> None:
        """As somebody else's weight update would."""
        for event in self._aborted.values():
            event.set()

    async def _leave(self, app: web.Application) -> None:
        self.abort_all()

    async def _ready(self, request: web.Request) -> web.Response:
        self.probes += 1
        return web.Response(status=200 if self.ready else 503)

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborts.append(rid)
        if rid in self._aborted:
            self._aborted[rid].set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        call = await request.json()
        self.calls.append(call)
        self.headers.append(dict(request.headers))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            return await self._answer(request, call)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, call: dict[str, Any]) -> web.StreamResponse:
        mood = self.moods.popleft() if self.moods else "well"
        if mood == "close" and request.transport is not None:
            request.transport.abort()
        if mood == "hang":
            await self._aborted.setdefault(call["rid"], asyncio.Event()).wait()
        finish = {"type": "abort", "message": "Aborted", "status_code": None} if mood == "hang" else {"type": "stop", "matched": 3}
        reply = good_reply(call, finish)
        reply["meta_info"] |= self.meta
        return MOODS[mood](reply) if mood in MOODS else web.json_response(reply)


def good_reply(call: dict[str, Any], finish: dict[str, Any]) -> Reply:
    meta = {
        "id": call["rid"],
        "finish_reason": finish,
        "prompt_tokens": len(call["input_ids"]),
        "cached_tokens": 2,
        "weight_version": "6",
        "weight_versions": [{"version": "5", "start": 0, "end": 1}, {"version": "6", "start": 1, "end": 2}],
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 3, None]],
    }
    return {"text": "x", "output_ids": [7, 3], "meta_info": meta}


@asynccontextmanager
async def serving(generator: HostileGenerator) -> AsyncIterator[str]:
    server = TestServer(generator.app())
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()
