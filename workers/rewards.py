"""What a verifier's end means: a reward, or a fault of the task. Pure.

A time-out or a kill for memory or disk is the submission's doing: reward 0 with a reason. A verifier that ends by itself without a
finite number is broken. `number` and `json` verifiers must exit 0: output before a crash may be the submission's own, so it is never a
reward.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from sandboxes.base import MARKER, ExecResult
from service.errors import TaskFaultError
from workers.observations import tail_text

MAX_OUTPUT_BYTES = 65_536
"""Of each stream of a verifier's command."""

MAX_DETAIL_BYTES = 16_384
"""Of the keys that a verifier adds to its reward; they travel with every batch."""

TAIL_BYTES = 2048
"""Of each stream, kept beside the reward."""

RewardKind = Literal["exit_code", "number", "json"]

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_CUT = re.compile(re.escape(MARKER).replace(re.escape("{omitted}"), r"\d+"))
_NOT_FOUND = re.compile(r"^(?:\S*/)?sh: .*(?:not found|No such file or directory|[Pp]ermission denied)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rollout's reward, None when it is left to the trainer; `detail` is JSON and says how it came about."""

    reward: float | None
    detail: dict[str, Any] = field(default_factory=dict)


def judge(kind: RewardKind, result: ExecResult) -> Verdict:
    """The verdict of a verifier's command that ended in a healthy sandbox.

    Raises:
        TaskFaultError: it ended by itself without a finite number, or could not be run at all.
    """
    detail = evidence(result)
    if result.timed_out:
        return Verdict(0.0, {"reason": "verifier_timeout", **detail})
    if result.oom_killed and result.exit_code != 0:
        return Verdict(0.0, {"reason": "verifier_out_of_memory", **detail})
    if result.disk_full and result.exit_code != 0:
        return Verdict(0.0, {"reason": "verifier_disk_full", **detail})
    if kind == "exit_code":
        _check_found(result)
        return Verdict(1.0 if result.exit_code == 0 else 0.0, detail)
    if result.exit_code != 0:
        raise TaskFaultError(f"the verifier exited with {result.exit_code}; with reward {kind!r} it must exit 0. {_came(result)}")
    if kind == "number":
        return Verdict(_number(result), detail)
    reward, extra = _json(result)
    return Verdict(reward, {**detail, **extra})


def evidence(result: ExecResult) -> dict[str, Any]:
    """How the command ended, bounded."""
    detail: dict[str, Any] = {
        "exit_code": result.exit_code,
        "seconds": round(result.seconds, 3),
        "stdout": tail_text(result.stdout, max_bytes=TAIL_BYTES),
        "stderr": tail_text(result.stderr, max_bytes=TAIL_BYTES),
    }
    return detail | {name: True for name in ("oom_killed", "disk_full") if getattr(result, name)}


def finite(value: object) -> float | None:
    """`value` as a reward: a finite number, no boolean; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def reward_object(data: bytes | str) -> tuple[float, dict[str, Any]] | None:
    """The reward and the other keys of a JSON object, or None if `data` is no object with a finite `reward`. Other keys are bounded."""
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    reward = finite(answer.get("reward")) if isinstance(answer, dict) else None
    if reward is None:
        return None
    extra = {key: value for key, value in answer.items() if key != "reward"}
    size = len(orjson.dumps(extra))
    return reward, extra if size <= MAX_DETAIL_BYTES else {"detail_omitted_bytes": size}


def _check_found(result: ExecResult) -> None:
    """The shell's own word that it could not run the command; a program that merely exits 126 or 127 is reward 0."""
    if result.exit_code in (126, 127) and _NOT_FOUND.search(result.stderr.decode(errors="replace")):
        raise TaskFaultError(f"the verifier's command cannot be run. {_came(result)}")


def _number(result: ExecResult) -> float:
    line = _last_line(result)
    number = float(line) if _NUMBER.fullmatch(line) else math.nan
    if not math.isfinite(number):
        raise TaskFaultError(f"the last line of the verifier's output is no finite number. {_came(result)}")
    return number


def _json(result: ExecResult) -> tuple[float, dict[str, Any]]:
    found = reward_object(result.stdout) or reward_object(_last_line(result))
    if found is None:
        raise TaskFaultError(f'the verifier printed no JSON object with a finite "reward". {_came(result)}')
    return found


def _last_line(result: ExecResult) -> str:
    """The last line with something in it. After a cut, the line that the marker cut into does not count: it may be a part of a number."""
    text = result.stdout.decode(errors="replace")
    whole, *rest = _CUT.split(text) if result.truncated else [text]
    lines = (rest[-1].partition("\n")[2] if rest else whole).split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _came(result: ExecResult) -> str:
    stdout, stderr = (tail_text(data, max_bytes=300) for data in (result.stdout, result.stderr))
    return f"Exit code {result.exit_code}, end of stdout {stdout!r}, end of stderr {stderr!r}"
