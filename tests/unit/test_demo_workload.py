"""What the demo lets a small model say."""

import json
import re

import pytest

from service.demo.workload import guide
from service.humaneval import Problem, problems


@pytest.mark.parametrize("problem", problems(8), ids=lambda problem: problem.task_id)
def test_a_guide_holds_well_formed_calls_and_the_solution_among_them(problem: Problem) -> None:
    pattern = re.compile(guide(problem))
    solution = f"cat >> solution.py <<'X'\n{problem.canonical_solution.rstrip()}\nX"
    calls = [{"name": "bash", "arguments": {"command": solution}}, {"name": "submit", "arguments": {}}]
    for call in calls:
        assert pattern.fullmatch(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    assert not pattern.fullmatch('<tool_call>\n{"name": "bash", "arguments": {"command": "rm -rf /"}}\n</tool_call>')
