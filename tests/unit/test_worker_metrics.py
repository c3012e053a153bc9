"""A worker's labels."""

import pytest

from workers.metrics import reason_class


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        pytest.param("sandbox: container 7f3 is gone", "sandbox", id="sandbox"),
        pytest.param("sandbox_destroyed", "sandbox", id="destroyed"),
        pytest.param("generator: http://10.0.0.1: HTTP 500", "generator", id="generator"),
        pytest.param("task: no such image", "task", id="task"),
        pytest.param("python: what a model made up", "other", id="case-079-unknown"),
        pytest.param("", "other", id="empty"),
    ],
)
def test_reasons_become_one_of_a_few_classes(reason: str, label: str) -> None:
    assert reason_class(reason) == label
