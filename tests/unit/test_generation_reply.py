"""What of SGLang's answers is accepted: captured ones as they are, lying ones never."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.errors import GeneratorError
from service.generation_reply import Asked, checked, decode, error_message, failure, not_older, read_label
from service.records import FinishReason
from service.trajectories import Generation, VersionSpan

CAPTURES = Path(__file__).parent.parent / "contract" / "captures"


def asked(**fields: Any) -> Asked:
    known: dict[str, Any] = {"rid": "r", "prompt_tokens": 5, "vocab_size": 100, "stop_token_ids": (3,), "version": 4, "lineage": 1}
    return Asked(**(known | fields))


def body(
    ids: list[int], entries: list[Any], *, finish: dict[str, Any] | None = None, output: dict[str, Any] | None = None, **meta: Any
) -> bytes:
    known = {
        "finish_reason": finish or {"type": "stop", "matched": 3},
        "output_token_logprobs": entries,
        "weight_versions": [{"version": "4", "start": 0, "end": len(ids)}],
    }
    return json.dumps({"output_ids": ids, "text": "", "meta_info": known | meta} | (output or {})).encode()


def accept(data: bytes, **fields: Any) -> Generation:
    return checked(decode(data), asked(**fields))


def captured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CAPTURES / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("name", "finish", "spans"),
    [
        pytest.param("gen_logprob", FinishReason.STOP, [(4, 0, 8)], id="stop"),
        pytest.param("abort_running_victim", FinishReason.ABORT, [(4, 0, 23)], id="aborted-while-running"),
        pytest.param("queue_wait_0", FinishReason.ABORT, [], id="aborted-in-the-queue"),
        pytest.param("tiny_nan_check", FinishReason.LENGTH, [(4, 0, 4)], id="length"),
        pytest.param("wv_label_bump_victim", FinishReason.LENGTH, [(4, 0, 15), (4, 15, 40)], id="label-moved"),
    ],
)
def test_captured_replies_are_accepted(name: str, finish: FinishReason, spans: list[tuple[int, int, int]]) -> None:
    capture = captured(name)
    reply = capture["response"]["body"]
    prompt = len(capture["request"]["body"]["input_ids"])
    generation = accept(json.dumps(reply).encode(), rid=reply["meta_info"]["id"], prompt_tokens=prompt, vocab_size=49_152)
    assert generation.token_ids == reply["output_ids"]
    assert generation.logprobs == [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    assert generation.finish is finish
    assert [(span.version, span.start, span.end) for span in generation.spans] == spans


def test_case_002_the_sampled_end_token_keeps_its_own_logprob() -> None:
    generation = accept(body([8, 10, 3], [[-0.5, 8, None], [-0.4, 10, None], [-4.605, 3, None]]))
    assert generation.logprobs == [-0.5, -0.4, -4.605]
    assert generation.matched == 3


def test_case_003_a_trimmed_stop_token_is_put_back_with_its_logprob() -> None:
    generation = accept(body([20, 21], [[-0.3, 20, None], [-0.4, 21, None], [-0.01, 3, None]]))
    assert generation.token_ids == [20, 21, 3]
    assert generation.logprobs == [-0.3, -0.4, -0.01]
    assert generation.spans == (VersionSpan(version=4, lineage=1, start=0, end=3),)


GOOD = [[-0.3, 20, None], [-0.4, 21, None]]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(body([20, 21, 3, 8], [*GOOD, [-0.1, 3, None]]), "logprob_mismatch", id="case-003-ids-past-stop"),
        pytest.param(body([19], GOOD), "logprob_mismatch", id="case-003-different-ids"),
        pytest.param(body([21, 20], GOOD), "logprob_mismatch", id="another-order"),
        pytest.param(body([20, 21], [*GOOD, [-0.1, 8, None]]), "logprob_mismatch", id="one-more-that-is-no-stop"),
        pytest.param(body([20, 21], []), "logprob_mismatch", id="no-logprobs"),
        pytest.param(body([20, 3], [[-0.4, 20, None], [float("-inf"), 3, None]]), "non_finite_logprob", id="case-078-minus-infinity"),
        pytest.param(body([20], [[float("nan"), 20, None]]), "non_finite_logprob", id="python-nan"),
        pytest.param(body([20], [[None, 20, None]]), "non_finite_logprob", id="null"),
        pytest.param(body([20], [[-1e300, 20, None]]), "non_finite_logprob", id="infinite-as-float32"),
        pytest.param(body([100], [[-0.1, 100, None]]), "unknown_token", id="outside-the-vocabulary"),
        pytest.param(body([-1], [[-0.1, -1, None]]), "unknown_token", id="negative"),
        pytest.param(body([20, 21], GOOD, id="another"), "wrong_request", id="another-request"),
        pytest.param(body([20, 21], GOOD, prompt_tokens=4), "prompt_mismatch", id="prompt-cut"),
        pytest.param(body([20, 21], GOOD, finish={"type": "eos"}), "malformed_reply", id="unknown-finish"),
        pytest.param(body([20, 21], GOOD, finish={"type": "abort", "status_code": 503}), "status 503", id="abort-with-503"),
        pytest.param(
            body([20, 21], GOOD, weight_versions=[{"version": "1", "start": 0, "end": 1}]), "version_mismatch", id="spans-too-short"
        ),
        pytest.param(
            body([20, 21], GOOD, weight_versions=[{"version": "1", "start": 1, "end": 2}]), "version_mismatch", id="spans-with-a-gap"
        ),
        pytest.param(b"[]", "malformed_reply", id="a-list"),
        pytest.param(b"{", "malformed_reply", id="cut-off"),
        pytest.param(b"NaN", "malformed_reply", id="a-bare-nan"),
        pytest.param(b"\xff\xfe", "malformed_reply", id="no-text"),
        pytest.param(b'{"output_ids": ["20"]}', "malformed_reply", id="ids-as-text"),
    ],
)
def test_lies_are_refused_and_may_be_asked_again(data: bytes, reason: str) -> None:
    with pytest.raises(GeneratorError, match=reason) as caught:
        accept(data)
    assert caught.value.retryable


def test_an_aborted_bad_request_is_not_asked_again() -> None:
    with pytest.raises(GeneratorError, match="too long") as caught:
        accept(body([], [], finish={"type": "abort", "status_code": 400, "message": "too long"}))
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        pytest.param("7", (1, 7), id="newer"),
        pytest.param("2", (1, 2), id="older"),
        pytest.param("2.7", (2, 7), id="with-lineage"),
        pytest.param("default", (1, 4), id="says-nothing"),
        pytest.param("step-7", (1, 4), id="another-scheme"),
        pytest.param("", (1, 4), id="empty"),
        pytest.param(None, (1, 4), id="none"),
        pytest.param("9999999999", (1, 4), id="no-int32"),
        pytest.param("-1", (1, 4), id="negative"),
    ],
)
def test_labels(label: str | None, expected: tuple[int, int]) -> None:
    assert read_label(label, version=4, lineage=1) == expected


@pytest.mark.parametrize(
    ("label", "version"),
    [pytest.param("9", 4, id="may-have-begun-before"), pytest.param("2", 2, id="older"), pytest.param("default", 4, id="says-nothing")],
)
def test_without_spans_the_version_is_a_lower_bound(label: str, version: int) -> None:
    generation = accept(body([20, 21], GOOD, weight_versions=None, weight_version=label))
    assert generation.spans == (VersionSpan(version=version, lineage=1, start=0, end=2),)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b'{"error": "Unauthorized"}', "Unauthorized", id="error-text"),
        pytest.param(b'{"error": {"message": "input_ids cannot be empty."}}', "input_ids cannot be empty.", id="error-object"),
        pytest.param(b'{"object": "error", "message": "queue full", "code": 503}', "queue full", id="message"),
        pytest.param(b'{"detail": "Not Found"}', "Not Found", id="detail"),
        pytest.param(b"Internal Server Error", "Internal Server Error", id="plain-text"),
        pytest.param(b"", "no reason given", id="empty"),
        pytest.param(b'{"message": "wrong\\n\\n  File \\"/venv/lib/x.py\\""}', "wrong", id="without-the-servers-paths"),
        pytest.param(b"\xff" * 10_000, "\ufffd" * 500, id="long-garbage"),
        pytest.param(b"[" * 100_000, "[" * 500, id="deep"),
    ],
)
def test_error_bodies(data: bytes, message: str) -> None:
    assert error_message(data) == message


@pytest.mark.parametrize(
    ("status", "data", "retryable"),
    [
        pytest.param(400, b'{"error": {"message": "too long"}}', False, id="bad-request"),
        pytest.param(400, b'{"error": {"message": "Duplicate request ID detected: r"}}', True, id="duplicate-rid"),
        pytest.param(429, b"", True, id="too-many"),
        pytest.param(500, b"", True, id="server-error"),
        pytest.param(503, b"", True, id="queue-full"),
        pytest.param(404, b"", True, id="gone-for-now"),
    ],
)
def test_which_statuses_are_asked_again(status: int, data: bytes, retryable: bool) -> None:
    assert failure(status, data).retryable is retryable


def test_a_wrong_key_and_a_redirect_name_the_cure() -> None:
    assert "api_key" in str(failure(401, b'{"error": "Unauthorized"}'))
    assert "final URL" in str(failure(303, b""))
    assert not failure(303, b"").retryable


@pytest.mark.parametrize(
    ("label", "than", "expected"),
    [
        pytest.param("0.7", "0.7", True, id="the-same"),
        pytest.param("0.8", "0.7", True, id="newer"),
        pytest.param("9", "2.7", True, id="without-a-lineage"),
        pytest.param("0.6", "0.7", False, id="older"),
        pytest.param("0.9", "1.2", False, id="of-a-dead-lineage"),
        pytest.param("1.0", "0.7", True, id="of-a-newer-lineage"),
        pytest.param("default", "0.0", False, id="no-version"),
        pytest.param(None, "0.0", False, id="no-label"),
        pytest.param("3", "default", True, id="than-nothing-known"),
    ],
)
def test_which_labels_are_not_older(label: str | None, than: str, expected: bool) -> None:
    assert not_older(label, than) is expected
