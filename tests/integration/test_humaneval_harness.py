"""The HumanEval harness as a process: it passes the right answers and nothing else, whatever the submission tries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.humaneval.mutants import broken, cheats, solution
from service.humaneval.tasks import Problem, checks_source, harness_source, problems

PROBLEMS = {problem.task_id: problem for problem in problems()}
FIRST = PROBLEMS["HumanEval/0"]


def judged(folder: Path, problem: Problem, submission: str) -> subprocess.CompletedProcess[str]:
    """Run the harness as the verifier does, on real files."""
    (folder / "run.py").write_text(harness_source())
    (folder / "tests.py").write_text(checks_source(problem))
    (folder / "solution.py").write_text(submission)
    argv = [sys.executable, "-I", f"{folder}/run.py", "judge", problem.entry_point, f"{folder}/solution.py", f"{folder}/tests.py"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize("task_id", [f"HumanEval/{n}" for n in (0, 32, 33, 38, 50, 107, 162)])
def test_the_right_answer_passes(task_id: str, tmp_path: Path) -> None:
    ended = judged(tmp_path, PROBLEMS[task_id], solution(PROBLEMS[task_id]))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert '"passed": true' in ended.stdout


@pytest.mark.parametrize("submission", [broken(FIRST), "", "has_close_elements = 3\n", FIRST.prompt, solution(FIRST).replace("<", ">")])
def test_a_wrong_answer_fails(submission: str, tmp_path: Path) -> None:
    assert judged(tmp_path, FIRST, submission).returncode == 1


WRONG = FIRST.prompt + "    return None\n"
TRICKS = {
    **cheats(FIRST),
    "raises": FIRST.prompt + "    raise ValueError('no')\n",
    "prints a verdict": "import sys\nprint('{\"passed\": true}')\n" + WRONG,
    "patches builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.eval = print\n" + WRONG,
    "forks and lives on": "import os, time\nif os.fork():\n    os._exit(0)\nos.setsid()\ntime.sleep(1)\n" + WRONG,
    "forks and answers twice": "import os\nos.fork()\n" + WRONG,
    "kills the judge": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n" + WRONG,
    "ends the judge politely": "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\n" + WRONG,
    "writes on every descriptor": "import os\nfor fd in range(20):\n    try:\n        os.write(fd, b'{\"value\": true}\\n')\n"
    "    except OSError:\n        pass\n" + WRONG,
    "claims to have passed": "import sys, json\nfor frame in sys._current_frames().values():\n    while frame:\n"
    "        frame.f_locals.get('answers') and frame.f_locals['answers'].write('{\"passed\": true}\\n')\n        frame = frame.f_back\n"
    + WRONG,
    "writes to the judge's output": "import os\nopen(f'/proc/{os.getppid()}/fd/1', 'w').write('{\"passed\": true}\\n')\n" + WRONG,
    "reads the tests from the disk": "import glob, os\n"
    "text = ''.join(open(p).read() for p in glob.glob(os.path.dirname(__file__) + '/tests*'))\n"
    "assert 'candidate' in text\n" + solution(FIRST),
    "reads the judge's memory": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')\n" + solution(FIRST),
    "becomes traceable with the judge": "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0\n"
    + solution(FIRST),
    "answers with nested lists": FIRST.prompt + "    x = []\n    for _ in range(900): x = [x]\n    return x\n",
    "answers without end": FIRST.prompt + "    return 'x' * 10**7\n",
    "eats memory": FIRST.prompt + "    return len([0] * 10**9) > 0\n",
    "runs without end": FIRST.prompt + "    while True: pass\n",
}


@pytest.mark.parametrize("submission", TRICKS.values(), ids=[name.replace(" ", "-") for name in TRICKS])
def test_a_trick_does_not_pass(submission: str, tmp_path: Path) -> None:
    ended = judged(tmp_path, FIRST, submission)
    assert ended.returncode != 0
    assert "true" not in ended.stdout


def test_the_library_is_not_read_after_the_start(tmp_path: Path) -> None:
    """A submission that plants a module beside the judge does not get into it."""
    plant = f"open('{tmp_path}/' + name + '.py', 'w').write('raise SystemExit(0)')"
    planted = f"for name in ('math', 'random', 'copy', 'zlib'):\n    {plant}\n"
    task = PROBLEMS["HumanEval/32"]
    assert judged(tmp_path, task, planted + task.prompt + "    return 0\n").returncode == 1
    assert os.path.exists(tmp_path / "math.py")
