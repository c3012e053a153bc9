"""The HumanEval tasks, their policy for the stand-in, and how values cross to a submission."""

from pathlib import Path

import pytest

from service.humaneval import humaneval_policy, humaneval_tasks, write_tasks
from service.humaneval.harness import pack, unpack
from service.humaneval.mutants import mistakes, solution
from service.humaneval.tasks import problems
from service.records import TaskSpec

PROBLEMS = problems()


def test_every_task_is_accepted_by_the_service() -> None:
    tasks = humaneval_tasks()
    assert len({TaskSpec.model_validate(task).task_id for task in tasks}) == 164


def test_a_marker_stands_in_one_prompt_only() -> None:
    texts = [task["messages"][1]["content"] for task in humaneval_tasks()]
    assert all(sum(problem.marker in text for text in texts) == 1 for problem in PROBLEMS)


def test_write_tasks(tmp_path: Path) -> None:
    assert write_tasks(tmp_path / "tasks.json", 3) == 3


def test_policy_has_a_rule_for_each_task() -> None:
    rules = humaneval_policy(5)["rules"]
    assert [rule["match"] for rule in rules] == [problem.marker for problem in problems(5)]
    assert all(said["weight"] > 0 for rule in rules for turn in rule["turns"] for said in turn)


def test_mistakes_differ_from_the_right_answer() -> None:
    assert all(mistakes(problem) and solution(problem) not in mistakes(problem) for problem in PROBLEMS)


@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5, "x\n\ud800", [1, [2]], (1, ("a",)), {1: (2,), "k": {"n": []}}, {1, 2}, frozenset({3}), float("inf")]
)
def test_values_keep_their_types(value: object) -> None:
    assert unpack(pack(value)) == value


@pytest.mark.parametrize("packed", [{"int": 3}, {"set": [[1]]}, {"dict": [[1]]}, {}, {"a": 1, "b": 2}])
def test_what_is_no_value_is_refused(packed: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        unpack(packed)
