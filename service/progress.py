"""Where an attempt stands: what follows from its journal. Pure: no I/O, no clock.

`Progress.apply` is the only way state moves, for a live worker and for one that takes over alike, so a resumed rollout stands exactly where
its last journaled step left it; one that went back to a snapshot, where that snapshot was taken.
"""

import copy
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from service.errors import JournalError
from service.journal import (
    AnyEntry,
    Call,
    Extended,
    Generated,
    Observed,
    Opened,
    Prompted,
    Replied,
    Restored,
    SandboxIntended,
    SandboxLost,
    SandboxOpened,
    Scored,
    Snapshotted,
    Stopped,
    Verifying,
)
from service.records import FinishReason, StopReason


@dataclass(slots=True)
class Environment:
    """How far the policy went on without the sandbox: whose tokens wrote to it last, and whose came next.

    gap: the largest number of versions between a call that ran and the turn after it, within a lineage. written: (lineage, version) of the
    newest token of the turn whose call ran last; None: none has run.
    """

    gap: int = 0
    written: tuple[int, int] | None = None
    _sampled: tuple[int, int] | None = None
    _refused: frozenset[str] = frozenset()

    def apply(self, entry: AnyEntry) -> None:
        match entry:
            case Generated(spans=spans, discarded=False):
                pairs = [(lineage, version) for version, lineage, start, end in spans if end > start]
                if pairs:
                    self.gap = max(self.gap, self.versions_since(*pairs[0]) or 0)
                    self._sampled = pairs[-1]
            case Replied(calls=calls):
                self._refused = frozenset(call.id for call in calls if call.error is not None)
            case Observed(call_id=call_id, submitted=False) if call_id not in self._refused:
                self.written = self._sampled

    def versions_since(self, lineage: int, version: int) -> int | None:
        """Versions between the last call and this one; None: nothing was written, or in another lineage."""
        if self.written is None or self.written[0] != lineage:
            return None
        return max(0, version - self.written[1])


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
        """Sampled tokens that the attempt gave up."""
        self.cut_back = 0
        """Those of them that lay behind a snapshot that it went back to."""
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
        self.environment = Environment()
        self.sandbox_name: str | None = None
        self.sandbox_id: str | None = None
        self.boot_id = ""
        self.sandbox_lost = False
        self.snapshot: Snapshotted | None = None
        """The one to go back to; None where there is none."""
        self.snapshot_at = 0
        """Its index."""
        self.snapshot_due: Snapshotted | None = None
        """The last time that one was due, whether it was taken or not."""
        self.snapshot_wall_s = 0.0
        """`wall_s` then."""
        self.restores = 0
        self._kept: Progress | None = None
        """This, as it was after `snapshot`."""
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
        self.environment.apply(entry)
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
            case Snapshotted():
                self._snapshotted(entry)
            case Restored():
                self._restored(entry)
            case Stopped():
                self.stop = entry
            case Verifying(name=name):
                self.verifier_name = name
            case Scored(seconds=seconds):
                self.scored = entry
                self.seconds["verify"] += seconds

    def _snapshotted(self, entry: Snapshotted) -> None:
        self.snapshot_due, self.snapshot_wall_s = entry, self.wall_s
        if entry.id:
            self.snapshot, self.snapshot_at = entry, self.length - 1
            self._kept = self._copied()

    def _restored(self, entry: Restored) -> None:
        kept = self._kept
        if kept is None or entry.cut_to != self.snapshot_at:
            raise JournalError(f"entry {self.length - 1} goes back to entry {entry.cut_to}, which is not the last snapshot")
        length, restores, tokens = self.length, self.restores + 1, self.sampled + self.discarded
        cut_back = self.cut_back + self.sampled - kept.sampled
        vars(self).update(vars(kept._copied()))
        self._kept, self.length, self.restores = kept, length, restores
        self.discarded, self.cut_back = tokens - self.sampled, cut_back
        self.sandbox_id, self.boot_id = entry.id, entry.boot_id
        self.seconds["sandbox"] += entry.seconds

    def _copied(self) -> "Progress":
        copied = copy.copy(self)
        copied.ids, copied.messages, copied.environment = self.ids[:], self.messages[:], copy.copy(self.environment)
        copied.observed, copied.seconds = dict(self.observed), dict(self.seconds)
        copied._kept = None
        return copied

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
