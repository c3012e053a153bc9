"""A policy for the stand-in generator: what a model of middling skill would say to each HumanEval task, turn by turn.

A rollout looks at the file, writes a candidate (right, wrong, broken, endless or a cheat), tries it, submits. Now and then it makes
what models make: two calls in one turn, JSON that does not parse, a tool that does not exist, a reply that never ends.
"""

import json
import random
from collections.abc import Iterable
from typing import Any

from service.humaneval.mutants import broken, cheats, endless, mistakes, solution
from service.humaneval.tasks import SOLUTION, Problem, problems

Candidates = list[dict[str, Any]]
"""`[{"text", "weight"}, ...]`: what one turn may say."""


def humaneval_policy(limit: int | None = None, *, seed: int = 0) -> dict[str, Any]:
    """Rules for the first `limit` tasks (all by default). `seed` varies how hard each task is for the policy."""
    return {"rules": [_rule(problem, seed) for problem in problems(limit)], "default": [[_said("I have nothing to do here.", 1.0)]]}


def call_text(name: str, **arguments: Any) -> str:
    """One tool call in the form that Qwen3 and Hermes models write."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _rule(problem: Problem, seed: int) -> dict[str, Any]:
    chance = random.Random(f"{seed}/{problem.task_id}")
    submit = [_said(call_text("submit"), 1.0)]  # said again for as long as the rollout goes on
    turns = [_look(), _write(problem, skill=chance.uniform(0.2, 0.8)), _try(problem), submit]
    return {"match": problem.marker, "turns": turns}


def _said(text: str, weight: float) -> dict[str, Any]:
    return {"text": text, "weight": weight}


def _look() -> Candidates:
    cat = call_text("bash", command=f"cat {SOLUTION}")
    return [
        _said(f"Let me look at the file first.\n{cat}", 4.0),
        _said(f"<think>\nI should read what is there before I write.\n</think>\n\n{cat}", 2.0),
        _said(f"{call_text('bash', command='pwd && ls -la')}\n{cat}", 1.0),
        _said(call_text("read_file", path=SOLUTION), 0.3),
        _said(f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "cat {SOLUTION}"\n</tool_call>', 0.3),
    ]


def _write(problem: Problem, *, skill: float) -> Candidates:
    """`skill` is the share of rollouts that write the right answer."""
    right = solution(problem)
    wrong = mistakes(problem)
    tricks = list(cheats(problem).values())
    said = [_said(f"I know how to do this.\n{text}", skill / 2) for text in (_heredoc(right), _edit(right))]
    said += _shared(0.75 * (1 - skill), [_heredoc(text) for text in wrong])
    said += _shared(0.15 * (1 - skill), [_edit(broken(problem)), *map(_heredoc, tricks)])
    said += _shared(0.04 * (1 - skill), [_heredoc(endless(problem))])
    said += _shared(0.06 * (1 - skill), ["Let me think about it. " + "What if the list is empty? " * 400])
    return said


def _shared(weight: float, texts: Iterable[str]) -> Candidates:
    texts = list(texts)
    return [_said(text, weight / len(texts)) for text in texts]


def _heredoc(source: str) -> str:
    return call_text("bash", command=f"cat > {SOLUTION} <<'END_OF_FILE'\n{source}\nEND_OF_FILE")


def _edit(source: str) -> str:
    return call_text("edit_file", path=SOLUTION, new_text=source)


def _try(problem: Problem) -> Candidates:
    load = f"cd /work && timeout 5 python3 -c 'import solution; print(solution.{problem.entry_point})'"
    submit = call_text("submit")
    return [
        _said(f"Let me see whether it loads.\n{call_text('bash', command=load)}", 5.0),
        _said(f"{call_text('bash', command='python3 -m py_compile ' + SOLUTION + ' && echo fine')}\n{submit}", 2.0),
        _said(submit, 2.0),
        _said("I am done; the file is complete.", 0.5),
    ]
