"""Stands between a worker and a generator and keeps what the engine itself answered to each generation."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

PASSED = ("Content-Type", "Authorization")


@asynccontextmanager
async def recording(url: str) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """The proxy's URL, and the replies (200) to /generate so far."""
    replies: list[dict[str, Any]] = []

    async def forward(request: web.Request) -> web.Response:
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        async with http.request(request.method, url + request.path_qs, data=await request.read() or None, headers=headers) as answer:
            body = await answer.read()
        if request.path == "/generate" and answer.status == 200:
            replies.append(orjson.loads(body))
        return web.Response(body=body, status=answer.status, content_type=answer.content_type)

    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", forward)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http, TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/"), replies


def engine_versions(replies: list[dict[str, Any]], ids: list[int]) -> list[int]:
    """The version that the engine gives each of `ids`, one sampled turn, which came in one reply or, cut, in several."""
    found: list[int] = []
    while len(found) < len(ids):
        [reply] = [r for r in replies if r["output_ids"] and ids[len(found) : len(found) + len(r["output_ids"])] == r["output_ids"]]
        for span in reply["meta_info"]["weight_versions"]:
            found += [int(span["version"].rpartition(".")[2])] * (span["end"] - span["start"])
    return found
