"""The demo's checks: they must find what they are there to find."""

from typing import Any

import pytest

from service.demo.checks import Truth, check_ends, check_group

PROMPT, REPLY, TEMPLATE, SECOND = [1, 2, 3], [10, 11], [4, 5], [12]


def record(given: list[int], sampled: list[int], version: int = 3) -> dict[str, Any]:
    return {"input_ids": given, "output_ids": sampled, "logprobs": [-0.1 * i for i in sampled], "versions": [version] * len(sampled)}


RECORDS = [record(PROMPT, REPLY), record(PROMPT + REPLY + TEMPLATE, SECOND)]
CUT = [record(PROMPT, REPLY[:1]), record(PROMPT + REPLY[:1], REPLY[1:]), RECORDS[1]]


def sample(**changed: Any) -> dict[str, Any]:
    """Two turns, as the gateway exports them."""
    ids = PROMPT + REPLY + TEMPLATE + SECOND
    mask = [0] * 3 + [1] * 2 + [0] * 2 + [1]
    right = {
        "token_ids": ids,
        "loss_mask": mask,
        "logprobs": [-0.1 * i if m else 0.0 for i, m in zip(ids, mask, strict=True)],
        "versions": [3 if m else -1 for m in mask],
        "prompt_len": 3,
    }
    return right | changed


def group(*samples: dict[str, Any], staleness: int = 1, size: int = 1) -> dict[str, Any]:
    return {"group_id": "g", "staleness": staleness, "size": size, "trajectories": [{"rollout_id": "r", "samples": list(samples)}]}


@pytest.mark.parametrize("records", [pytest.param(RECORDS, id="whole"), pytest.param(CUT, id="cut-and-continued")])
def test_what_the_generator_recorded_passes(records: list[dict[str, Any]]) -> None:
    truth = Truth(records)
    assert check_group(group(sample()), policy_version=4, budget=1, truth=truth) == []
    assert truth.taken == 3


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        pytest.param({"token_ids": [1, 2, 3, 10, 13, 4, 5, 12]}, "not what the generator recorded", id="another-token"),
        pytest.param({"token_ids": [1, 2, 9, 10, 11, 4, 5, 12]}, "not what the generator recorded", id="another-prompt"),
        pytest.param({"versions": [-1, -1, -1, 3, 4, -1, -1, 3]}, "not what the generator recorded", id="another-version"),
        pytest.param({"logprobs": [0, 0, 0, -1.0, -1.5, 0, 0, -1.2]}, "not what the generator recorded", id="another-logprob"),
        pytest.param({"loss_mask": [0, 0, 0, 1, 1, 1, 0, 1]}, "without a version", id="mask-too-wide"),
        pytest.param({"loss_mask": [0, 0, 0, 1, 0, 0, 0, 1]}, "beside the sampled tokens", id="mask-too-narrow"),
        pytest.param({"versions": [-1] * 7}, "different lengths", id="short-versions"),
        pytest.param({"prompt_len": 2}, "prompt_len", id="prompt-len"),
        pytest.param({"loss_mask": [0] * 8, "logprobs": [0.0] * 8, "versions": [-1] * 8}, "no sampled token", id="nothing-sampled"),
    ],
)
def test_what_differs_is_found(changed: dict[str, Any], problem: str) -> None:
    problems = check_group(group(sample(**changed)), policy_version=4, budget=9, truth=Truth(RECORDS))
    assert any(problem in found for found in problems)


def test_a_record_counts_once() -> None:
    twice = group(sample(), sample())
    assert len(check_group(twice, policy_version=4, budget=1, truth=Truth(RECORDS))) == 1


def test_staleness_and_size_are_counted_again() -> None:
    problems = check_group(group(sample(), staleness=2, size=2), policy_version=4, budget=1, truth=Truth(RECORDS))
    assert [word for word in ("above the budget", "its tokens say staleness 1", "size 2") if any(word in p for p in problems)] == [
        "above the budget",
        "its tokens say staleness 1",
        "size 2",
    ]


@pytest.mark.parametrize(
    ("state", "delivered", "problem"),
    [
        pytest.param("acked", ["g"], None, id="delivered"),
        pytest.param("dropped", [], None, id="dropped"),
        pytest.param("running", [], "g is running", id="not-ended"),
        pytest.param("failed", [], "g is failed", id="failed"),
        pytest.param("acked", [], "not delivered", id="acked-unseen"),
        pytest.param("dropped", ["g"], "was delivered", id="dropped-but-seen"),
        pytest.param("acked", ["g", "g"], "more than once", id="twice"),
    ],
)
def test_each_group_ends_once(state: str, delivered: list[str], problem: str | None) -> None:
    problems = check_ends(["g"], delivered, {"g": state})
    assert problems == [] if problem is None else problem in problems[0]


def test_a_group_that_is_gone_is_lost() -> None:
    assert check_ends(["g"], [], {}) == ["g is lost"]
