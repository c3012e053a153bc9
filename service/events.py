"""A rollout's journal as server-sent events, readable by people: texts as they are, token ids as counts.

An event's id is `<attempt>-<index>`; a client that comes back with `Last-Event-ID` goes on after it. When the rollout has ended and
everything was sent, one event `ended` (id `<attempt>-end`) closes the stream. What cannot be read of a journal is an event `damaged`.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.errors import BusyError, JournalError, NotFoundError, UnavailableError
from service.groups import Groups, RolloutRecord
from service.journal import AnyEntry, Extended, Generated, Prompted, Replied, Scored, decode
from service.leases import Leases
from service.metrics import Metrics

STREAM_S = 100.0
"""Platforms cut streams not much later; a cut of our own is clean and is resumed."""
HEARTBEAT_S = 15.0
"""Proxies close what is silent for longer; also how a vanished client is noticed."""
MIN_POLL_S, MAX_POLL_S = 0.1, 2.0

ENDED = frozenset({"ended", "cancelled", "failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The next event to send."""

    attempt: int = 1
    index: int = 0


def position_after(last_event_id: str | None) -> Position | None:
    """Where a client goes on; None: it has seen the end. An id that is not ours starts from the beginning."""
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9}|end)", last_event_id or "")
    if match is None:
        return Position()
    if match.group(2) == "end":
        return None
    return Position(attempt=int(match.group(1)), index=int(match.group(2)) + 1)


def event_data(entry: AnyEntry) -> dict[str, Any]:
    """An entry as people read it."""
    data = msgspec.structs.asdict(entry)
    match entry:
        case Prompted(token_ids=ids) | Extended(token_ids=ids):
            data["token_ids"] = None
            data["tokens"] = len(ids) // 4
        case Generated(token_ids=ids, spans=spans):
            data |= {"token_ids": None, "logprobs": None, "tokens": len(ids) // 4}
            data["spans"] = [{"version": v, "lineage": lin, "start": s, "end": e} for v, lin, s, e in spans]
        case Replied(calls=calls):
            data["calls"] = [msgspec.structs.asdict(call) for call in calls]
        case Scored(detail=detail):
            data["detail"] = detail_object(detail)
    return {name: value for name, value in data.items() if name not in ("token_ids", "logprobs")}


def detail_object(detail: str) -> Any:
    """Details are JSON text in the store; what is empty or not JSON stays text."""
    try:
        return orjson.loads(detail) if detail else {}
    except orjson.JSONDecodeError:
        return detail


def entry_event(event_id: str, data: bytes) -> bytes:
    """An entry as its event; in the place of one that no version of ours wrote, an event `damaged` that says so."""
    try:
        entry = decode(data)
    except JournalError as error:
        return event(event_id=event_id, name="damaged", data={"error": f"journal: {error}"})
    return event(event_id=event_id, name=name_of(entry), data=event_data(entry))


def event(*, event_id: str, name: str, data: dict[str, Any]) -> bytes:
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id.encode(), name.encode(), orjson.dumps(data))


class EventStreams:
    """The open event streams of one gateway: at most `limit`, all ended by `stopping`."""

    def __init__(self, *, limit: int, stopping: asyncio.Event, metrics: Metrics) -> None:
        self._limit = limit
        self._stopping = stopping
        self._metrics = metrics
        self._open = 0

    def take(self) -> None:
        """Raises BusyError when all are taken. Each `take` needs one `free`."""
        if self._open >= self._limit:
            raise BusyError(f"{self._limit} event streams are open; close one or come back later", retry_after_s=5)
        self._open += 1
        self._metrics.event_streams.set(self._open)

    def free(self) -> None:
        self._open -= 1
        self._metrics.event_streams.set(self._open)

    async def pause(self, seconds: float) -> bool:
        """Wait; True when the gateway is stopping."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True


class EventResponse(StreamingResponse):
    """Holds one place of `streams` from its making to its end, however it ends."""

    def __init__(self, streams: EventStreams, content: AsyncIterator[bytes]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        streams.take()
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.free()


class RolloutEvents:
    """One client's walk over one rollout's journal."""

    def __init__(self, groups: Groups, leases: Leases, streams: EventStreams) -> None:
        self._groups = groups
        self._leases = leases
        self._streams = streams

    async def stream(self, rollout_id: str, start: Position) -> AsyncIterator[bytes]:
        """Events until the rollout's end, the gateway's, or `STREAM_S`."""
        position, ends_at, sent_at, poll_s = start, time.monotonic() + STREAM_S, time.monotonic(), MIN_POLL_S
        yield b"retry: 1000\n\n"
        while True:
            try:
                record, position, events = await self._next(rollout_id, position)
            except (NotFoundError, UnavailableError):
                return  # deleted meanwhile, or the store is away: the client's next call says which
            if events:
                yield b"".join(events)
                sent_at, poll_s = time.monotonic(), MIN_POLL_S
            elif record.state in ENDED:
                yield self._ended(record)
                return
            elif time.monotonic() - sent_at >= HEARTBEAT_S:
                yield b": still here\n\n"
                sent_at = time.monotonic()
            if time.monotonic() >= ends_at or await self._streams.pause(poll_s):
                return
            poll_s = min(poll_s * 1.5, MAX_POLL_S)

    async def _next(self, rollout_id: str, position: Position) -> tuple[RolloutRecord, Position, list[bytes]]:
        """What is new. The record is read again after the journal, since an attempt in between would mix two journals."""
        record = await self._groups.rollout(rollout_id)
        if record.attempt != position.attempt:
            position = Position(attempt=record.attempt)
        entries = await self._leases.raw_journal(rollout_id, start=position.index)
        if entries and (await self._groups.rollout(rollout_id)).attempt != position.attempt:
            return record, position, [b": a new attempt begins\n\n"]
        events = [entry_event(f"{position.attempt}-{position.index + number}", data) for number, data in enumerate(entries)]
        return record, Position(attempt=position.attempt, index=position.index + len(entries)), events

    @staticmethod
    def _ended(record: RolloutRecord) -> bytes:
        data = {"state": record.state, "outcome": record.outcome, "stop_reason": record.stop_reason, "reward": record.reward}
        return event(event_id=f"{record.attempt}-end", name="ended", data=data)


def name_of(entry: AnyEntry) -> str:
    return str(type(entry).__struct_config__.tag)
