"""HumanEval's verifier in real sandboxes: what the agent leaves in one is scored in a fresh one."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest

from sandboxes.base import Sandbox, SandboxBackend, SandboxSpec
from sandboxes.docker import DockerBackend
from sandboxes.process import ProcessBackend
from service.humaneval.mutants import cheats, solution
from service.humaneval.tasks import SOLUTION, problems, task
from service.records import TaskSpec
from workers.tools import sandbox_spec
from workers.verifier import Verdict, verify

FIRST, *_ = problems(1)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("process", marks=pytest.mark.process)])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SandboxBackend]:
    deployment = f"test-{uuid4().hex[:8]}"
    made: SandboxBackend
    if request.param == "docker":
        made = DockerBackend(deployment_id=deployment)
    else:
        made = ProcessBackend(deployment_id=deployment, root=tmp_path)
    yield made
    await made.sweep(keep=frozenset(), older_than_s=0.0)
    await made.aclose()


class Rooms:
    """Sandboxes of one task, each destroyed when it is left."""

    def __init__(self, backend: SandboxBackend, spec: SandboxSpec) -> None:
        self._backend = backend
        self._spec = spec

    def open(self) -> AbstractAsyncContextManager[Sandbox]:
        return self._backend.open(self._spec, name=f"rw-{uuid4().hex[:12]}")


async def scored(backend: SandboxBackend, submission: str | None) -> Verdict:
    """What the verifier says of `submission`; None: the agent removed the file."""
    spec = TaskSpec.model_validate(task(FIRST))
    rooms = Rooms(backend, sandbox_spec(spec, labels={}, start_s=60.0))
    async with aiohttp.ClientSession() as http, rooms.open() as agent:
        if submission is None:
            await agent.exec(["rm", SOLUTION], timeout_s=10.0, max_output_bytes=1024)
        else:
            await agent.put({SOLUTION: submission.encode()})
        return await verify(spec, sandbox=agent, open_fresh=rooms.open, trajectory_messages=[], http=http)


async def test_the_right_answer_gets_1(backend: SandboxBackend) -> None:
    verdict = await scored(backend, solution(FIRST))
    assert verdict.reward == 1.0, verdict.detail


ATTACKS = {
    "nothing written": FIRST.prompt,
    **cheats(FIRST),
    "kills the judge": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n" + FIRST.prompt,
    "reads the tests": "import glob\nassert 'candidate' in open('/verify/tests.py').read()\n" + solution(FIRST),
    "reads the judge's memory": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')\n" + solution(FIRST),
    "file removed": None,
}


async def test_nothing_else_does(backend: SandboxBackend) -> None:
    for name, submission in ATTACKS.items():
        verdict = await scored(backend, submission)
        assert verdict.reward == 0.0, (name, verdict.detail)
