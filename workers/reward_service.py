"""Ask a reward service (a judge, a reward model) over HTTP.

The service gets `{"task_id", "stop_reason", "messages", "metadata"}` and answers `{"reward": r, ...details}` with a finite number. A
refusal (4xx, a redirect) or an object without a finite reward is a fault of the task; an absent, slow, failing or babbling service is
infrastructure, asked again a few times.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from service.errors import TaskFaultError, VerifierUnavailableError
from service.records import TaskSpec, UrlVerifier
from workers.rewards import Verdict, reward_object

MAX_REQUEST_BYTES = 64 * 2**20
"""Of one trajectory's messages; more is a task that should not have such limits."""

MAX_ANSWER_BYTES = 262_144

RETRY_AFTER_S = (0.2, 1.0, 3.0)
"""Pauses before another try: a whole attempt costs far more than one more question."""

_ASK_AGAIN = frozenset({408, 425, 429})


async def ask_service(
    verifier: UrlVerifier,
    task: TaskSpec,
    messages: Sequence[Mapping[str, Any]],
    *,
    stop_reason: str | None,
    http: aiohttp.ClientSession,
) -> Verdict:
    """The service's verdict.

    Raises:
        TaskFaultError: it refuses this task, or has no finite reward for it.
        VerifierUnavailableError: it could not be asked.
    """
    trajectory = {"task_id": task.task_id, "stop_reason": stop_reason, "messages": list(messages), "metadata": task.metadata}
    body = json.dumps(trajectory, allow_nan=False).encode()
    if len(body) > MAX_REQUEST_BYTES:
        raise TaskFaultError(f"the trajectory is {len(body)} bytes; a reward service is sent at most {MAX_REQUEST_BYTES}")
    for pause in RETRY_AFTER_S:
        try:
            return await _ask(verifier, body, http)
        except VerifierUnavailableError:
            await asyncio.sleep(pause)
    return await _ask(verifier, body, http)


async def _ask(verifier: UrlVerifier, body: bytes, http: aiohttp.ClientSession) -> Verdict:
    headers = {**verifier.headers, "Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=verifier.timeout_s)
    try:
        async with http.post(verifier.url, data=body, headers=headers, timeout=timeout, allow_redirects=False) as response:
            answer = await _read(response)
            return _verdict(verifier.url, response.status, answer)
    except TimeoutError as error:
        raise VerifierUnavailableError(f"{verifier.url} did not answer within {verifier.timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise VerifierUnavailableError(f"{verifier.url}: {error}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body; one byte more than the bound when it is over it."""
    answer = bytearray()
    async for chunk in response.content.iter_chunked(65_536):
        answer += chunk
        if len(answer) > MAX_ANSWER_BYTES:
            break
    return bytes(answer[: MAX_ANSWER_BYTES + 1])


def _verdict(url: str, status: int, answer: bytes) -> Verdict:
    shown = answer[:300].decode(errors="replace")
    if status >= 500 or status in _ASK_AGAIN:
        raise VerifierUnavailableError(f"{url} answered {status}: {shown!r}")
    if status >= 300:
        raise TaskFaultError(f"the reward service {url} answered {status} (redirects are not followed): {shown!r}")
    if len(answer) > MAX_ANSWER_BYTES:
        raise VerifierUnavailableError(f"{url} answered with more than {MAX_ANSWER_BYTES} bytes")
    found = reward_object(answer)
    if found is not None:
        return Verdict(*found)
    try:
        orjson.loads(answer)
    except orjson.JSONDecodeError as error:
        raise VerifierUnavailableError(f"{url} answered no JSON: {shown!r}") from error
    raise TaskFaultError(f'the reward service {url} gave no object with a finite "reward": {shown!r}')
