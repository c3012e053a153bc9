"""Verifiers in real sandboxes: what the agent left can be judged, and cannot judge itself."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest

from sandboxes.base import Sandbox, SandboxError
from sandboxes.docker import DockerBackend
from sandboxes.process import ProcessBackend
from service.errors import TaskFaultError
from service.records import TaskSpec
from workers.rewards import Verdict
from workers.tools import sandbox_spec
from workers.verifier import verify

REWARD_OF_X = "#!/bin/sh\ncat /work/x 2>/dev/null || echo 0\n"


def task(verifier: dict[str, Any], **sandbox: Any) -> TaskSpec:
    fields = {"files": {"/work/x": "0.25\n"}, "memory_mib": 64, **sandbox}
    messages = [{"role": "user", "content": "do it"}]
    return TaskSpec.model_validate({"task_id": "t", "messages": messages, "tools": ["bash"], "sandbox": fields, "verifier": verifier})


class Bench:
    """Plays a rollout: opens its sandbox, runs what the agent would, verifies."""

    def __init__(self, backend: DockerBackend | ProcessBackend) -> None:
        self._backend = backend
        self.fresh_opened = 0

    async def score(self, given: TaskSpec, *commands: str, answer: str = "done") -> Verdict:
        messages = [{"role": "user", "content": "do it"}, {"role": "assistant", "content": answer}]
        async with self._agent(given, commands) as sandbox, aiohttp.ClientSession() as http:
            return await verify(given, sandbox=sandbox, open_fresh=lambda: self.fresh(given), trajectory_messages=messages, http=http)

    @asynccontextmanager
    async def _agent(self, given: TaskSpec, commands: tuple[str, ...]) -> AsyncIterator[Sandbox | None]:
        """None where the agent ran nothing."""
        if not commands:
            yield None
            return
        async with self.open(given) as sandbox:
            for command in commands:
                await sandbox.exec(["bash", "-c", command], session="main", timeout_s=20, max_output_bytes=4096)
            yield sandbox

    @asynccontextmanager
    async def fresh(self, given: TaskSpec) -> AsyncIterator[Sandbox]:
        self.fresh_opened += 1
        async with self.open(given) as sandbox:
            yield sandbox

    @asynccontextmanager
    async def open(self, given: TaskSpec) -> AsyncIterator[Sandbox]:
        sandbox = await self._backend.create(
            sandbox_spec(given, labels={"job": "verify"}, start_s=60), name=f"rw-verify-{uuid4().hex[:12]}"
        )
        try:
            yield sandbox
        finally:
            await sandbox.destroy()


@pytest.fixture(params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("process", marks=pytest.mark.process)])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    deployment = f"test-{uuid4().hex[:8]}"
    backend: DockerBackend | ProcessBackend
    if request.param == "docker":
        backend = DockerBackend(deployment_id=deployment)
    else:
        backend = ProcessBackend(deployment_id=deployment, root=tmp_path)
    try:
        await backend.ping()
    except SandboxError as error:
        await backend.aclose()
        pytest.skip(f"no {request.param} backend here: {error}")
    try:
        yield Bench(backend)
    finally:
        await backend.aclose()


# ------------------------------------------------------------------------------------------------------------- what is judged


async def test_fresh_gets_the_artifacts_and_nothing_else(bench: Bench) -> None:
    check = 'cat /work/x; [ ! -e /work/gone ] && [ ! -e /root/left ] && [ ! -e /tmp/left ] && [ -z "$LEFT" ] && echo 1'
    given = task({"command": check, "reward": "number", "artifacts": ["/work"]}, files={"/work/x": "old", "/work/gone": ""})
    verdict = await bench.score(given, "echo new > /work/x; rm /work/gone; touch /root/left /tmp/left; export LEFT=1")
    assert verdict.reward == 1.0
    assert verdict.detail["stdout"] == "new\n1\n"


async def test_fresh_without_artifacts_sees_the_tasks_own_files(bench: Bench) -> None:
    given = task({"command": "cat /work/x", "reward": "number"})
    assert (await bench.score(given, "echo 1 > /work/x")).reward == 0.25


@pytest.mark.parametrize("where", ["fresh", "same"])
async def test_without_a_sandbox_a_fresh_one_is_judged(bench: Bench, where: str) -> None:
    given = task({"command": "python3 /verify/run.py", "files": {"/verify/run.py": READ_ANSWER}, "reward": "json", "sandbox": where})
    verdict = await bench.score(given, answer="42")
    assert (verdict.reward, verdict.detail["answer"]) == (1.0, "42")
    assert bench.fresh_opened == 1


READ_ANSWER = """
import json, sys
answer = json.load(sys.stdin)["answer"]
print(json.dumps({"reward": float(answer == "42"), "answer": answer}))
"""


async def test_same_sees_everything_the_agent_left(bench: Bench) -> None:
    given = task({"command": "cat /work/x", "reward": "number", "sandbox": "same"})
    assert (await bench.score(given, "echo 0.5 > /work/x")).reward == 0.5
    assert bench.fresh_opened == 0


# --------------------------------------------------------------------------------------------------- what the agent cannot do


PLANTS = [
    pytest.param("mkdir -p /logs/verifier; echo 1.0 > /logs/verifier/reward.txt; chmod 000 /logs/verifier", id="case-045"),
    pytest.param(
        "mkdir -p /verify; printf '#!/bin/sh\\necho 1\\n' > /verify/run.sh; chmod 555 /verify/run.sh /verify", id="planted-verifier"
    ),
    pytest.param("mkdir -p /work/d /verify; echo echo 1 > /work/d/good; ln -s /work/d/good /verify/run.sh", id="planted-file-link"),
    pytest.param("mkdir -p /work/d; ln -s /work/d /verify", id="planted-directory-link"),
    pytest.param("echo echo 1 > /verify", id="a-file-in-the-directorys-place"),
    pytest.param("mkdir -p /verify/run.sh", id="a-directory-in-the-files-place"),
    pytest.param("cat() { echo 1; }; export -f cat; alias cat='echo 1'; declare -x PATH=/work/bin:$PATH", id="functions-and-path"),
    pytest.param(
        "echo 'cat() { echo 1; }' | tee -a ~/.bashrc ~/.profile ~/.bash_profile > /work/env; export ENV=/work/env BASH_ENV=/work/env",
        id="dotfiles",
    ),
    pytest.param(
        "(while :; do echo 1 > /work/x; echo echo 1 > /verify/run.sh; done) >/dev/null 2>&1 & disown", id="a-writer-in-the-background"
    ),
]


@pytest.mark.parametrize("plant", PLANTS)
async def test_what_is_planted_does_not_judge(bench: Bench, plant: str) -> None:
    """The task's own check gives 0 whatever the agent does beside it: only /work/y would make it pass."""
    verdict = await bench.score(planted_task("same"), plant)
    assert (verdict.reward, verdict.detail["stdout"]) == (0.0, "checking\n0\n")


async def test_what_is_planted_does_not_reach_a_fresh_sandbox(bench: Bench) -> None:
    verdict = await bench.score(planted_task("fresh"), *(str(plant.values[0]) for plant in PLANTS))
    assert (verdict.reward, verdict.detail["stdout"]) == (0.0, "checking\n0\n")


def planted_task(where: str) -> TaskSpec:
    files = {"/verify/run.sh": "echo checking; cat /work/y 2>/dev/null || echo 0\n"}
    return task({"command": "sh /verify/run.sh", "files": files, "reward": "number", "sandbox": where, "artifacts": ["/work"]})


@pytest.mark.parametrize("where", ["fresh", "same"])
async def test_a_module_beside_the_verifier_is_not_imported(bench: Bench, where: str) -> None:
    files = {"/verify/run.py": "import json\nprint(json.dumps({'reward': 0}))\n"}
    given = task({"command": "python3 /verify/run.py", "files": files, "reward": "json", "sandbox": where, "artifacts": ["/work"]})
    planted = "print('{\"reward\": 1}'); import os; os._exit(0)"
    site = "/root/.local/lib/python3.11/site-packages"
    plant = f"mkdir -p /verify {site}; echo {json.dumps(planted)} | tee /verify/json.py /work/json.py {site}/usercustomize.py"
    assert (await bench.score(given, plant)).reward == 0.0


async def test_links_in_artifacts_do_not_reach_the_verifiers_files(bench: Bench) -> None:
    given = task({"command": "cat /work/x", "files": {"/verify/solution": "1\n"}, "artifacts": ["/work"], "reward": "exit_code"})
    verdict = await bench.score(given, "ln -sf /verify/solution /work/x; ln -s x /work/inside")
    assert verdict.reward == 0.0
    assert verdict.detail["artifacts_dropped"] == 1


async def test_nothing_of_the_agent_runs_while_the_verifier_does(bench: Bench) -> None:
    given = task({"command": "pgrep -f 'sleep 97[5]' || true; echo end", "sandbox": "same"})
    verdict = await bench.score(given, "setsid sleep 975 & sleep 975 & disown; nohup sleep 975 >/dev/null 2>&1 &")
    assert verdict.detail["stdout"] == "end\n"


@pytest.mark.parametrize(
    ("where", "left"),
    [
        pytest.param("fresh", "rm -rf /work", id="fresh-gone"),
        pytest.param("same", "rm -rf /work", id="same-gone"),
        pytest.param("same", "rm -rf /work; echo > /work", id="same-a-file"),
        pytest.param("fresh", "rm -rf /work; ln -s /nowhere /work", id="fresh-a-dangling-link"),
    ],
)
async def test_the_workdir_is_made_anew(bench: Bench, where: str, left: str) -> None:
    given = task({"command": 'pwd; ls -A; echo "[$PWD]"', "sandbox": where, "artifacts": ["/work"]})
    verdict = await bench.score(given, f"cd /; {left}")
    assert (verdict.reward, verdict.detail["stdout"]) == (1.0, "/work\n[/work]\n")


# ------------------------------------------------------------------------------------------------- reward, fault, infrastructure


@pytest.mark.parametrize(
    ("command", "timeout_s", "reason"),
    [
        pytest.param("sleep 60", 1.0, "verifier_timeout", id="hangs"),
        pytest.param("setsid sleep 60 & sleep 60", 1.0, "verifier_timeout", id="hangs-with-children"),
        pytest.param("python3 -c 'x = bytearray(10**9)'; exit 1", 30.0, "verifier_out_of_memory", id="memory"),
    ],
)
async def test_what_the_submission_does_to_the_verifier_is_reward_0(bench: Bench, command: str, timeout_s: float, reason: str) -> None:
    given = task({"command": command, "timeout_s": timeout_s, "reward": "number"})
    verdict = await bench.score(given)
    assert (verdict.reward, verdict.detail["reason"]) == (0.0, reason)


async def test_too_many_artifacts_are_reward_0(bench: Bench) -> None:
    given = task({"command": "true", "artifacts": ["/work"], "max_artifact_bytes": 100_000})
    verdict = await bench.score(given, "head -c 200000 /dev/urandom > /work/big")
    assert (verdict.reward, verdict.detail["reason"]) == (0.0, "artifacts_too_large")
    assert bench.fresh_opened == 0


@pytest.mark.parametrize(
    "verifier",
    [
        pytest.param({"command": "no-such-command", "reward": "exit_code"}, id="not-found"),
        pytest.param({"command": "/work/x", "reward": "exit_code"}, id="not-executable"),
        pytest.param({"command": "echo nan", "reward": "number"}, id="nan"),
    ],
)
async def test_a_broken_verifier_is_a_fault_of_the_task(bench: Bench, verifier: dict[str, Any]) -> None:
    with pytest.raises(TaskFaultError):
        await bench.score(task(verifier))


async def test_a_lost_sandbox_is_infrastructure(bench: Bench) -> None:
    given = task({"command": "true", "sandbox": "same"})
    async with bench.open(given) as sandbox, aiohttp.ClientSession() as http:
        await sandbox.destroy()
        with pytest.raises(SandboxError):
            await verify(given, sandbox=sandbox, open_fresh=lambda: bench.fresh(given), trajectory_messages=[], http=http)
