"""What a verifier's end means: a table, and two properties."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.base import MARKER, ExecResult
from service.errors import TaskFaultError
from service.records import CommandVerifier, TaskSpec
from workers.rewards import MAX_DETAIL_BYTES, RewardKind, judge, reward_object
from workers.verifier import answer_json, own_directories


def ended(stdout: bytes = b"", stderr: bytes = b"", exit_code: int | None = 0, **more: Any) -> ExecResult:
    return ExecResult(exit_code=exit_code, stdout=stdout, stderr=stderr, seconds=1.23456, **more)


CUT = MARKER.format(omitted=9).encode()
TIMED_OUT = ended(b"1.0\n", exit_code=None, timed_out=True)
DISK_FULL = ended(b"1.0\n", exit_code=137, disk_full=True)
OUT_OF_MEMORY = ended(b"1.0\n", exit_code=137, oom_killed=True)


@pytest.mark.parametrize(
    ("kind", "result", "reward", "reason"),
    [
        pytest.param("exit_code", ended(), 1.0, None, id="passes"),
        pytest.param("exit_code", ended(exit_code=1), 0.0, None, id="fails"),
        pytest.param("exit_code", ended(exit_code=139), 0.0, None, id="crashes"),
        pytest.param("exit_code", ended(exit_code=127), 0.0, None, id="127-of-the-program-itself"),
        pytest.param("exit_code", ended(exit_code=0, oom_killed=True), 1.0, None, id="a-child-was-killed-and-the-parent-decided"),
        pytest.param("exit_code", TIMED_OUT, 0.0, "verifier_timeout", id="timeout"),
        pytest.param("exit_code", OUT_OF_MEMORY, 0.0, "verifier_out_of_memory", id="memory"),
        pytest.param("number", DISK_FULL, 0.0, "verifier_disk_full", id="disk"),
        pytest.param("number", ended(b"noise\n0.25\n"), 0.25, None, id="number"),
        pytest.param("number", ended(b"-1.5e1\r\n\n  \n"), -15.0, None, id="number-before-empty-lines"),
        pytest.param("number", ended(b"3"), 3.0, None, id="number-without-newline"),
        pytest.param("number", TIMED_OUT, 0.0, "verifier_timeout", id="number-timeout"),
        pytest.param("number", OUT_OF_MEMORY, 0.0, "verifier_out_of_memory", id="number-memory"),
        pytest.param("number", ended(b"a" * 9 + CUT + b"b\n0.5\n", truncated=True), 0.5, None, id="number-after-a-cut"),
        pytest.param("number", ended(b"0.5\n", b"a" + CUT + b"b", truncated=True), 0.5, None, id="number-and-a-cut-stderr"),
        pytest.param("json", ended(b'noise\n{"reward": 1, "passed": 3}\n'), 1.0, None, id="json-line"),
        pytest.param("json", ended(b'{\n "reward": 0.5\n}\n'), 0.5, None, id="json-over-lines"),
    ],
)
def test_judge(kind: RewardKind, result: ExecResult, reward: float, reason: str | None) -> None:
    verdict = judge(kind, result)
    assert verdict.reward == reward
    assert verdict.detail.get("reason") == reason
    assert verdict.detail["exit_code"] == result.exit_code
    assert verdict.detail["seconds"] == 1.235
    json.dumps(verdict.detail, allow_nan=False)


@pytest.mark.parametrize(
    ("kind", "result", "words"),
    [
        pytest.param("number", ended(), "no finite number", id="nothing"),
        pytest.param("number", ended(b"nan\n"), "no finite number", id="nan"),
        pytest.param("number", ended(b"inf\n"), "no finite number", id="inf"),
        pytest.param("number", ended(b"1e999\n"), "no finite number", id="overflows"),
        pytest.param("number", ended(b"1_000\n"), "no finite number", id="python-only"),
        pytest.param("number", ended("\u0661\n".encode()), "no finite number", id="other-digits"),
        pytest.param("number", ended(b"1.0\nTraceback\n"), "Traceback", id="not-the-last-line"),
        pytest.param("number", ended(b"1.0\n", b"boom", 1), "exited with 1.*boom", id="number-then-crash"),
        pytest.param("number", ended(b"x" + CUT + b"5\n", truncated=True), "no finite number", id="cut-number"),
        pytest.param("json", ended(b"[1]"), "no JSON object", id="list"),
        pytest.param("json", ended(b'{"reward": NaN}'), "no JSON object", id="json-nan"),
        pytest.param("json", ended(b'{"reward": 1e999}'), "no JSON object", id="json-overflow"),
        pytest.param("json", ended(b'{"reward": true}'), "no JSON object", id="json-bool"),
        pytest.param("json", ended(b'{"reward": "1"}'), "no JSON object", id="json-text"),
        pytest.param("json", ended(b"[" * 5000), "no JSON object", id="json-too-deep"),
        pytest.param("exit_code", ended(b"", b"sh: 1: pytest: not found\n", 127), "cannot be run", id="dash-not-found"),
        pytest.param("exit_code", ended(b"", b"sh: line 1: x: command not found\n", 127), "cannot be run", id="bash-not-found"),
        pytest.param("exit_code", ended(b"", b"/bin/sh: 1: /verify/x: Permission denied\n", 126), "cannot be run", id="not-executable"),
    ],
)
def test_a_verifier_without_a_number_is_a_fault_of_the_task(kind: RewardKind, result: ExecResult, words: str) -> None:
    with pytest.raises(TaskFaultError, match=words):
        judge(kind, result)


@given(st.sampled_from(["exit_code", "number", "json"]), st.binary(max_size=200), st.integers(0, 255), st.booleans(), st.booleans())
def test_every_end_is_a_finite_reward_or_a_fault(kind: RewardKind, stdout: bytes, exit_code: int, oom: bool, truncated: bool) -> None:
    try:
        verdict = judge(kind, ended(stdout, exit_code=exit_code, oom_killed=oom, truncated=truncated))
    except TaskFaultError:
        assert kind != "exit_code"
        return
    assert verdict.reward is not None
    assert math.isfinite(verdict.reward)
    json.dumps(verdict.detail, allow_nan=False).encode()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_printed_float_comes_back(reward: float) -> None:
    assert judge("number", ended(f"{reward!r}\n".encode())).reward == reward
    assert judge("json", ended(json.dumps({"reward": reward}).encode())).reward == reward


def test_other_keys_become_the_detail_and_are_bounded() -> None:
    assert reward_object(b'{"reward": 1, "passed": 3}') == (1.0, {"passed": 3})
    found = reward_object(json.dumps({"reward": 1, "log": "x" * MAX_DETAIL_BYTES}))
    assert found is not None
    assert found[1].keys() == {"detail_omitted_bytes"}


def test_outputs_are_kept_by_their_end() -> None:
    detail = judge("exit_code", ended(b"a" * 100_000 + b"the end")).detail
    assert detail["stdout"].endswith("the end")
    assert len(detail["stdout"]) <= 2048


CALL = {"id": "c", "type": "function", "function": {"name": "submit", "arguments": '{"answer": "42"}'}}


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        pytest.param([], None, id="no-reply"),
        pytest.param([{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42"}], "42", id="answered"),
        pytest.param(
            [{"role": "assistant", "content": "so", "tool_calls": [CALL]}, {"role": "tool", "content": "submitted"}], "42", id="submitted"
        ),
        pytest.param([{"role": "assistant", "content": "x", "tool_calls": [{"odd": 1}]}], "x", id="a-clients-own-form"),
        pytest.param(
            [{"role": "assistant", "content": "x", "tool_calls": [CALL]}, {"role": "assistant", "content": "y"}], "y", id="last-wins"
        ),
    ],
)
def test_answer_json(messages: list[dict[str, Any]], answer: str | None) -> None:
    assert json.loads(answer_json(messages)) == {"answer": answer}


@pytest.mark.parametrize(
    ("files", "sandbox", "expected"),
    [
        pytest.param(["/verify/run.py", "/verify/data/x"], {}, ["/verify", "/verify/data"], id="its-own"),
        pytest.param(["/work/tests/test_x.py"], {}, [], id="inside-the-workdir"),
        pytest.param(["/run.py", "/etc/x", "/usr/local/verify/x", "/tmp/x", "/home/me/x"], {}, [], id="of-the-system"),
        pytest.param(["/tmp/verify/x", "/opt/verify/x"], {}, ["/opt/verify", "/tmp/verify"], id="below-open-directories"),
        pytest.param(["/verify/x"], {"files": {"/verify/data/fixture": ""}}, [], id="the-tasks-files-lie-there"),
        pytest.param(["/a/x"], {"workdir": "/a/b"}, [], id="around-the-workdir"),
        pytest.param(["/verify/x"], {"setup": ["mkdir -p /verify && cp /fixtures/* /verify"]}, [], id="setup-fills-it"),
        pytest.param(["/workshop/x"], {}, ["/workshop"], id="a-name-that-only-begins-alike"),
    ],
)
def test_own_directories(files: list[str], sandbox: dict[str, Any], expected: list[str]) -> None:
    verifier = CommandVerifier(files=dict.fromkeys(files, ""), command="true")
    task = TaskSpec.model_validate({"task_id": "t", "messages": [{"role": "user"}], "sandbox": sandbox})
    assert own_directories(task, verifier) == expected
