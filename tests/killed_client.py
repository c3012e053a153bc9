"""A generator's client that is killed while it waits for its answer."""

import asyncio
import json
import sys

import httpx

CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1] + "/generate", sys.argv[2].encode(), {"Content-Type": "application/json"})
urllib.request.urlopen(request).read()
"""


async def running_requests(generator: httpx.AsyncClient) -> int:
    loads: list[dict[str, int]] = (await generator.get("/v1/loads")).json()["loads"]
    return sum(load["num_running_reqs"] for load in loads)


async def assert_aborted_for_a_killed_client(url: str, body: dict[str, object], *, within_s: float) -> None:
    """The generator samples while the client lives, and no longer; an answer would take much longer than `within_s`."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as generator:
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, url, json.dumps(body))
        try:
            async with asyncio.timeout(60):
                while await running_requests(generator) == 0:
                    await asyncio.sleep(0.1)
        finally:
            client.kill()
            await client.wait()
        async with asyncio.timeout(within_s):
            while await running_requests(generator):
                await asyncio.sleep(0.1)
