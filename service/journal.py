"""The journal of a rollout: what is appended. Pure: no I/O, no clock.

One list of entries per attempt, appended step by step; each costs what the step added. What follows from them is `service/progress.py`'s.
`Restored` goes back: everything between it and the snapshot it names counts as never done, except that its tokens were discarded.

A turn is: Generated (one or more: a cut generation goes on from its own ids) -> Replied (parsed; also the intent of its tool calls)
-> Observed (one per call) -> Extended (the same sample goes on) or Prompted (the template could not extend: the next sample opens).
Token ids are little-endian int32, log-probabilities little-endian float32 (nats), in bytes.
"""

from array import array
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from service.errors import JournalError
from service.records import FinishReason
from service.trajectories import Generation

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


class Snapshotted(Entry, frozen=True, kw_only=True, array_like=True, tag="snapshotted"):
    """A snapshot was due after `turns` turns. `id`: what the backend keeps it under, and the only one kept from here on; empty: none was
    taken (`live`: since processes lived in the sandbox, which no snapshot holds; else it failed) and the one before is still kept."""

    id: str
    turns: int
    live: bool
    seconds: float = 0.0


class Restored(Entry, frozen=True, kw_only=True, array_like=True, tag="restored"):
    """The sandbox was lost and made again from a snapshot: the rollout goes on from that `Snapshotted`, the journal's entry `cut_to`."""

    id: str
    boot_id: str
    cut_to: int
    seconds: float


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
    | Snapshotted
    | Restored
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


def standing(entries: Iterable[AnyEntry]) -> list[AnyEntry]:
    """The entries that count: without those that a `Restored` went back behind."""
    stand: list[tuple[int, AnyEntry]] = []
    for index, entry in enumerate(entries):
        while isinstance(entry, Restored) and stand and stand[-1][0] > entry.cut_to:
            stand.pop()
        stand.append((index, entry))
    return [entry for _, entry in stand]


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
