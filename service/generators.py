"""The client of one SGLang server (or of a router in front of some): ids in, ids out, and the control calls.

SGLang aborts by prefix of the request id, so ids must be of one length and fresh for each call (`new_rid`). A router answers `/generate`
only; control calls then go to each of the workers behind it (`control_urls`).
"""

import asyncio
import logging
import uuid
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
import numpy as np
import orjson

from service.errors import GeneratorError
from service.generation_reply import Reply, decode, failure
from service.records import GeneratorSpec, Sampling

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 4.0
"""SGLang closes idle connections after 5 s; ours must go first, or a request meets a closing one."""

CONNECT_S = 10.0
CONTROL_S = 10.0
"""Deadline of a question about the server; `/server_info` makes a round trip through the scheduler."""

PROBE_S = 2.0
"""`/ready` answers at once."""

ABORT_S = 2.0
"""An engine that cannot be told within this notices the closed connection by itself, seconds later."""

_MAX_INFO_BYTES = 4 * 2**20
_BASE_REPLY_BYTES = 2**20
_REPLY_BYTES_PER_TOKEN = 1024
"""An id with its log-probability takes about 40 bytes, its text at most some hundred."""


def open_session() -> aiohttp.ClientSession:
    """A session for generator calls: no limit of its own (the pool has one), no cookies, no deadline (the caller has one)."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
    )


def new_rid() -> str:
    """A request id: 32 characters, so that none is a prefix of another."""
    return uuid.uuid4().hex


def sampling_params(sampling: Sampling, *, max_new_tokens: int, stop_token_ids: Iterable[int]) -> dict[str, Any]:
    """SGLang's `sampling_params`; it refuses keys that it does not know."""
    params: dict[str, Any] = sampling.model_dump(exclude_none=True)
    if "min_new_tokens" in params:
        params["min_new_tokens"] = min(params["min_new_tokens"], max_new_tokens)
    params["max_new_tokens"] = max_new_tokens
    params["stop_token_ids"] = list(stop_token_ids)
    params["skip_special_tokens"] = False
    params["no_stop_trim"] = True
    return params


class NotFoundHereError(GeneratorError):
    """The server has no such path, or is not there (any more)."""


class TimedOutGeneratorError(GeneratorError):
    """No answer in time; the engine may still be at it."""


class BusyGeneratorError(GeneratorError):
    """429 or 503: it is alive and full; 409: it is changing its weights. `retry_after_s`: what it asked for, 0 if nothing."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retryable=True)
        self.retry_after_s = retry_after_s


class GeneratorClient:
    """One server. When it fails us, every call raises GeneratorError and nothing else."""

    def __init__(self, session: aiohttp.ClientSession, spec: GeneratorSpec) -> None:
        self.spec = spec
        self._session = session
        self._url = spec.url.rstrip("/")
        self._control_urls = control_urls(spec)
        self._headers = headers_of(spec)
        self._control_headers = headers_of(spec, control=True)

    async def generate(self, rid: str, ids: "array[int]", *, params: Mapping[str, Any], timeout_s: float, routing_key: str = "") -> Reply:
        """Sample from `ids` (int32, at least one, each inside the vocabulary: one outside kills the whole server).

        params: as made by `sampling_params`. routing_key: what a router keeps on one worker. The reply is decoded, not yet checked.
        """
        body = orjson.dumps(
            {"rid": rid, "input_ids": np.frombuffer(ids, dtype=np.int32), "sampling_params": params, "return_logprob": True},
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        headers = {**self._headers, "x-smg-routing-key": routing_key} if routing_key else self._headers
        max_bytes = _BASE_REPLY_BYTES + _REPLY_BYTES_PER_TOKEN * int(params["max_new_tokens"])
        return decode(await self._fetch("POST", f"{self._url}/generate", headers, body, timeout_s=timeout_s, max_bytes=max_bytes))

    async def abort(self, rid: str) -> None:
        """Ask to stop a request, wherever it runs, within ABORT_S. Best effort: where it cannot be said, it is logged."""
        await asyncio.gather(*(self._abort_at(url, rid) for url in self._control_urls))

    async def _abort_at(self, url: str, rid: str) -> None:
        try:
            await self._fetch("POST", f"{url}/abort_request", self._control_headers, orjson.dumps({"rid": rid}), timeout_s=ABORT_S)
        except GeneratorError as error:
            logger.warning("abort of request %s at %s: %s", rid, url, error)

    async def ready(self) -> bool:
        """Whether it takes requests now. `/ready` answers at once; servers before 0.5.20 and routers have only the model's description."""
        for path in ("/ready", "/model_info", "/get_model_info"):
            try:
                await self._fetch("GET", self._url + path, self._headers, None, timeout_s=PROBE_S)
            except NotFoundHereError:
                continue
            except GeneratorError:
                return False
            return True
        return False

    async def info(self) -> dict[str, Any]:
        """`/model_info`: model_path, tokenizer_path, weight_version, ..."""
        return await self._get("/model_info")

    async def server_info(self) -> dict[str, Any]:
        """`/server_info`: some 550 keys, among them context_length, max_req_input_len, version, frontend."""
        return await self._get("/server_info")

    async def loads(self) -> list[Any]:
        """`/v1/loads`: an entry for each data-parallel rank, of every server behind a router."""
        told = await asyncio.gather(*(self._get("/v1/loads", url, timeout_s=PROBE_S) for url in self._control_urls))
        return [rank for each in told if isinstance(ranks := each.get("loads"), list) for rank in ranks]

    async def _get(self, path: str, url: str | None = None, *, timeout_s: float = CONTROL_S) -> dict[str, Any]:
        return json_object(await self._fetch("GET", (url or self._control_urls[0]) + path, self._headers, None, timeout_s=timeout_s), path)

    async def _fetch(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, **bounds: Any) -> bytes:
        return await fetch(self._session, method, url, headers, body, **bounds)


async def fetch(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    timeout_s: float,
    max_bytes: int = _MAX_INFO_BYTES,
) -> bytes:
    """The body of a 200, read within `timeout_s` and `max_bytes`; anything else is a GeneratorError."""
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.request(method, url, data=body, headers=headers, allow_redirects=False) as response,
        ):
            answer = await _read(response, max_bytes)
    except aiohttp.ClientError as error:  # first: some of them are also timeouts or bad values
        raise GeneratorError(f"connection failed: {str(error) or type(error).__name__}", retryable=True) from error
    except TimeoutError as error:
        raise TimedOutGeneratorError(f"no answer within {timeout_s:g} s", retryable=True) from error
    except OSError as error:
        raise GeneratorError(f"connection failed: {error}", retryable=True) from error
    except ValueError as error:  # such as a line break in a key
        raise GeneratorError(f"the request cannot be written: {error}", retryable=False) from error
    if response.status != 200:
        raise _failure(response, answer)
    return answer


def headers_of(spec: GeneratorSpec, *, control: bool = False) -> dict[str, str]:
    """What each call to a generator carries; control calls have a key of their own where it has one."""
    headers = {**spec.headers, "Content-Type": "application/json", **_bearer(spec.api_key)}
    return {**headers, **_bearer(spec.admin_api_key)} if control else headers


def control_urls(spec: GeneratorSpec) -> list[str]:
    """Where its control calls go: itself, or the workers behind a router."""
    return [url.rstrip("/") for url in spec.control_urls] or [spec.url.rstrip("/")]


def json_object(body: bytes, path: str) -> dict[str, Any]:
    """Raises GeneratorError (retryable) for what is no JSON object."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise GeneratorError(f"{path} is not JSON: {error}", retryable=True) from error
    if not isinstance(found, dict):
        raise GeneratorError(f"{path} is not a JSON object", retryable=True)
    return found


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > max_bytes:
            raise GeneratorError(f"reply_too_large: more than {max_bytes} bytes", retryable=True)
        chunks.append(chunk)
    return b"".join(chunks)


def _failure(response: aiohttp.ClientResponse, body: bytes) -> GeneratorError:
    error = failure(response.status, body)
    if response.status in (409, 429, 503):
        return BusyGeneratorError(str(error), retry_after_s=_retry_after(response))
    return NotFoundHereError(str(error), retryable=True) if response.status == 404 else error


def _retry_after(response: aiohttp.ClientResponse) -> float:
    given = response.headers.get("Retry-After", "")
    return float(given) if given.isdecimal() and len(given) < 6 else 0.0
