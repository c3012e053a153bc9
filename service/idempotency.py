"""The same POST again gives the first answer again; the same key with another body is refused.

A key is bound to (tenant, method and path, body digest) before the handler runs, so that two bodies never both take effect. Two copies of
one request in flight may both run: handlers are idempotent themselves (the store takes the request key for what creates things).
5xx, 429, 204 and what has a `Retry-After` are not remembered, since trying again is their cure; after a 5xx, which may have taken effect,
the body stays bound.
"""

import hashlib
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from service.errors import ConflictError, RequestError
from service.problems import answer_error
from service.store import Store, unavailable

KEPT_HEADERS = ("location",)


class Remembered(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The first answer; `body` is compressed."""

    digest: bytes
    status: int
    media_type: str | None
    headers: dict[str, str]
    body: bytes
    version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """One client's key for one call. `digest`: of the body."""

    name: str
    digest: bytes

    @classmethod
    def of(cls, *, tenant: str, call: str, key: str, body: bytes) -> "RequestKey":
        parts = b"\x00".join(part.encode("utf-8", "surrogateescape") for part in (tenant, call, key))
        return cls(name=hashlib.sha256(parts).hexdigest(), digest=hashlib.sha256(body).digest())


class Idempotency:
    """Remembers answers in the store for `retain_s`."""

    def __init__(self, store: Store, *, retain_s: float) -> None:
        self._store = store
        self._ttl_ms = max(1, int(retain_s * 1000))

    async def run(self, key: RequestKey, act: Callable[[], Awaitable[Response]], *, replay: bool = True) -> Response:
        """Answer with `act`, or with its first answer. `replay` False binds the body only: `act` itself finds what it did before.

        Raises:
            ConflictError: the key came before with another body.
            UnavailableError: the store is away; nothing was done.
        """
        known = await self._recall(key)
        if known is not None:
            return known
        await self._bind(key)
        try:
            response = await act()
        except RequestError as error:
            response = answer_error(error)
        if _lasting(response):
            if replay:
                await self._remember(key, response)
        elif response.status_code < 500:
            await self._forget(key)
        return response

    async def _recall(self, key: RequestKey) -> Response | None:
        with unavailable():
            data = await self._store.redis.get(_answer(key))
        if data is None:
            return None
        first = msgspec.msgpack.decode(data, type=Remembered)
        _check_same(first.digest, key)
        return Response(zlib.decompress(first.body), status_code=first.status, media_type=first.media_type, headers=first.headers)

    async def _bind(self, key: RequestKey) -> None:
        with unavailable():
            before = await self._store.redis.set(_bound(key), key.digest, nx=True, get=True, px=self._ttl_ms)
        if before is not None:
            _check_same(before, key)

    async def _remember(self, key: RequestKey, response: Response) -> None:
        headers = {name: response.headers[name] for name in KEPT_HEADERS if name in response.headers}
        first = Remembered(
            digest=key.digest,
            status=response.status_code,
            media_type=response.media_type,
            headers=headers,
            body=zlib.compress(bytes(response.body), level=1),
        )
        with unavailable():
            await self._store.redis.set(_answer(key), msgspec.msgpack.encode(first), nx=True, px=self._ttl_ms)

    async def _forget(self, key: RequestKey) -> None:
        with unavailable():
            await self._store.redis.delete(_bound(key))


def _lasting(response: Response) -> bool:
    return response.status_code < 500 and response.status_code not in (204, 429) and "retry-after" not in response.headers


def _check_same(digest: bytes, key: RequestKey) -> None:
    if digest != key.digest:
        raise ConflictError("this Idempotency-Key came before with another body; use a new key for a new request")


def _bound(key: RequestKey) -> str:
    return f"rw:{{{key.name}}}:body"


def _answer(key: RequestKey) -> str:
    return f"rw:{{{key.name}}}:answer"
