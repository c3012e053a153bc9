"""A generator that answers every /generate with one canned reply after a fixed delay: for benches, so that its own cost is small.

usage: python tests/bench/canned_generator.py PORT REPLY_FILE DELAY_S FIRST_TOKENS
Prompts shorter than FIRST_TOKENS (first turns) wait for a random part of another delay: so that rollouts which start together do not
stay in step, and the load is even.
REPLY_FILE holds a whole SGLang reply as JSON, in which RID and "PROMPT" stand for the request's rid and its number of prompt tokens.
"""

import asyncio
import random
import re
import sys
from pathlib import Path
from typing import cast

import uvloop

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
RID = re.compile(rb'"rid": ?"([^"]*)"')


class Canned(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, Content-Length bodies only."""

    def __init__(self, reply: bytes, delay_s: float, first_tokens: int) -> None:
        self._reply, self._delay_s, self._first_tokens = reply, delay_s, first_tokens
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = LENGTH.search(self._buffer, 0, end)
            size = int(length[1]) if length else 0
            if len(self._buffer) < end + 4 + size:
                return
            request, self._buffer = self._buffer[: end + 4 + size], self._buffer[end + 4 + size :]
            if request.startswith(b"POST /generate"):
                prompt_tokens, body = self._filled(request, end)
                first = prompt_tokens < self._first_tokens
                asyncio.get_running_loop().call_later(self._delay_s * (1 + random.random() * first), self._answer, body)
            else:
                self._answer(b'{"weight_version":"0"}')

    def _filled(self, request: bytes, head: int) -> tuple[int, bytes]:
        rid, ids = RID.search(request, head), request.find(b'"input_ids"', head)
        prompt = request.count(b",", ids, request.find(b"]", ids)) + 1
        return prompt, self._reply.replace(b"RID", rid[1] if rid else b"x", 1).replace(b'"PROMPT"', b"%d" % prompt, 1)

    def _answer(self, body: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


async def main(port: int, reply: bytes, delay_s: float, first_tokens: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Canned(reply, delay_s, first_tokens), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2]).read_bytes(), float(sys.argv[3]), int(sys.argv[4])))
