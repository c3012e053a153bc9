"""What the model is shown, and how a call finds its tool. No sandbox but a scripted one."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.base import MARKER, MAX_OUTPUT_BYTES, ExecResult, Sandbox, SandboxError, SandboxLostError
from service.journal import Call
from service.records import TaskSpec
from workers.commands import Steps, within
from workers.edit_file import Edit, EditRefusedError, edit_file, replace_once, resolve
from workers.observations import MAX_ERROR_CHARS, call_error_text, clip, command_text, cut_middle, valid_utf8
from workers.tools import error_observation, run_call, sandbox_spec, tool_names, tool_specs


def ran(stdout: bytes = b"", stderr: bytes = b"", exit_code: int | None = 0, **more: Any) -> ExecResult:
    return ExecResult(exit_code=exit_code, stdout=stdout, stderr=stderr, seconds=0.1, **more)


class ScriptedSandbox(Sandbox):
    """Answers each `exec` with the next result, or raises it; remembers what it was asked."""

    def __init__(self, *answers: ExecResult | SandboxError) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answers = list(answers)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        max_output_bytes: int,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        session: str | None = None,
        call_id: str | None = None,
    ) -> ExecResult:
        self.asked.append(
            {"argv": list(argv), "timeout_s": timeout_s, "stdin": stdin, "session": session, "workdir": workdir, "call_id": call_id}
        )
        answer = self._answers.pop(0)
        if isinstance(answer, SandboxError):
            raise answer
        return answer


def task(**fields: Any) -> TaskSpec:
    return TaskSpec.model_validate({"task_id": "t", "messages": [{"role": "user", "content": "do it"}], **fields})


CUSTOM = {"type": "function", "function": {"name": "lint", "description": "Check it."}, "run": {"argv": ["/tools/lint", "--json"]}}


# ------------------------------------------------------------------------------------------------------------- what is shown


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        pytest.param(ran(b"hi\n"), "hi\n", id="plain"),
        pytest.param(ran(), "[no output]", id="nothing"),
        pytest.param(ran(b"ok\xff\xf0end\n"), "ok\ufffd\ufffdend\n", id="case-020-no-utf8"),
        pytest.param(ran(b"out", b"err"), "out\nerr", id="stdout-then-stderr"),
        pytest.param(ran(b"", b"err\n", 3), "err\n[exit code 3]", id="exit-code"),
        pytest.param(ran(exit_code=1), "[exit code 1]", id="only-a-status"),
        pytest.param(
            ran(b"one\n", exit_code=None, timed_out=True),
            "one\n[timed out after 2.5 s; everything it started was ended]",
            id="case-030-timeout",
        ),
        pytest.param(
            ran(b"rc=137\n", oom_killed=True),
            "rc=137\n[killed for memory: a process went over the sandbox's memory limit]",
            id="case-038-oom",
        ),
        pytest.param(
            ran(b"x\n", exit_code=137, disk_full=True),
            "x\n[killed: the sandbox's files outgrew its disk limit; remove some]\n[exit code 137]",
            id="disk-full",
        ),
        pytest.param(ran(b"x\n", exit_code=2, truncated=True), "x\n[output cut to 100 bytes]\n[exit code 2]", id="cut-by-the-sandbox"),
    ],
)
def test_command_text(result: ExecResult, expected: str) -> None:
    assert command_text(result, timeout_s=2.5, max_bytes=100) == expected


def test_a_long_log_keeps_head_and_tail_and_says_what_is_missing() -> None:
    log = b"".join(b"line %d\n" % n for n in range(5000))
    text = command_text(ran(log, b"FAILED test_y\n", 3), timeout_s=1, max_bytes=1000)
    assert text.startswith("line 0\n")
    assert "line 4999\n" in text
    assert "FAILED test_y\n[output cut to 1000 bytes]\n[exit code 3]" in text
    head, tail = text.split("\n[... ")[0], text.split("omitted ...]\n")[1].split("FAILED")[0]
    assert f"[... {len(log) - len(head) - len(tail)} bytes omitted ...]" in text


def test_a_second_cut_keeps_the_count_true() -> None:
    already = b"a" * 500 + MARKER.format(omitted=10_000).encode() + b"b" * 500
    cut = cut_middle(already, max_bytes=400).decode()
    head, tail = cut.count("a"), cut.count("b") - len("bytes"[:1])
    assert f"[... {11_000 - head - tail} bytes omitted ...]" in cut


@given(st.binary(max_size=3000), st.binary(max_size=3000), st.integers(64, 2000), st.booleans())
def test_the_text_is_bounded_whatever_was_printed(stdout: bytes, stderr: bytes, max_bytes: int, truncated: bool) -> None:
    text = command_text(ran(stdout, stderr, 1, truncated=truncated), timeout_s=1, max_bytes=max_bytes)
    status = "\n[output cut to 2000 bytes]\n[exit code 1]"
    assert len(text.encode()) <= max_bytes + len(status) + 2


@given(st.text(max_size=500), st.integers(0, 600))
def test_a_cut_is_valid_and_bounded(text: str, max_bytes: int) -> None:
    data = valid_utf8(text.encode(errors="replace"))
    cut = cut_middle(data, max_bytes=max_bytes)
    cut.decode()
    assert len(cut) <= max_bytes or cut == data
    assert cut == data or len(data) > max_bytes


# -------------------------------------------------------------------------------------------------- calls not understood


@pytest.mark.parametrize(
    ("error", "words"),
    [
        pytest.param("bad_json: Expecting ',' at 12", "not valid JSON", id="case-009"),
        pytest.param("not_object", "one JSON object", id="case-013-list"),
        pytest.param("missing_argument: command", "command", id="case-013-missing"),
        pytest.param("not_a_call", "no tool call", id="case-013-number"),
        pytest.param("truncated", "length limit", id="truncated"),
        pytest.param("something_new: odd", "something_new: odd", id="any-other-code"),
    ],
)
def test_error_observation_names_what_was_wrong(error: str, words: str) -> None:
    observed = error_observation(task(tools=["bash"]), Call(id="c1", name="bash", arguments=None, error=error))
    assert words in observed.text
    assert "Tools: bash." in observed.text
    assert (observed.call_id, observed.name, observed.failed) == ("c1", "bash", True)


def test_an_unknown_tool_is_told_the_tools_case_014() -> None:
    observed = error_observation(task(tools=["bash", "submit"]), Call(id="c", name="bashbash", arguments="{}", error="unknown_tool"))
    assert "'bashbash'" in observed.text
    assert "Tools: bash, submit." in observed.text
    assert observed.name == "unknown"  # what the model invents is no label


@given(st.text(), st.text(max_size=5000), st.lists(st.text(max_size=100), max_size=128))
def test_error_texts_are_bounded(name: str, error: str, tools: list[str]) -> None:
    text = call_error_text(error, name=name, tools=tools)
    assert len(text) <= MAX_ERROR_CHARS
    text.encode()


def test_clip_replaces_lone_surrogates() -> None:
    assert clip("a\ud800b", 10) == "a?b"
    assert clip("abcdef", 3) == "ab…"


# ------------------------------------------------------------------------------------------------------------------- calls


def test_tool_specs_are_in_the_tasks_order() -> None:
    specs = tool_specs(task(tools=["submit", CUSTOM, "bash"]))
    assert [spec["function"]["name"] for spec in specs] == ["submit", "lint", "bash"] == tool_names(task(tools=["submit", CUSTOM, "bash"]))
    assert specs[1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert all(spec["type"] == "function" and set(spec) == {"type", "function"} for spec in specs)


def test_sandbox_spec_carries_every_field() -> None:
    given = {"image": "i:1", "files": {"/work/é.txt": "é"}, "setup": ["true"], "workdir": "/w", "network": "open", "cpus": 2.0}
    given |= {"user": "1000:1000"}
    given |= {"memory_mib": 64, "pids": 9, "disk_mib": 17, "env": {"A": "b"}, "read_only": True, "runtime": "runsc"}
    spec = sandbox_spec(task(sandbox=given), labels={"job": "j1"}, start_s=7.0)
    assert spec.files == {"/work/é.txt": "é".encode()}
    assert (spec.image, spec.setup, spec.workdir, spec.network, spec.cpus) == ("i:1", ("true",), "/w", "open", 2.0)
    assert spec.user == "1000:1000"
    assert (spec.memory_mib, spec.pids, spec.disk_mib, spec.env, spec.read_only, spec.runtime) == (64, 9, 17, {"A": "b"}, True, "runsc")
    assert (spec.labels, spec.start_s) == ({"job": "j1"}, 7.0)


async def test_bash_runs_in_the_lasting_shell() -> None:
    sandbox = ScriptedSandbox(ran(b"hi\n", exit_code=3))
    call = Call(id="c", name="bash", arguments='{"command": "echo hi; exit 3"}')
    observed = await run_call(sandbox, task(tools=["bash"], limits={"tool_s": 5.0}), call)
    assert (observed.text, observed.failed, observed.submitted) == ("hi\n[exit code 3]", True, False)
    assert sandbox.asked == [
        {
            "argv": ["bash", "-c", "echo hi; exit 3"],
            "timeout_s": 5.0,
            "stdin": None,
            "session": "main",
            "workdir": None,
            "call_id": None,
        }
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "answers", "expected"),
    [
        pytest.param("bash", {"command": "true"}, [ran()], ["r/a1/c/shell"], id="bash"),
        pytest.param("lint", {}, [ran()], ["r/a1/c/run"], id="custom"),
        pytest.param("edit_file", {"path": "f", "new_text": "x"}, [ran(exit_code=92), ran()], ["r/a1/c/read", "r/a1/c/write"], id="edit"),
    ],
)
async def test_each_step_of_a_call_has_an_id_of_its_own_case_065(
    name: str, arguments: dict[str, str], answers: list[ExecResult], expected: list[str]
) -> None:
    sandbox = ScriptedSandbox(*answers)
    call = Call(id="c", name=name, arguments=json.dumps(arguments))
    observed = await run_call(sandbox, task(tools=["bash", "edit_file", CUSTOM]), call, call_id="r/a1/c")
    assert [asked["call_id"] for asked in sandbox.asked] == expected
    assert observed.seconds == pytest.approx(0.1 * len(expected))  # the sandbox's own, so a call asked again costs no more


def test_a_tools_output_fits_what_a_sandbox_keeps() -> None:
    largest = {"limits": {"tool_output_bytes": 10_000_000}}
    assert task(**largest).limits.tool_output_bytes <= MAX_OUTPUT_BYTES


async def test_a_custom_tool_gets_its_arguments_on_stdin() -> None:
    sandbox = ScriptedSandbox(ran(b"fine"))
    arguments = json.dumps({"x": "$(reboot)'\""})
    observed = await run_call(sandbox, task(tools=[CUSTOM]), Call(id="c", name="lint", arguments=arguments))
    assert observed.text == "fine"
    asked = sandbox.asked[0]
    assert asked["stdin"] == arguments.encode()
    assert asked["argv"][-3:] == ["/work", "/tools/lint", "--json"]
    assert not any("reboot" in word for word in asked["argv"])
    assert asked["session"] is None


async def test_submit_ends_the_rollout() -> None:
    observed = await run_call(ScriptedSandbox(), task(tools=["submit"]), Call(id="c", name="submit", arguments='{"answer": "42"}'))
    assert observed.submitted
    assert not observed.failed


async def test_a_custom_tool_named_submit_is_no_submission() -> None:
    tool = {"type": "function", "function": {"name": "submit"}, "run": {"argv": ["true"]}}
    observed = await run_call(ScriptedSandbox(ran()), task(tools=[tool]), Call(id="c", name="submit", arguments="{}"))
    assert not observed.submitted


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(Call(id="c", name="python", arguments="{}"), "no tool named 'python'", id="unknown"),
        pytest.param(Call(id="c", name="bash", arguments=None, error="bad_json"), "not valid JSON", id="never-run"),
        pytest.param(Call(id="c", name="bash", arguments="{}"), "missing", id="no-command"),
        pytest.param(Call(id="c", name="bash", arguments='{"command": "a\\u0000b"}'), "NUL", id="nul"),
        pytest.param(Call(id="c", name="bash", arguments=json.dumps({"command": "x" * 130_000})), "longer than", id="too-long"),
    ],
)
async def test_what_cannot_run_is_an_observation(call: Call, words: str) -> None:
    sandbox = ScriptedSandbox()
    observed = await run_call(sandbox, task(tools=["bash"]), call)
    assert words in observed.text
    assert observed.failed
    assert sandbox.asked == []


async def test_a_lost_sandbox_is_no_observation() -> None:
    sandbox = ScriptedSandbox(SandboxLostError("gone"))
    with pytest.raises(SandboxLostError):
        await run_call(sandbox, task(tools=["bash"]), Call(id="c", name="bash", arguments='{"command": "true"}'))


async def test_a_silent_backend_is_an_error_of_the_sandbox_case_029() -> None:
    with pytest.raises(SandboxError, match="did not answer"):
        async with asyncio.timeout(8):
            await within(0.001, asyncio.Event().wait(), what="it")


async def test_an_inner_timeout_is_not_taken_for_the_bound() -> None:
    async def fails() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await within(10, fails(), what="it")


# --------------------------------------------------------------------------------------------------------------- edit_file


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param("a.py", "/work/a.py", id="relative"),
        pytest.param("./d/../a.py", "/work/a.py", id="dots"),
        pytest.param("../../../etc/passwd", "/etc/passwd", id="stays-in-the-sandbox"),
        pytest.param("//tmp/x", "/tmp/x", id="two-slashes"),
    ],
)
def test_resolve(path: str, expected: str) -> None:
    assert resolve(path, workdir="/work") == expected


@pytest.mark.parametrize("path", ["", "a\x00b", "x" * 5000, "d/"])
def test_resolve_refuses(path: str) -> None:
    with pytest.raises(EditRefusedError):
        resolve(path, workdir="/work")


@pytest.mark.parametrize(
    ("content", "old", "words"),
    [
        pytest.param(b"abc", b"x", "occurs 0 times", id="absent"),
        pytest.param(b"x y x", b"x", "occurs 2 times", id="twice"),
        pytest.param(b"aaa", b"aa", "occurs 2 times", id="overlapping"),
        pytest.param(b"abc", b"", "empty", id="empty"),
        pytest.param(b"\xff abc", b"abc", "not UTF-8", id="binary"),
    ],
)
def test_replace_once_refuses(content: bytes, old: bytes, words: str) -> None:
    with pytest.raises(EditRefusedError, match=words):
        replace_once(content, old, b"new", path="/f")


@given(st.text(alphabet="abé\n"), st.text(alphabet="xy", min_size=1), st.text(), st.text(alphabet="abé\n"))
def test_a_single_occurrence_is_replaced_and_nothing_else(before: str, old: str, new: str, after: str) -> None:
    done = replace_once((before + old + after).encode(), old.encode(), new.encode(), path="/f")
    assert done.decode() == before + new + after


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        pytest.param([ran(b"/etc/passwd\n", exit_code=90)], "symbolic link to /etc/passwd", id="link"),
        pytest.param([ran(exit_code=91)], "is a directory", id="directory"),
        pytest.param([ran(exit_code=92)], "does not exist", id="missing"),
        pytest.param([ran(exit_code=93)], "not a regular file", id="fifo"),
        pytest.param([ran(b"x" * 1_048_577)], "larger than", id="large"),
        pytest.param([ran(b"", b"head: cannot open", 1)], "cannot open", id="unreadable"),
        pytest.param([ran(b"old"), ran(b"", b"No space left on device", 1)], "No space left", id="full-disk"),
        pytest.param([ran(b"old"), ran(exit_code=None, timed_out=True)], "timed out after 5 s", id="timeout"),
        pytest.param([ran(b"old"), ran(exit_code=137, disk_full=True)], "outgrew its disk limit", id="killed-for-disk"),
    ],
)
async def test_edits_that_are_refused(answers: list[ExecResult], words: str) -> None:
    edit = Edit(path="f", old_text="old", new_text="new")
    with pytest.raises(EditRefusedError, match=words):
        await edit_file(Steps(ScriptedSandbox(*answers), None, 5), edit, workdir="/work")


async def test_a_shell_per_call_is_a_program_of_its_own_and_the_tool_says_so() -> None:
    wanted = task(tools=["bash"], sandbox={"shell": "per_call", "workdir": "/w"})
    sandbox = ScriptedSandbox(ran(exit_code=None, timed_out=True))
    observed = await run_call(sandbox, wanted, Call(id="c", name="bash", arguments='{"command":"x=1"}'), call_id="r/a1/c")
    (asked,) = sandbox.asked
    assert (asked["argv"][-4:], asked["session"], asked["call_id"]) == (["/w", "bash", "-c", "x=1"], None, "r/a1/c/shell")
    assert "new shell" not in observed.text  # every call has one
    per_call, lasting = (tool_specs(each)[0]["function"]["description"] for each in (wanted, task(tools=["bash"])))
    assert "directory and variables do not" in per_call
    assert "variables and background jobs last" in lasting
