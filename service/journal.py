"""The journal of a rollout: what is appended, and what follows from it. Pure: no I/O, no clock.

One list of entries per attempt, appended step by step; each costs what the step added. `Progress.apply` is the only way state moves, for
a live worker and for one that takes over alike, so a resumed rollout stands exactly where its last journaled step left it.

A turn is: Generated (one or more: a cut generation goes on from its own ids) -> Replied (parsed; also the intent of its tool calls)
-> Observed (one per call) -> Extended (the same sample goes on) or Prompted (the template could not extend: the next sample opens).
Token ids are little-endian int32, log-probabilities little-endian float32 (nats), in bytes.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from service.errors import JournalError
from service.records import FinishReason, Generation, StopReason

WIRE_VERSION = 1
"""Written in `Opened`; a reader refuses a journal of a version it does not know (service/replay.py)."""


class Entry(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag_field="t"):
    """One step. `at`: unix time in seconds at the writer; for people and timings, never for order."""

    at: float


class Opened(Entry, frozen=True, kw_only=True, array_like=True, tag="opened"):
    """An attempt begins. `queued_s`: time from admission (or requeue) to this lease."""

    attempt: int
    worker: str
    queued_s: float = 0.0
    version: int = WIRE_VERSION


class Prompted(Entry, frozen=True, kw_only=True, array_like=True, tag="prompted"):
    """A sample opens with these ids; nothing in them was sampled."""

    token_ids: bytes


class Generated(Entry, frozen=True, kw_only=True, array_like=True, tag="generated"):
    """Tokens that a generator returned. spans: (version, lineage, start, end) over this entry's tokens.

    finish `abort` with `discarded` false: the turn goes on from these ids. `discarded`: the turn is sampled anew and these never train.
    """

    token_ids: bytes
    logprobs: bytes
    spans: list[tuple[int, int, int, int]]
    finish: str
    generator: str
    seconds: float
    cached_tokens: int = 0
    discarded: bool = False


class Call(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A tool call as it was understood. arguments: JSON. `error` set: answered in its place, never run; `raw`: what was sampled, cut."""

    id: str
    name: str
    arguments: str | None
    error: str | None = None
    raw: str = ""


class Replied(Entry, frozen=True, kw_only=True, array_like=True, tag="replied"):
    """The turn's tokens, parsed; the intent of every call in it (P5: durable before any of them runs)."""

    content: str
    calls: list[Call]
    reasoning: str | None = None


class Observed(Entry, frozen=True, kw_only=True, array_like=True, tag="observed"):
    """One call's answer, as the model is shown it. `submitted`: the call was `submit`."""

    call_id: str
    name: str
    text: str
    seconds: float = 0.0
    failed: bool = False
    submitted: bool = False


class Extended(Entry, frozen=True, kw_only=True, array_like=True, tag="extended"):
    """Template and observation ids that follow the turn in the same sample."""

    token_ids: bytes


class SandboxIntended(Entry, frozen=True, kw_only=True, array_like=True, tag="sandbox_intended"):
    """A sandbox of this name is about to be created."""

    backend: str
    name: str


class SandboxOpened(Entry, frozen=True, kw_only=True, array_like=True, tag="sandbox_opened"):
    """It exists under this id; durable before its first use (P9). `boot_id` names this very life of it, which alone keeps its calls'
    results; empty in journals of older versions, whose calls had no ids."""

    id: str
    seconds: float
    boot_id: str = ""


class SandboxLost(Entry, frozen=True, kw_only=True, array_like=True, tag="sandbox_lost"):
    """The model's own commands destroyed it."""

    detail: str


class Stopped(Entry, frozen=True, kw_only=True, array_like=True, tag="stopped"):
    reason: str
    detail: str = ""


class HandedBack(Entry, frozen=True, kw_only=True, array_like=True, tag="handed_back"):
    """A worker left in order."""


class Verifying(Entry, frozen=True, kw_only=True, array_like=True, tag="verifying"):
    """A verifier is about to run, in a sandbox of this name (empty: the rollout's own, or none)."""

    name: str = ""


class Scored(Entry, frozen=True, kw_only=True, array_like=True, tag="scored"):
    """The verdict. reward None: left to the trainer. detail: JSON."""

    reward: float | None
    detail: str
    seconds: float


AnyEntry = (
    Opened
    | Prompted
    | Generated
    | Replied
    | Observed
    | Extended
    | SandboxIntended
    | SandboxOpened
    | SandboxLost
    | Stopped
    | HandedBack
    | Verifying
    | Scored
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def encode(entry: AnyEntry) -> bytes:
    return _encoder.encode(entry)


def decode(data: bytes) -> AnyEntry:
    """Raises JournalError on bytes that no version of ours wrote."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise JournalError(f"an entry cannot be decoded ({error})") from error


def pack_ids(ids: "Sequence[int] | array[int]") -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return array("i", data).tolist()


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return np.asarray(logprobs, dtype="<f4").tobytes()


def generated(generation: Generation, *, at: float, discard_cut: bool) -> Generated:
    """The entry of a generation. discard_cut: a cut one cannot be continued, since its sampling state would start anew."""
    return Generated(
        at=at,
        token_ids=pack_ids(generation.token_ids),
        logprobs=pack_logprobs(generation.logprobs),
        spans=[(span.version, span.lineage, span.start, span.end) for span in generation.spans],
        finish=generation.finish,
        generator=generation.generator,
        seconds=generation.seconds,
        cached_tokens=generation.cached_tokens,
        discarded=discard_cut and generation.finish is FinishReason.ABORT,
    )


class Progress:
    """Where an attempt stands: the sum of its entries. `ids` are those of the open sample, prompt and partial turn included."""

    def __init__(self, entries: Iterable[AnyEntry] = ()) -> None:
        self.attempt = 1
        self.length = 0
        """Entries applied; the journal's next index."""
        self.samples = 0
        self.ids: array[int] = array("i")
        self.turn_start = 0
        """Index in `ids` of the current turn's first sampled token."""
        self.turns = 0
        """Whole turns generated."""
        self.sampled = 0
        """Sampled tokens that may train."""
        self.discarded = 0
        self.generating = False
        """The current turn has no Replied yet."""
        self.finish: FinishReason | None = None
        """Of the current turn's last generation; None before it, ABORT while it is cut."""
        self.generator = ""
        self.reply: Replied | None = None
        """The last turn's reply while its observations are not yet part of the ids."""
        self.observed: dict[str, Observed] = {}
        self.messages: list[dict[str, Any]] = []
        """What followed the task's own messages, in the OpenAI form."""
        self.tool_calls = 0
        self.seconds = {"sandbox": 0.0, "generate": 0.0, "tool": 0.0, "verify": 0.0}
        self.queued_s = 0.0
        self.oldest_version: int | None = None
        self.newest_version: int | None = None
        self.oldest_lineage: int | None = None
        self.sandbox_name: str | None = None
        self.sandbox_id: str | None = None
        self.boot_id = ""
        self.sandbox_lost = False
        self.verifier_name: str | None = None
        self.stop: Stopped | None = None
        self.scored: Scored | None = None
        for entry in entries:
            self.apply(entry)

    @property
    def wall_s(self) -> float:
        """Seconds that count against `limits.wall_s`."""
        return self.seconds["sandbox"] + self.seconds["generate"] + self.seconds["tool"]

    @property
    def stop_reason(self) -> StopReason | None:
        return StopReason(self.stop.reason) if self.stop else None

    def apply(self, entry: AnyEntry) -> None:
        """Move by one journaled step."""
        self.length += 1
        match entry:
            case Opened(attempt=attempt, queued_s=queued_s):
                self.attempt, self.queued_s = attempt, queued_s
            case Prompted(token_ids=data):
                self.ids = array("i", data)
                self.samples += 1
                self._await_turn()
            case Generated():
                self._generated(entry)
            case Replied(calls=calls):
                self.reply, self.generating = entry, False
                self.turns += 1
                self.tool_calls += len(calls)
                self.messages.append(assistant_message(entry))
            case Observed():
                self.observed[entry.call_id] = entry
                self.seconds["tool"] += entry.seconds
            case Extended(token_ids=data):
                self.ids.frombytes(data)
                self._await_turn()
            case SandboxIntended(name=name):
                self.sandbox_name = name
            case SandboxOpened(id=sandbox_id, seconds=seconds, boot_id=boot_id):
                self.sandbox_id, self.boot_id = sandbox_id, boot_id
                self.seconds["sandbox"] += seconds
            case SandboxLost():
                self.sandbox_lost = True
            case Stopped():
                self.stop = entry
            case Verifying(name=name):
                self.verifier_name = name
            case Scored(seconds=seconds):
                self.scored = entry
                self.seconds["verify"] += seconds

    def _await_turn(self) -> None:
        """The ids are complete up to the next turn: observations of the last one are in them."""
        if self.reply is not None:
            self.messages += [tool_message(self.observed[call.id]) for call in self.reply.calls if call.id in self.observed]
        self.turn_start = len(self.ids)
        self.reply, self.observed, self.finish, self.generating = None, {}, None, True

    def _generated(self, entry: Generated) -> None:
        self.seconds["generate"] += entry.seconds
        self.generator = entry.generator
        count = len(entry.token_ids) // 4
        if entry.discarded:
            self.discarded += count + len(self.ids) - self.turn_start
            self.sampled -= len(self.ids) - self.turn_start
            del self.ids[self.turn_start :]
            self.finish = None
            return
        self.ids.frombytes(entry.token_ids)
        self.sampled += count
        self.finish = FinishReason(entry.finish)
        for version, lineage, start, end in entry.spans:
            if end > start:
                self.oldest_version = version if self.oldest_version is None else min(self.oldest_version, version)
                self.newest_version = version if self.newest_version is None else max(self.newest_version, version)
                self.oldest_lineage = lineage if self.oldest_lineage is None else min(self.oldest_lineage, lineage)

    @property
    def turn_tokens(self) -> int:
        """Sampled tokens of the current, unfinished turn."""
        return len(self.ids) - self.turn_start

    def turn_ids(self) -> list[int]:
        return self.ids[self.turn_start :].tolist()

    def open_calls(self) -> list[Call]:
        """Calls of the last reply that have no observation yet, in the order the model made them."""
        return [call for call in self.reply.calls if call.id not in self.observed] if self.reply else []


def assistant_message(reply: Replied) -> dict[str, Any]:
    """The OpenAI form of a reply; calls that could not be understood stand apart, where no chat template looks."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
        if call.error is None
    ]
    if calls:
        message["tool_calls"] = calls
    refused = [{"id": call.id, "raw": call.raw, "error": call.error} for call in reply.calls if call.error is not None]
    if refused:
        message["invalid_tool_calls"] = refused
    return message


def tool_message(observed: Observed) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": observed.call_id, "name": observed.name, "content": observed.text}
