"""What SGLang's `/generate` answers, checked. Pure: bytes in, a `Generation` or an error out.

A reply is accepted only if it is aligned: entry i of the log-probabilities names id i of the output, every value is finite, every id is in
the vocabulary, and the version spans cover all of it. Nothing is padded or guessed. One repair is made, since the truth is in the reply:
an engine that trims the stop token off `output_ids` but not off the log-probabilities did sample it, so it is put back.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from service.errors import GeneratorError
from service.records import MAX_VERSION, FinishReason
from service.trajectories import Generation, VersionSpan

_MAX_LOGPROB = 3.0e38
"""Log-probabilities travel as float32; a larger magnitude would become infinite there."""

_MAX_MESSAGE = 500
"""Characters of an engine's error text that we carry on."""

_LABEL = re.compile(r"(?:(\d{1,9})\.)?(\d{1,10})")

_REFUSED = frozenset({400, 401, 403, 405, 413, 422})
"""Statuses that the same call would get again."""


class FinishReply(msgspec.Struct, frozen=True):
    type: str
    matched: Any = None
    message: str | None = None
    status_code: int | None = None


class SpanReply(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class MetaReply(msgspec.Struct, frozen=True):
    finish_reason: FinishReply
    output_token_logprobs: list[tuple[float | None, int, Any]]
    id: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    weight_version: str | None = None
    weight_versions: list[SpanReply] | None = None


class Reply(msgspec.Struct, frozen=True):
    """The part of a `/generate` answer that we read; other keys are skipped."""

    output_ids: list[int]
    meta_info: MetaReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a reply is held against. `version` and `lineage`: the oldest weights the call can have run on.

    labelled: every label must name a version. So it is once an update has labelled the job's generators: one that says anything else
    ("default") was started anew, with whatever weights it was started with.
    """

    rid: str
    prompt_tokens: int
    vocab_size: int
    stop_token_ids: Collection[int]
    version: int
    lineage: int
    labelled: bool = False


class UnlabelledError(GeneratorError):
    """The generator's weights are not those that it was labelled with."""


_decoder = msgspec.json.Decoder(Reply)


def decode(body: bytes) -> Reply:
    """Read a 200 answer.

    Raises:
        GeneratorError: the body is no such answer (retryable: another try may be answered properly).
    """
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        if b"NaN" not in body and b"Infinity" not in body:
            raise GeneratorError(f"malformed_reply: {error}", retryable=True) from error
    try:  # Python's JSON writes NaN and Infinity as bare words; read them, so that they are refused for what they are
        return msgspec.convert(json.loads(body), Reply)
    except (ValueError, RecursionError) as error:
        raise GeneratorError(f"malformed_reply: {error}"[:_MAX_MESSAGE], retryable=True) from error


def checked(reply: Reply, asked: Asked) -> Generation:
    """Turn a reply into a `Generation` whose parts are aligned.

    Raises:
        GeneratorError: it is not, or the engine reports a failure inside a 200.
    """
    meta = reply.meta_info
    finish = _finish(meta.finish_reason)
    if meta.id not in (None, asked.rid):
        raise _broken("wrong_request", f"the reply answers {meta.id!r}, not {asked.rid!r}")
    if meta.prompt_tokens not in (None, asked.prompt_tokens):
        cure = "start it without --allow-auto-truncate"
        raise _broken("prompt_mismatch", f"the engine read {meta.prompt_tokens} of {asked.prompt_tokens} prompt tokens; {cure}")
    token_ids = _aligned_ids(reply, finish, asked.stop_token_ids)
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < asked.vocab_size):
        raise _broken("unknown_token", f"a sampled id is outside the vocabulary of {asked.vocab_size}; is model.tokenizer the engine's?")
    matched = meta.finish_reason.matched
    return Generation(
        token_ids=token_ids,
        logprobs=_finite([entry[0] for entry in meta.output_token_logprobs]),
        spans=_spans(meta, len(reply.output_ids), len(token_ids), asked),
        finish=finish,
        matched=matched if isinstance(matched, int | str) else None,
        cached_tokens=meta.cached_tokens,
    )


def failure(status: int, body: bytes) -> GeneratorError:
    """The error for an answer that is not 200. A duplicate request id may be tried again, since each try has a new one."""
    message = error_message(body)
    if 300 <= status < 400:
        return GeneratorError(f"HTTP {status}: redirects are not followed; give the generator's final URL", retryable=False)
    if status in (401, 403):
        return GeneratorError(f"HTTP {status}: {message}; set the generator's api_key", retryable=False)
    retryable = status not in _REFUSED or "Duplicate request ID" in message
    return GeneratorError(f"HTTP {status}: {message}", retryable=retryable)


def error_message(body: bytes) -> str:
    """The text of an error body: SGLang has `{"error": text}`, `{"error": {"message"}}`, `{"message"}`, `{"detail"}` and plain text."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    text = found if isinstance(found, str) else json.dumps(found)
    return text.partition("\n\n")[0].strip()[:_MAX_MESSAGE] or "no reason given"


def read_label(label: str | None, *, version: int, lineage: int) -> tuple[int, int]:
    """(lineage, version) that a `weight_version` label names.

    "7" is version 7 of the current lineage, "2.7" version 7 of lineage 2. Any other label says nothing: the given pair is the oldest that
    it can stand for.
    """
    match = _LABEL.fullmatch(label or "")
    if match is None or not names_version(label):
        return lineage, version
    return (int(match[1]) if match[1] else lineage), int(match[2])


def names_version(label: str | None) -> bool:
    match = _LABEL.fullmatch(label or "")
    return match is not None and int(match[2]) <= MAX_VERSION


def not_older(label: str | None, than: str, *, lineage: int | None = None) -> bool:
    """Whether a label names a version that is at least the one that `than` names. lineage: of a label that names none; None: the same."""
    bound = read_label(than, version=0, lineage=0)
    return names_version(label) and read_label(label, version=0, lineage=bound[0] if lineage is None else lineage) >= bound


def _check_labels(labels: Sequence[str | None]) -> None:
    for label in labels:
        if not names_version(label):
            cure = "update its weights through the job, or label it with /update_weight_version"
            raise UnlabelledError(
                f"unlabelled: its weight_version is {label!r}, which names no version: was it restarted? {cure}", retryable=True
            )


def _broken(reason: str, detail: str) -> GeneratorError:
    return GeneratorError(f"{reason}: {detail}", retryable=True)


def _finish(finish: FinishReply) -> FinishReason:
    status = finish.status_code
    if status is not None and status >= 400:
        raise GeneratorError(f"aborted with status {status}: {finish.message}"[:_MAX_MESSAGE], retryable=status not in _REFUSED)
    try:
        return FinishReason(finish.type)
    except ValueError:
        raise _broken("malformed_reply", f"finish reason {finish.type[:50]!r} is none of stop, length, abort") from None


def _aligned_ids(reply: Reply, finish: FinishReason, stop_token_ids: Collection[int]) -> list[int]:
    """The sampled ids: those that the log-probabilities name, which must be the output's own."""
    named = [entry[1] for entry in reply.meta_info.output_token_logprobs]
    if named == reply.output_ids:
        return named
    trimmed = finish is FinishReason.STOP and named[:-1] == reply.output_ids and named[-1] in stop_token_ids
    if trimmed:
        return named
    raise _broken("logprob_mismatch", f"{len(reply.output_ids)} ids and {len(named)} log-probabilities do not name the same tokens")


def _finite(logprobs: Sequence[float | None]) -> list[float]:
    """All of them, or an error: null, NaN and infinities cannot be trained on."""
    finite = [value for value in logprobs if value is not None and -_MAX_LOGPROB < value < _MAX_LOGPROB]
    if len(finite) != len(logprobs):
        raise _broken("non_finite_logprob", f"{len(logprobs) - len(finite)} of {len(logprobs)} log-probabilities are null, NaN or infinite")
    return finite


def _spans(meta: MetaReply, reported: int, total: int, asked: Asked) -> tuple[VersionSpan, ...]:
    """Spans over `[0, total)`. `reported`: the output's own length, one less where a stop token was put back."""
    if total == 0:
        return ()
    if asked.labelled:
        _check_labels([span.version for span in meta.weight_versions or ()] or [meta.weight_version])
    if not meta.weight_versions:  # before SGLang 0.5.19: one label, the last token's; earlier tokens may be as old as what was asked
        lineage, version = min(
            read_label(meta.weight_version, version=asked.version, lineage=asked.lineage),
            (asked.lineage, asked.version),
        )
        return (VersionSpan(version=version, lineage=lineage, start=0, end=total),)
    spans = []
    at = 0
    for span in meta.weight_versions:
        end = total if span.end == reported else span.end
        if span.start != at or not at <= end <= total:
            raise _broken("version_mismatch", f"version spans leave gaps or overlap at token {at}")
        lineage, version = read_label(span.version, version=asked.version, lineage=asked.lineage)
        spans.append(VersionSpan(version=version, lineage=lineage, start=at, end=end))
        at = end
    if at != total:
        raise _broken("version_mismatch", f"version spans cover {at} of {total} tokens")
    return tuple(span for span in spans if span.end > span.start)
