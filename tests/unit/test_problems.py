"""Pydantic's findings in the client's words: the path that was sent, one problem a field, the arm of a union that was meant."""

from typing import Any

import pytest
from pydantic import ValidationError

from service.problems import field_problems
from service.records import JobSpec, TaskSpec

MESSAGES = [{"role": "user", "content": "x"}]
MODEL = {"tokenizer": "t", "context_tokens": 100}


def problems(model: Any, value: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(value)
    return {problem.field: problem.problem for problem in field_problems(caught.value, value)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({"tools": ["bsh"]}, {"tools.0": "should be 'bash', 'edit_file' or 'submit'"}, id="scalar-of-a-union"),
        pytest.param(
            {"tools": [{"type": "function"}]},
            {"tools.0.function": "is required; add it", "tools.0.run": "is required; add it"},
            id="object",
        ),
        pytest.param({"tools": ["bash", "bash"]}, {"tools": "two tools have one name; give each its own"}, id="rule"),
        pytest.param({"verifier": {"url": "x"}}, {"verifier.url": "string should have at least 8 characters"}, id="second-arm"),
        pytest.param(
            {"verifier": {"command": "true", "timeout": 3}},
            {"verifier.timeout": "is not a known field; remove it or check its spelling"},
            id="misspelt-in-an-arm",
        ),
        pytest.param(
            {"limits": {"tokens": 1, "turn_tokens": 2}},
            {"limits.turn_tokens": "limits.turn_tokens is above limits.tokens; lower it, or raise limits.tokens"},
            id="rule-over-two",
        ),
    ],
)
def test_tasks(change: dict[str, Any], expected: dict[str, str]) -> None:
    assert problems(TaskSpec, {"task_id": "t", "messages": MESSAGES} | change) == expected


@pytest.mark.parametrize(
    ("generators", "field"),
    [
        pytest.param(["nonsense"], "generators.0", id="text"),
        pytest.param([7], "generators.0", id="number"),
        pytest.param([{"url": "http://x.example", "max_concurrency": 0}], "generators.0.max_concurrency", id="object"),
        pytest.param([{}], "generators.0.url", id="empty-object"),
        pytest.param("http://x.example", "generators", id="no-list"),
    ],
)
def test_generators(generators: object, field: str) -> None:
    assert list(problems(JobSpec, {"name": "n", "model": MODEL, "generators": generators})) == [field]


def test_what_is_not_an_object_is_the_body() -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(3)
    assert [problem.field for problem in field_problems(caught.value, 3)] == ["body"]
