"""What we rely on in SGLang, as one suite: the stand-in must pass it always, a real SGLang where ROLLWAY_TEST_SGLANG_URL names one.

`captures/` are real answers of SGLang 0.5.23 (CPU, SmolLM2); the log-probabilities and ids in them are that model's.
"""

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.standin_stack import standin

CAPTURES = Path(__file__).parent / "captures"
PROMPT = list(range(20, 40))
TOKENS_PER_S = 300.0

SGLANG_URL = os.environ.get("ROLLWAY_TEST_SGLANG_URL", "")
NO_SGLANG = "no real SGLang: set ROLLWAY_TEST_SGLANG_URL (deploy/test --sglang does)"


class Server:
    """Calls in SGLang's words; each answers (status, body)."""

    def __init__(self, http: aiohttp.ClientSession, url: str, *, real: bool) -> None:
        self.http = http
        self.url = url
        self.real = real
        self.long = 60 if real else 200
        """Tokens that take a good part of a second."""

    async def call(self, method: str, path: str, body: object = None, *, data: bytes | None = None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        sent = json.dumps(body).encode() if data is None and body is not None else data
        async with self.http.request(method, self.url + path, data=sent, headers=headers) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if reply.content_type == "application/json" else text

    async def generate(self, tokens: int = 4, *, rid: str | None = None, ids: list[int] | None = None, **params: Any) -> tuple[int, Any]:
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True} | params
        body = {"rid": rid or uuid.uuid4().hex, "input_ids": ids or PROMPT, "sampling_params": sampling, "return_logprob": True}
        return await self.call("POST", "/generate", body)

    async def relabel(self, label: str, *, abort: bool) -> None:
        status, body = await self.call("POST", "/update_weight_version", {"new_version": label, "abort_all_requests": abort})
        assert (status, body["new_version"]) == (200, label)

    async def running(self, count: int) -> None:
        """Wait until that many requests have begun to sample."""
        async with asyncio.timeout(20):
            while (await self.call("GET", "/v1/loads"))[1]["loads"][0]["num_running_reqs"] < count:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)


@pytest.fixture(
    params=[
        pytest.param("standin"),
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.skipif(not SGLANG_URL, reason=NO_SGLANG)]),
    ]
)
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    async with aiohttp.ClientSession() as http:
        if request.param == "sglang":
            yield Server(http, SGLANG_URL.rstrip("/"), real=True)
            return
        async with standin(tmp_path, tokens_per_s=TOKENS_PER_S, context_tokens=2048) as url:
            yield Server(http, url, real=False)


def captured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CAPTURES / f"{name}.json").read_text())["response"]
    return found


def kind(value: object) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def assert_like(found: Any, capture: Any, *, at: str = "body") -> None:
    """Every key of the capture is there with a value of its kind; lists are compared by their first element."""
    if at.endswith(("cached_tokens_details", "matched")):
        return  # null or an object; an id or a text
    assert kind(found) == kind(capture), at
    if isinstance(capture, dict):
        missing = capture.keys() - found.keys()
        assert not missing, f"{at} lacks {missing}"
        for key, value in capture.items():
            assert_like(found[key], value, at=f"{at}.{key}")
    elif isinstance(capture, list) and capture and found:
        assert_like(found[0], capture[0], at=f"{at}[0]")


def assert_aligned(reply: dict[str, Any]) -> None:
    meta, ids = reply["meta_info"], reply["output_ids"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == len(ids)
    spans = meta["weight_versions"]
    assert [spans[0]["start"], spans[-1]["end"]] == [0, len(ids)]
    assert all(one["end"] == other["start"] for one, other in pairwise(spans))
    assert meta["weight_version"] == spans[-1]["version"]


async def test_a_reply_has_the_captured_keys_and_is_aligned(server: Server) -> None:
    rid = uuid.uuid4().hex
    status, reply = await server.generate(6, rid=rid)
    assert status == 200
    assert_like(reply, captured("tiny_nan_check")["body"])
    assert_aligned(reply)
    assert reply["meta_info"]["id"] == rid
    assert reply["meta_info"]["prompt_tokens"] == len(PROMPT)
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


async def test_no_tokens_asked_is_one_empty_span(server: Server) -> None:
    status, reply = await server.generate(0)
    assert status == 200
    assert reply["output_ids"] == []
    assert [(span["start"], span["end"]) for span in reply["meta_info"]["weight_versions"]] == [(0, 0)]


async def test_a_stop_token_ends_the_output_and_is_part_of_it(server: Server) -> None:
    _, first = await server.generate(8, temperature=0)
    stop = first["output_ids"][3]
    _, deaf = await server.generate(8, temperature=0, stop_token_ids=[stop])
    assert len(deaf["output_ids"]) == 8  # ignore_eos is deaf to all stop tokens
    _, reply = await server.generate(8, temperature=0, stop_token_ids=[stop], ignore_eos=False)
    assert reply["output_ids"][-1] == stop
    assert stop not in reply["output_ids"][:-1]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert_aligned(reply)


@pytest.mark.parametrize(
    ("body", "capture"),
    [
        pytest.param({"input_ids": [], "sampling_params": {}}, "err_empty_ids", id="empty-ids"),
        pytest.param({"sampling_params": {}}, "err_no_input", id="no-input"),
        pytest.param({"input_ids": PROMPT, "sampling_params": {"foo": 1}}, "err_unknown_sampling_param", id="unknown-sampling-param"),
        pytest.param({"input_ids": PROMPT, "sampling_params": {"top_p": 2}}, "err_top_p", id="bad-top-p"),
        pytest.param({"input_ids": "abc"}, "err_bad_json", id="wrong-type"),
    ],
)
async def test_bad_requests_are_refused_as_captured(server: Server, body: object, capture: str) -> None:
    status, found = await server.call("POST", "/generate", body)
    assert status == 400
    assert_like(found, captured(capture)["body"])
    if capture != "err_bad_json":
        assert found == captured(capture)["body"]


async def test_half_a_body_an_unknown_path_and_a_wrong_method(server: Server) -> None:
    status, found = await server.call("POST", "/generate", data=b'{"input_ids":[1,2')
    assert status == 400
    assert_like(found, captured("err_bad_json")["body"])
    assert await server.call("GET", "/nope") == (404, captured("err_404")["body"])
    assert await server.call("GET", "/generate") == (405, captured("err_get_generate")["body"])


async def test_the_context_refuses_and_silently_cuts_as_captured(server: Server) -> None:
    _, info = await server.call("GET", "/server_info")
    context = info["max_req_input_len"] + 6
    status, found = await server.generate(context)
    assert status == 400
    assert "maximum context length" in found["error"]["message"]
    if server.real:
        return  # prompts of the whole context take a CPU minutes
    for length, message in ((context, "longer than the model's context length"), (context - 1, "exceeds the maximum allowed length")):
        status, found = await server.generate(1, ids=[20] * length)
        assert status == 400
        assert message in found["error"]["message"]
    status, reply = await server.generate(8, ids=[20] * (context - 8))
    assert (status, len(reply["output_ids"])) == (200, 6)
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


async def test_an_id_in_flight_is_refused_and_the_first_goes_on(server: Server) -> None:
    rid = uuid.uuid4().hex
    first = asyncio.create_task(server.generate(server.long, rid=rid))
    await server.running(1)
    assert await server.generate(4, rid=rid) == (400, {"error": {"message": f"Duplicate request ID detected: {rid}"}})
    assert (await first)[0] == 200


async def test_an_abort_gives_what_was_sampled_and_spares_the_others(server: Server) -> None:
    rid = uuid.uuid4().hex
    victim, other = asyncio.create_task(server.generate(server.long, rid=rid)), asyncio.create_task(server.generate(server.long))
    await server.running(2)
    assert await server.call("POST", "/abort_request", {"rid": rid}) == (200, "")
    _, reply = await victim
    assert_aligned(reply)
    assert 0 < len(reply["output_ids"]) < server.long
    assert reply["meta_info"]["finish_reason"] == captured("abort_running_victim")["body"]["meta_info"]["finish_reason"]
    assert len((await other)[1]["output_ids"]) == server.long


async def test_aborts_go_by_prefix_of_an_id_that_is_in_flight(server: Server) -> None:
    base = uuid.uuid4().hex
    one, ten = (asyncio.create_task(server.generate(server.long, rid=base + end)) for end in ("-1", "-10"))
    await server.running(2)
    await server.call("POST", "/abort_request", {"rid": base})
    assert not one.done()
    await server.call("POST", "/abort_request", {"rid": f"{base}-1"})
    assert {(await task)[1]["meta_info"]["finish_reason"]["type"] for task in (one, ten)} == {"abort"}


async def test_an_unknown_abort_is_answered_like_any(server: Server) -> None:
    assert await server.call("POST", "/abort_request", {"rid": "nobody"}) == (200, "")
    assert await server.call("POST", "/abort_request", {}) == (200, "")


async def test_a_label_that_moves_in_mid_generation_makes_two_spans(server: Server) -> None:
    await server.relabel("7", abort=False)
    task = asyncio.create_task(server.generate(server.long))
    await server.running(1)
    await server.relabel("8", abort=False)
    _, reply = await task
    assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == ["7", "8"]
    assert len(reply["output_ids"]) == server.long
    assert_aligned(reply)


async def test_a_new_label_aborts_everything_unless_told_not_to(server: Server) -> None:
    task = asyncio.create_task(server.generate(server.long))
    await server.running(1)
    status, body = await server.call("POST", "/update_weight_version", {"new_version": "9"})
    assert status == 200
    assert_like(body, captured("wv_update_weight_version_noabort")["body"])
    assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await server.call("GET", "/model_info"))[1]["weight_version"] == "9"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_holds_what_runs_and_what_comes(server: Server, mode: str) -> None:
    await server.relabel("3", abort=False)
    running = asyncio.create_task(server.generate(server.long))
    await server.running(1)
    assert await server.call("POST", "/pause_generation", {"mode": mode}) == (200, captured("pause_in_place")["body"])
    late_rid = uuid.uuid4().hex
    late = asyncio.create_task(server.generate(4, rid=late_rid))
    await asyncio.sleep(0.3)
    await server.call("POST", "/abort_request", {"rid": late_rid})
    await server.relabel("4", abort=False)
    assert (await server.call("GET", "/ready"))[0] == 503
    assert not running.done()
    assert not late.done()
    assert await server.call("POST", "/continue_generation", {}) == (200, captured("continue_twice")["body"])
    _, held = await running
    assert [span["version"] for span in held["meta_info"]["weight_versions"]] == ["3", "4"]
    assert held["meta_info"]["num_retractions"] == int(mode == "retract")
    assert len(held["output_ids"]) == server.long
    _, came = await late  # its abort was lost
    assert came["meta_info"]["finish_reason"]["type"] == "length"


async def load(server: Server, label: str, **body: Any) -> tuple[int, Any]:
    """The weights that are there, once more."""
    path = (await server.call("GET", "/model_info"))[1]["model_path"]
    return await server.call("POST", "/update_weights_from_disk", {"model_path": path, "weight_version": label} | body)


async def labelled(server: Server) -> str:
    label: str = (await server.call("GET", "/model_info"))[1]["weight_version"]
    return label


@pytest.mark.parametrize(("mode", "flush"), [("in_place", False), ("retract", True)])
async def test_weights_loaded_under_what_stands_still_make_two_spans(server: Server, mode: str, flush: bool) -> None:
    await server.relabel("0.3", abort=False)
    task = asyncio.create_task(server.generate(server.long))
    await server.running(1)
    await server.call("POST", "/pause_generation", {"mode": mode})
    status, body = await load(server, "0.4", flush_cache=flush)
    assert (status, body["success"]) == (200, True)
    assert_like(body, captured("upd_nopause_update_disk")["body"])
    assert await labelled(server) == "0.4"
    assert (await server.call("POST", "/flush_cache", {}))[0] == (200 if mode == "retract" else 400)
    await server.call("POST", "/continue_generation", {})
    _, reply = await task
    assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == ["0.3", "0.4"]
    assert len(reply["output_ids"]) == server.long
    assert_aligned(reply)


async def test_a_flush_in_place_is_told_as_a_failure_although_the_weights_moved(server: Server) -> None:
    await server.relabel("0.5", abort=False)
    task = asyncio.create_task(server.generate(server.long))
    await server.running(1)
    await server.call("POST", "/pause_generation", {"mode": "in_place"})
    assert await load(server, "0.6") == (400, captured("pause_inplace_update_disk_flush")["body"])
    assert await labelled(server) == "0.5"
    await server.call("POST", "/continue_generation", {})
    _, reply = await task
    assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == ["0.5", "0.6"]


async def test_a_path_that_is_not_there_leaves_weights_and_label(server: Server) -> None:
    await server.relabel("0.7", abort=False)
    status, body = await load(server, "0.8", model_path="/nope", flush_cache=False)
    assert (status, body["success"]) == (400, False)
    assert body["message"].startswith("Failed to get weights iterator")
    assert await labelled(server) == "0.7"
    assert (await server.generate(2))[1]["meta_info"]["weight_version"] == "0.7"


async def test_a_pause_and_a_continue_can_be_said_twice(server: Server) -> None:
    """As by one that takes over from another; also a pause by abort where everything stands still already."""
    task = asyncio.create_task(server.generate(server.long))
    await server.running(1)
    for mode in ("in_place", "in_place", "retract"):
        assert (await server.call("POST", "/pause_generation", {"mode": mode}))[0] == 200
    for _ in range(2):
        assert (await server.call("POST", "/continue_generation", {}))[0] == 200
    assert len((await task)[1]["output_ids"]) == server.long


async def test_a_pause_by_abort_ends_what_runs(server: Server) -> None:
    task = asyncio.create_task(server.generate(server.long))
    await server.running(1)
    assert (await server.call("POST", "/pause_generation", {}))[0] == 200
    assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    await server.call("POST", "/continue_generation", {})
    assert (await server.generate(2))[0] == 200


async def test_an_unknown_pause_is_refused(server: Server) -> None:
    status, found = await server.call("POST", "/pause_generation", {"mode": "zzz"})
    assert status == 400
    assert found["object"] == "error"


async def test_the_cache_is_not_flushed_under_a_running_request(server: Server) -> None:
    task = asyncio.create_task(server.generate(server.long))
    await server.running(1)
    assert await server.call("POST", "/flush_cache", {}) == (400, captured("flush_cache_busy")["body"])
    await task


async def test_a_server_describes_itself(server: Server) -> None:
    _, info = await server.call("GET", "/model_info")
    assert {"model_path", "tokenizer_path", "weight_version", "is_generation"} <= info.keys()
    _, details = await server.call("GET", "/server_info")
    assert {"max_req_input_len", "version", "frontend"} <= details.keys()
    assert ("standin" in details) is not server.real
    assert (await server.call("GET", "/health"))[0] == 200
    assert (await server.call("GET", "/ready"))[0] == 200
