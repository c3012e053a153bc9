"""The calls that move a generator from one version of its weights to the next, in SGLang's words and past its traps.

A label call aborts everything that runs unless told not to; a flush under requests that stand still in place reports a failure although the
weights were loaded; and a load that was refused may have changed nothing, or half of it: only some refusals say which (`LoadError.moved`).
Every call goes to each of the generator's control URLs and raises GeneratorError unless all of them did it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp
import orjson

from service.errors import GeneratorError
from service.generator_load import told
from service.generators import CONTROL_S, NotFoundHereError, TimedOutGeneratorError, control_urls, fetch, headers_of, json_object
from service.records import GeneratorSpec
from service.weight_records import PauseMode

IDLE_POLL_S = 0.2
QUIET_POLLS = 2
"""Loads are a snapshot that may lag: it must be empty that often in a row."""

TRIES = 3
FIRST_PAUSE_S = 0.2
"""A generator whose connection fails is tried again so often, and so much later, doubling."""

_REFUSED_BEFORE = ("Failed to get model config", "Failed to get weights iterator")
"""How SGLang begins to say that it could not read what it was to load."""

T = TypeVar("T")


class LoadError(GeneratorError):
    """Weights were not loaded as asked. `moved`: they may be others than before."""

    def __init__(self, message: str, *, moved: bool) -> None:
        super().__init__(message, retryable=False)
        self.moved = moved


class GeneratorControl:
    """One generator of a job, or the workers behind a router."""

    def __init__(self, session: aiohttp.ClientSession, spec: GeneratorSpec) -> None:
        self._session = session
        self._urls = control_urls(spec)
        self._headers = headers_of(spec, control=True)
        self._plain_headers = headers_of(spec)

    async def infos(self, *, timeout_s: float = CONTROL_S) -> list[dict[str, Any]]:
        """`/model_info` of each control URL. Raises NotFoundHereError for a router."""
        return await self._each(lambda url: self._info(url, timeout_s))

    async def label(self, *, timeout_s: float = CONTROL_S) -> str | None:
        """The weight_version that all of them have; None where they differ or say none."""
        return label_of(await self.infos(timeout_s=timeout_s))

    async def pause(self, mode: PauseMode, *, timeout_s: float) -> None:
        """Stand still. `abort` answers what runs with its tokens so far and waits for that. Idempotent."""
        await self._each(lambda url: self._post(url, "/pause_generation", {"mode": mode}, timeout_s))

    async def resume(self, *, timeout_s: float = CONTROL_S) -> None:
        """Go on. Idempotent."""
        await self._each(lambda url: self._post(url, "/continue_generation", {}, timeout_s))

    async def relabel(self, label: str, *, timeout_s: float = CONTROL_S) -> None:
        await self._each(
            lambda url: self._post(url, "/update_weight_version", {"new_version": label, "abort_all_requests": False}, timeout_s)
        )

    async def load(self, path: str, label: str, *, flush_cache: bool, timeout_s: float) -> None:
        """Load weights from a path of the generator's own. Raises LoadError where it refuses."""
        body = {"model_path": path, "weight_version": label, "flush_cache": flush_cache, "abort_all_requests": False}
        await self._each(lambda url: self._load(url, body, timeout_s))

    async def flush(self, *, timeout_s: float = CONTROL_S) -> None:
        """Forget the KV cache; refused while requests hold some."""
        await self._each(lambda url: self._post(url, "/flush_cache", {}, timeout_s))

    async def idle(self) -> None:
        """Wait until nothing runs or waits there."""
        quiet = 0
        while quiet < QUIET_POLLS:
            quiet = quiet + 1 if sum(await self._each(self._busy)) == 0 else 0
            await asyncio.sleep(IDLE_POLL_S)

    async def _each(self, call: Callable[[str], Awaitable[T]]) -> list[T]:
        if len(self._urls) == 1:
            return [await call(self._urls[0])]
        answers = await asyncio.gather(*map(call, self._urls), return_exceptions=True)  # all of them, so that none is left out by another's
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            raise next((error for error in failures if getattr(error, "moved", False)), failures[0])
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _info(self, url: str, timeout_s: float) -> dict[str, Any]:
        body = await fetch(self._session, "GET", f"{url}/model_info", self._plain_headers, None, timeout_s=timeout_s)
        return json_object(body, "/model_info")

    async def _busy(self, url: str) -> int:
        body = await fetch(self._session, "GET", f"{url}/v1/loads", self._plain_headers, None, timeout_s=CONTROL_S)
        loads = json_object(body, "/v1/loads").get("loads")
        load = told(loads if isinstance(loads, list) else [])
        return load.running + load.waiting

    async def _post(self, url: str, path: str, body: dict[str, Any], timeout_s: float) -> None:
        await fetch(self._session, "POST", url + path, self._headers, orjson.dumps(body), timeout_s=timeout_s)

    async def _load(self, url: str, body: dict[str, Any], timeout_s: float) -> None:
        path = "/update_weights_from_disk"
        try:
            answer = await fetch(self._session, "POST", url + path, self._headers, orjson.dumps(body), timeout_s=timeout_s)
        except NotFoundHereError as error:
            raise LoadError(f"{error}: it cannot load weights", moved=False) from error
        except GeneratorError as error:
            raise LoadError(str(error), moved=not any(told in str(error) for told in _REFUSED_BEFORE)) from error
        if json_object(answer, path).get("success") is not True:
            raise LoadError(f"{path} did not succeed", moved=True)


def label_of(infos: Sequence[dict[str, Any]]) -> str | None:
    """The weight_version that all of these descriptions name; None where they differ or say none."""
    label = infos[0].get("weight_version") if infos else None
    return label if isinstance(label, str) and all(info.get("weight_version") == label for info in infos) else None


async def tried(call: Callable[[], Awaitable[T]]) -> T:
    """`call`, again where its connection failed; one that only takes too long is not asked twice."""
    for tries in range(TRIES - 1):
        try:
            return await call()
        except TimedOutGeneratorError:
            raise
        except GeneratorError as error:
            if not error.retryable:
                raise
        await asyncio.sleep(FIRST_PAUSE_S * 2**tries)
    return await call()
