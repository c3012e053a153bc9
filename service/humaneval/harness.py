"""Decides whether a submission passes its task's tests: `python3 -I /verify/run.py judge NAME`, in the verifier's sandbox.

This file is copied there, so it needs nothing but the standard library. It plays both roles: the judge, which runs the tests and
decides, and the player, a child process that holds the submission and answers calls. What must always hold:

* The exit status is 0 only after every assert of the tests held in the judge. The player has no way to say "passed": it is sent
  arguments and answers with values.
* Values cross as JSON, so no object of the submission's (and no `__eq__` of its making) reaches the judge.
* The player cannot read the expected values: the tests are removed from the disk before it starts, and the judge's memory and
  descriptors are closed to it (not dumpable, while the player has no capabilities).
* Once the player runs, the judge imports nothing: the submission may have rewritten the library on the disk.
* A submission that kills, stops or floods the judge makes it end with another status than 0, or not in time.
"""

import contextlib
import copy  # noqa: F401  the tests import it
import ctypes
import json
import math  # noqa: F401  the tests import it
import os
import random  # noqa: F401  the tests import it
import resource
import select
import signal
import string  # noqa: F401  the tests import it
import subprocess
import sys
import time
import typing  # noqa: F401  the prompts import it
from collections.abc import Callable, Iterator
from typing import Any

SOLUTION = "/work/solution.py"
TESTS = "/verify/tests.py"

CALL_S = 10.0
"""Wall time of one call, and of loading the submission."""
TOTAL_S = 45
"""Wall time of everything; below the verifier's own time-out, so that the judge is the one to say so."""
CPU_S = 6
"""Processor time of the player: an endless loop ends as soon on a busy machine as on a quiet one."""
PLAYER_BYTES = 384 * 2**20
"""Address space of the player: it must run out of memory before the sandbox does."""
MAX_ANSWER_BYTES = 4 * 2**20

PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522


class SubmissionError(Exception):
    """The submission did not answer a call with a plain value."""


# -------------------------------------------------------------------------------------------------------------------------- values


def pack(value: Any) -> Any:
    """Plain data as JSON that keeps tuples, sets and dictionary keys apart from lists and strings.

    Raises:
        TypeError: the value is no plain data.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [pack(item) for item in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [pack(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    raise TypeError(f"a {type(value).__name__} is no plain value")


def unpack(packed: Any) -> Any:
    """The inverse of `pack`. Raises ValueError, TypeError or KeyError for anything else."""
    if isinstance(packed, list):
        return [unpack(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, items),) = packed.items()
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in items}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](unpack(item) for item in items)


# -------------------------------------------------------------------------------------------------------------------------- player


def _confine() -> None:
    """Bound time and memory, and give up all capabilities for good: even as root, the judge's memory is then out of reach."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (PLAYER_BYTES, PLAYER_BYTES))
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "the player could not give up its privileges")


def _load(name: str, path: str) -> Callable[..., Any]:
    with open(path, encoding="utf-8") as file:
        source = file.read()
    scope: dict[str, Any] = {"__name__": "solution", "__file__": path}
    exec(compile(source, path, "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function


def play(name: str, path: str, requests_fd: int, answers_fd: int) -> None:
    """Load the submission and answer the judge's calls, one line of JSON each, until its end of the pipe is closed."""
    _confine()
    function: Callable[..., Any] | None = None
    with open(requests_fd, encoding="utf-8") as requests, open(answers_fd, "w", encoding="utf-8") as answers:
        for line in requests:
            try:
                if function is None:
                    function, answer = _load(name, path), None
                else:
                    args, kwargs = unpack(json.loads(line))
                    answer = pack(function(*args, **kwargs))
                text = json.dumps({"value": answer})
            except Exception as error:  # whatever the submission raised is its answer
                text = json.dumps({"error": type(error).__name__})
            answers.write(text + "\n")
            answers.flush()


# --------------------------------------------------------------------------------------------------------------------------- judge


class Player:
    """The judge's view of the child process."""

    def __init__(self, name: str, solution: str) -> None:
        theirs_in, self._requests = os.pipe()
        self._answers, theirs_out = os.pipe()
        self._rest = b""
        self.calls = 0
        argv = [sys.executable, "-I", __file__, "play", name, solution, str(theirs_in), str(theirs_out)]
        self._process = subprocess.Popen(
            argv,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def load(self) -> None:
        """Raises SubmissionError when the submission cannot be loaded or has no such function."""
        self._ask(b"null\n")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What the tests take for the submission's function.

        Raises:
            SubmissionError: it raised, ended, was too slow, or answered with something else than a plain value.
        """
        self.calls += 1
        packed = self._ask(json.dumps(pack([args, kwargs])).encode() + b"\n")
        try:
            return unpack(packed)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise SubmissionError("the answer is no plain value") from None

    def _ask(self, request: bytes) -> Any:
        with contextlib.suppress(BrokenPipeError):  # its answer, or its end, is read below
            os.write(self._requests, request)
        try:
            answer = json.loads(self._line(time.monotonic() + CALL_S))
        except (ValueError, RecursionError):
            raise SubmissionError("the answer is no plain value") from None
        if not isinstance(answer, dict) or "value" not in answer:
            reason = str(answer.get("error")) if isinstance(answer, dict) else "nonsense"
            raise SubmissionError(f"it raised {reason[:100]!a}")
        return answer["value"]

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._rest:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise SubmissionError("it did not answer in time")
            chunk = os.read(self._answers, 65536)
            if not chunk:
                raise SubmissionError("its process ended")
            self._rest += chunk
            if len(self._rest) > MAX_ANSWER_BYTES:
                raise SubmissionError("its answer is too long")
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def _player(name: str, solution: str) -> Iterator[Player]:
    player = Player(name, solution)
    sys.path.clear()
    sys.meta_path.clear()
    try:
        yield player
    finally:
        player.kill()


def judge(name: str, solution: str, tests: str) -> dict[str, Any]:
    """Run the task's tests against the submission's function `name`: `{"passed", "calls", "why"}`."""
    with open(tests, encoding="utf-8") as file:
        source = file.read()
    os.unlink(tests)
    scope: dict[str, Any] = {"__name__": "tests"}
    exec(compile(source, tests, "exec"), scope)
    with _player(name, solution) as player:
        scope[name] = player.call  # some tests compare with the function by its own name
        why = ""
        try:
            player.load()
            scope["check"](player.call)
        except SubmissionError as error:
            why = str(error)
        except Exception as error:  # an assert that did not hold, or a value the test could not work with
            why = f"the tests raised {type(error).__name__}"
        return {"passed": not why, "calls": player.calls, "why": why}


def main(argv: list[str]) -> None:
    role, name, *rest = argv
    if role == "play":
        play(name, rest[0], int(rest[1]), int(rest[2]))
        return
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError("the judge could not close its memory to the player")
    signal.alarm(TOTAL_S)
    solution, tests = rest or (SOLUTION, TESTS)
    verdict = judge(name, solution, tests)
    sys.stdout.write(json.dumps(verdict) + "\n")
    sys.stdout.flush()
    os._exit(0 if verdict["passed"] else 1)  # nothing of ours runs after the verdict


if __name__ == "__main__":
    main(sys.argv[1:])
