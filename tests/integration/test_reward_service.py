"""A reward service over real HTTP: what is a verdict, a fault of the task, and infrastructure."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from service.errors import TaskFaultError, VerifierUnavailableError
from service.records import TaskSpec
from workers.reward_service import MAX_ANSWER_BYTES
from workers.rewards import Verdict
from workers.verifier import verify

SLOW = 299
"""A status that stands for no answer in time."""

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]


class RewardService:
    """Answers each POST with the next of its answers (the last one again and again) and keeps what it was sent."""

    def __init__(self, *answers: web.Response) -> None:
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self._answers = list(answers)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((dict(request.headers), await request.json()))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer.status == SLOW:
            await asyncio.sleep(5)
        return web.Response(body=answer.body, status=answer.status, headers={k: v for k, v in answer.headers.items() if k == "Location"})


@asynccontextmanager
async def serving(service: RewardService) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/score", service.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/score"
    finally:
        await runner.cleanup()


async def ask(service: RewardService, *, timeout_s: float = 5.0) -> Verdict:
    async with serving(service) as url, aiohttp.ClientSession() as http:
        verifier = {"url": url, "headers": {"X-Key": "k"}, "timeout_s": timeout_s}
        task = TaskSpec.model_validate({"task_id": "t/1", "messages": MESSAGES[:1], "verifier": verifier, "metadata": {"gold": 4}})
        return await verify(task, sandbox=None, open_fresh=_no_sandbox, trajectory_messages=MESSAGES, http=http, stop_reason="answered")


def _no_sandbox() -> Any:
    raise AssertionError("a reward service needs no sandbox")


def says(body: str, status: int = 200, **headers: str) -> web.Response:
    return web.Response(body=body.encode(), status=status, headers=headers)


async def test_the_service_gets_the_trajectory_and_gives_the_reward() -> None:
    service = RewardService(says('{"reward": 0.75, "why": "good"}'))
    assert await ask(service) == Verdict(0.75, {"why": "good"})
    headers, sent = service.asked[0]
    assert headers["X-Key"] == "k"
    assert sent == {"task_id": "t/1", "stop_reason": "answered", "messages": MESSAGES, "metadata": {"gold": 4}}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(says("no such task", 404), id="4xx"),
        pytest.param(says("", 302, Location="http://127.0.0.1:1/elsewhere"), id="redirects-are-not-followed"),
        pytest.param(says('{"reward": null}'), id="null"),
        pytest.param(says('{"reward": true}'), id="bool"),
        pytest.param(says("[1]"), id="list"),
    ],
)
async def test_a_refusal_is_a_fault_of_the_task_and_asked_once(answer: web.Response) -> None:
    service = RewardService(answer)
    with pytest.raises(TaskFaultError):
        await ask(service)
    assert len(service.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(says("busy", 429), id="429"),
        pytest.param(says("oops", 500), id="5xx"),
        pytest.param(says("<html>", 200), id="no-json"),
        pytest.param(says('{"reward": NaN}'), id="nan"),
        pytest.param(says('{"reward": 1, "x": "' + "x" * MAX_ANSWER_BYTES + '"}'), id="too-large"),
    ],
)
async def test_a_failing_service_is_asked_again(answer: web.Response) -> None:
    service = RewardService(answer, says('{"reward": 1}'))
    assert (await ask(service)).reward == 1.0
    assert len(service.asked) == 2


async def test_a_slow_service_is_infrastructure() -> None:
    service = RewardService(says("", SLOW))
    with pytest.raises(VerifierUnavailableError, match="did not answer within"):
        await ask(service, timeout_s=0.05)
    assert len(service.asked) == 4


async def test_no_verifier_leaves_the_reward_to_the_trainer() -> None:
    task = TaskSpec.model_validate({"task_id": "t", "messages": MESSAGES[:1]})
    async with aiohttp.ClientSession() as http:
        verdict = await verify(task, sandbox=None, open_fresh=_no_sandbox, trajectory_messages=MESSAGES, http=http)
    assert verdict == Verdict(None, {})
    assert json.dumps(verdict.detail) == "{}"
