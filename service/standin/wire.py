"""SGLang's words: the request that the stand-in reads, the replies and error bodies that it writes, as captured from SGLang 0.5.23."""

import time
from typing import Any

import msgspec
import orjson
from aiohttp import web

from service.standin.engine import Running
from service.standin.sampler import Plan

SAMPLING_KEYS = [
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex", "ebnf", "structural_tag", "ignore_eos"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed"),
    *("custom_params", "beam_width", "watermark", "choice"),
]

DEFAULT_MAX_NEW_TOKENS = 128


class GenerateRequest(msgspec.Struct, frozen=True):
    """Unknown top-level keys are ignored, as by SGLang."""

    input_ids: list[int] | None = None
    text: str | list[str] | None = None
    sampling_params: dict[str, Any] = {}
    rid: str | None = None
    return_logprob: bool = False
    stream: bool = False


class RefusedError(Exception):
    """An answer other than 200. `body`: a JSON object."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


def refused(message: str) -> RefusedError:
    """A 400 of the tokenizer manager."""
    return RefusedError(400, {"error": {"message": message}})


def invalid(message: str) -> RefusedError:
    """A 400 of the HTTP layer's validation."""
    return RefusedError(
        400, {"object": "error", "message": f"1 validation error:\n  {message}", "type": "Bad Request", "param": None, "code": 400}
    )


def answer(body: object, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def checked_request(body: bytes, content_type: str) -> GenerateRequest:
    """Raises RefusedError with the body that SGLang answers."""
    if content_type != "application/json":
        raise invalid(
            "{'type': 'dataclass_type', 'loc': ('body',), 'msg': 'Input should be a dictionary or an instance of GenerateReqInput'}"
        )
    try:
        request = msgspec.json.decode(body, type=GenerateRequest)
    except msgspec.MsgspecError as error:
        raise invalid(f"{{'type': 'value_error', 'loc': ('body',), 'msg': '{error}'}}") from error
    unknown = [key for key in request.sampling_params if key not in SAMPLING_KEYS]
    if unknown:
        raise RefusedError(
            400, {"error": f"unknown field `{unknown[0]}`, expected one of " + ", ".join(f"`{key}`" for key in SAMPLING_KEYS)}
        )
    _check_values(request.sampling_params)
    if request.stream or request.sampling_params.get("n", 1) != 1 or request.sampling_params.get("json_schema"):
        raise refused("The stand-in generator has no streaming, no n > 1 and no json_schema.")
    return request


def _check_values(params: dict[str, Any]) -> None:
    temperature, top_p = params.get("temperature", 1.0), params.get("top_p", 1.0)
    if not (isinstance(temperature, int | float) and 0 <= temperature < float("inf")):
        raise refused(f"temperature must be a non-negative finite number, got {temperature}.")
    if not (isinstance(top_p, int | float) and 0 < top_p <= 1):
        raise refused(f"top_p must be in (0, 1], got {top_p}.")
    for name in ("max_new_tokens", "min_new_tokens"):
        value = params.get(name)
        if value is not None and not (isinstance(value, int) and value >= 0):
            raise refused(f"{name} must be a non-negative integer, got {value}.")


def prompt_of(request: GenerateRequest) -> list[int]:
    """The one prompt of ids; the stand-in takes neither text nor batches."""
    if request.input_ids is None and request.text is None:
        raise refused("Either text, input_ids or input_embeds should be provided.")
    if request.input_ids is None:
        raise refused("The stand-in generator takes one prompt of input_ids a call.")
    if not request.input_ids:
        raise refused("input_ids cannot be empty.")
    return request.input_ids


def output_limit(prompt_tokens: int, max_new_tokens: int | None, context_tokens: int) -> int:
    """How many tokens may follow: refused where SGLang refuses, and silently fewer where it silently cuts."""
    if prompt_tokens >= context_tokens:
        raise refused(f"The input ({prompt_tokens} tokens) is longer than the model's context length ({context_tokens} tokens).")
    if max_new_tokens is not None and prompt_tokens + max_new_tokens > context_tokens:
        raise refused(
            f"Requested token count exceeds the model's maximum context length of {context_tokens} tokens. You requested a total of "
            f"{prompt_tokens + max_new_tokens} tokens: {prompt_tokens} tokens from the input messages and {max_new_tokens} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within the limit."
        )
    longest = max_input(context_tokens)
    if prompt_tokens > longest:
        cure = "Use a shorter input or enable --allow-auto-truncate."
        raise refused(f"Input length ({prompt_tokens} tokens) exceeds the maximum allowed length ({longest} tokens). {cure}")
    return min(DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens, context_tokens - 2 - prompt_tokens)


def max_input(context_tokens: int) -> int:
    return context_tokens - 6


def finish_reason(running: Running, plan: Plan) -> dict[str, Any]:
    if not running.over:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if plan.stopped_by is not None:
        return {"type": "stop", "matched": plan.stopped_by}
    return {"type": "length", "length": running.total}


def meta_info(running: Running, plan: Plan, *, prompt_tokens: int, logprobs: bool, started: float) -> dict[str, Any]:
    """`meta_info` of a finished request, aborted ones included."""
    count = running.tokens
    meta: dict[str, Any] = {
        "id": running.rid,
        "finish_reason": finish_reason(running, plan),
        "prompt_tokens": prompt_tokens,
        "weight_version": running.spans[-1].version,
        "num_retractions": running.retractions,
        "reasoning_tokens": 0,
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_versions": [{"version": span.version, "start": span.start, "end": span.end} for span in running.spans],
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": time.monotonic() - started,
        "response_sent_to_client_ts": time.time(),
    }
    if logprobs:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [(value, token, None) for value, token in zip(plan.logprobs[:count], plan.ids, strict=False)]
        meta["output_token_logprobs_length"] = count
    return meta
