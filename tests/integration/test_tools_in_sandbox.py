"""The tools in real sandboxes, one for all tests of a backend."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from sandboxes.base import Sandbox, SandboxError
from sandboxes.docker import DockerBackend
from sandboxes.process import ProcessBackend
from service.journal import Call, Observed
from service.records import TaskSpec
from workers.tools import run_call, sandbox_spec

pytestmark = pytest.mark.asyncio(loop_scope="module")

TASK = TaskSpec.model_validate(
    {
        "task_id": "t",
        "messages": [{"role": "user", "content": "do it"}],
        "tools": [
            "bash",
            "edit_file",
            "submit",
            {"type": "function", "function": {"name": "count"}, "run": {"argv": ["sh", "-c", 'pwd; wc -c; echo "$0" >&2', "a b"]}},
            {"type": "function", "function": {"name": "missing"}, "run": {"argv": ["/no/such/tool"]}},
        ],
        "sandbox": {"files": {"/work/a.txt": "one two\n"}, "memory_mib": 64, "disk_mib": 64},
        "limits": {"tool_s": 20.0, "tool_output_bytes": 4096},
    }
)


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("process", marks=pytest.mark.process)],
)
async def sandbox(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sandbox]:
    backend = backend_of(request.param, tmp_path_factory.mktemp("boxes"))
    try:
        await backend.ping()
    except SandboxError as error:
        await backend.aclose()
        pytest.skip(f"no {request.param} backend here: {error}")
    box = await backend.create(sandbox_spec(TASK, labels={"job": "tools"}, start_s=60), name=f"rw-tools-{uuid4().hex[:12]}")
    try:
        yield box
    finally:
        await box.destroy()
        await backend.aclose()


def backend_of(name: str, root: Path) -> DockerBackend | ProcessBackend:
    deployment = f"test-{uuid4().hex[:8]}"
    return DockerBackend(deployment_id=deployment) if name == "docker" else ProcessBackend(deployment_id=deployment, root=root)


async def call(sandbox: Sandbox, tool: str, timeout_s: float | None = None, **arguments: Any) -> Observed:
    return await run_call(sandbox, TASK, Call(id="c", name=tool, arguments=json.dumps(arguments)), timeout_s=timeout_s)


async def bash(sandbox: Sandbox, command: str, timeout_s: float | None = None) -> str:
    return (await call(sandbox, "bash", timeout_s, command=command)).text


async def test_state_lasts_between_bash_calls(sandbox: Sandbox) -> None:
    assert await bash(sandbox, "cd /tmp; export A=b; f() { echo f; }") == "[no output]"
    assert await bash(sandbox, 'pwd; echo "$A"; f') == "/tmp\nb\nf\n"
    assert await bash(sandbox, "cd /work; echo out; echo err >&2; (exit 3)") == "out\nerr\n[exit code 3]"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param("printf 'ok\\377\\360end\\n'", "ok\ufffd\ufffdend\n", id="case-020"),
        pytest.param("sleep 45 & echo started", "started\n", id="case-026"),
        pytest.param("read -r answer; echo rc=$? answer=[$answer]", "rc=1 answer=[]\n", id="case-028"),
        pytest.param("no-such-command 2>/dev/null", "[exit code 127]", id="not-found"),
        pytest.param("python3 -c 'import sys; sys.exit(\"why\")'", "why\n[exit code 1]", id="stderr"),
    ],
)
async def test_what_commands_show(sandbox: Sandbox, command: str, expected: str) -> None:
    assert await bash(sandbox, command) == expected


async def test_endless_output_is_bounded_case_021(sandbox: Sandbox) -> None:
    text = await bash(sandbox, "yes 0123456789012345678901234567890123456789", timeout_s=2)
    assert len(text.encode()) < 4096 + 200
    assert "bytes omitted ...]" in text
    assert "[output cut to 4096 bytes]" in text
    assert await bash(sandbox, "pgrep -x yes | wc -l") == "0\n"


async def test_a_long_log_keeps_its_tail_case_022(sandbox: Sandbox) -> None:
    text = await bash(sandbox, "seq -f 'line %g' 20000; echo FAILED tests/test_x.py::test_y; (exit 3)")
    assert text.startswith("line 1\n")
    assert "FAILED tests/test_x.py::test_y\n[output cut to 4096 bytes]\n[exit code 3]" in text


async def test_a_timeout_keeps_what_came_and_ends_the_rest_case_027(sandbox: Sandbox) -> None:
    observed = await call(sandbox, "bash", 1.0, command="echo one; sh -c 'sleep 977 & sleep 978'; echo never")
    assert observed.text == "one\n[timed out after 1 s; everything it started was ended]\n[the next command gets a new shell]"
    assert observed.failed
    assert await bash(sandbox, "pgrep -f 'sleep 97[78]' | wc -l") == "0\n"


async def test_a_kill_for_memory_is_told_case_038(sandbox: Sandbox) -> None:
    text = await bash(sandbox, "head -c 300m /dev/zero | tail > /dev/null; echo rc=$?")
    assert text.startswith("rc=137\n")
    assert "[killed for memory" in text


async def test_a_kill_for_disk_is_told_and_can_be_cured(sandbox: Sandbox) -> None:
    text = await bash(sandbox, "mkdir /work/full; for i in $(seq 100); do head -c 4m /dev/zero > /work/full/$i; sleep 0.1; done")
    assert "[killed: the sandbox's files outgrew its disk limit; remove some]" in text
    assert await bash(sandbox, "rm -r /work/full; echo well") == "well\n"


async def test_custom_tools_get_json_on_stdin(sandbox: Sandbox) -> None:
    size = len(json.dumps({"text": "$(touch /tmp/pwned)"}))
    assert (await call(sandbox, "count", text="$(touch /tmp/pwned)")).text == f"/work\n{size}\na b\n"
    assert await bash(sandbox, "ls /tmp/pwned 2>/dev/null") == "[exit code 2]"


async def test_a_missing_custom_tool_is_an_observation(sandbox: Sandbox) -> None:
    observed = await call(sandbox, "missing")
    assert observed.text.endswith("[exit code 127]")


async def test_tools_still_run_where_the_workdir_is_gone(sandbox: Sandbox) -> None:
    await bash(sandbox, "cp -r /work /keep; cd /; rm -rf /work/* /work/.[!.]*; rmdir /work; true")
    try:
        assert (await call(sandbox, "count")).text.startswith("/work\n")
        assert (await call(sandbox, "edit_file", path="new.txt", new_text="x")).text == "created /work/new.txt (1 bytes)"
    finally:
        await bash(sandbox, "mkdir -p /work; cp -r /keep/. /work; rm -rf /keep /work/new.txt; cd /work")


async def test_edit_file_writes_and_replaces(sandbox: Sandbox) -> None:
    assert (await call(sandbox, "edit_file", path="d/e/f.sh", new_text="echo é\n")).text == "created /work/d/e/f.sh (8 bytes)"
    await bash(sandbox, "chmod 751 /work/d/e/f.sh")
    done = await call(sandbox, "edit_file", path="/work/d/e/f.sh", old_text="é", new_text="$HOME 'x'")
    assert (done.text, done.failed) == ("replaced 1 passage in /work/d/e/f.sh", False)
    assert await bash(sandbox, "cat d/e/f.sh; stat -c %a d/e/f.sh; ls -A d/e") == "echo $HOME 'x'\n751\nf.sh\n"
    assert (await call(sandbox, "edit_file", path="d/e/f.sh", new_text="")).text == "wrote /work/d/e/f.sh (0 bytes)"
    assert await bash(sandbox, "stat -c '%s %a' d/e/f.sh") == "0 751\n"


async def test_edit_file_writes_large_content_case_031(sandbox: Sandbox) -> None:
    for size in (98_304, 131_072, 1_048_576):
        assert not (await call(sandbox, "edit_file", path="/tmp/big", new_text="x" * size)).failed
        assert await bash(sandbox, "wc -c < /tmp/big") == f"{size}\n"


@pytest.mark.parametrize(
    ("prepare", "path", "words"),
    [
        pytest.param("ln -sf /etc/passwd /work/link", "link", "is a symbolic link to /etc/passwd", id="link"),
        pytest.param("ln -sfn /nowhere /work/dangling", "dangling", "is a symbolic link to /nowhere", id="dangling-link"),
        pytest.param("mkdir -p /work/dir", "dir", "is a directory", id="directory"),
        pytest.param("rm -f /work/fifo; mkfifo /work/fifo", "fifo", "is not a regular file", id="fifo"),
        pytest.param("true", "none.txt", "does not exist", id="missing"),
        pytest.param("echo x x > /work/xx", "xx", "occurs 2 times", id="twice"),
        pytest.param("head -c 2000000 /dev/zero > /tmp/large", "/tmp/large", "larger than 1048576 bytes", id="large"),
    ],
)
async def test_edit_file_refuses(sandbox: Sandbox, prepare: str, path: str, words: str) -> None:
    await bash(sandbox, prepare)
    observed = await call(sandbox, "edit_file", path=path, old_text="x", new_text="y")
    assert words in observed.text
    assert observed.failed


async def test_a_write_that_fails_is_an_observation(sandbox: Sandbox) -> None:
    observed = await call(sandbox, "edit_file", path="/proc/none/x", new_text="y")
    assert observed.text.startswith("Error: /proc/none/x could not be written: ")
    assert observed.failed
