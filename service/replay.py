"""A journal read back, by a worker that takes a rollout over: what no worker can have written is refused, never guessed at. Pure.

What always holds: every journal that `next_step` led to is read; whatever is refused is named with its index, so that a person finds it.
"""

from collections.abc import Iterable

from service.errors import JournalError
from service.journal import (
    WIRE_VERSION,
    AnyEntry,
    Extended,
    Generated,
    HandedBack,
    Observed,
    Opened,
    Prompted,
    Replied,
    Restored,
    Scored,
    Snapshotted,
    Stopped,
    Verifying,
    decode,
)
from service.progress import Progress
from service.records import FinishReason, StopReason

ID_BYTES = 4
"""Of a token id and of a log-probability alike."""

OF_A_TURN = (Prompted, Generated, Replied, Observed, Extended)


def replayed(entries: Iterable[AnyEntry]) -> Progress:
    """Where the attempt stands.

    Raises:
        JournalError: of a version that this process does not know, or an entry that cannot follow those before it.
    """
    progress = Progress()
    for entry in entries:
        if why := refusal(progress, entry):
            raise JournalError(f"{_named(entry, progress.length)} {why}")
        progress.apply(entry)
    return progress


def readable(journal: Iterable[bytes]) -> tuple[list[AnyEntry], str | None]:
    """The entries before the first that cannot be decoded or cannot follow, and what is wrong with that one; None: nothing is."""
    entries: list[AnyEntry] = []
    progress = Progress()
    for data in journal:
        try:
            entry = decode(data)
        except JournalError as error:
            return entries, f"journal: entry {len(entries)}: {error}"
        if why := refusal(progress, entry):
            return entries, f"journal: {_named(entry, len(entries))} {why}"
        progress.apply(entry)
        entries.append(entry)
    return entries, None


def _named(entry: AnyEntry, index: int) -> str:
    return f"entry {index} ({type(entry).__struct_config__.tag})"


def refusal(progress: Progress, entry: AnyEntry) -> str | None:
    """Why `entry` cannot be the next one; None where it can."""
    if isinstance(entry, Opened) != (progress.length == 0):
        return "is out of place: an attempt is opened once, by its first entry"
    if isinstance(entry, Opened) and not 1 <= entry.version <= WIRE_VERSION:
        return f"is of wire version {entry.version}, and this process knows 1 to {WIRE_VERSION}: upgrade it"
    if progress.scored is not None and not isinstance(entry, HandedBack):
        return "follows the verdict"
    if progress.stop is not None and isinstance(entry, OF_A_TURN):
        return "follows the stop"
    return _in_turn(progress, entry)


def _in_turn(progress: Progress, entry: AnyEntry) -> str | None:
    match entry:
        case Prompted(token_ids=data) | Extended(token_ids=data):
            return _next_turn(progress, entry) or (f"has {len(data)} bytes of ids" if len(data) % ID_BYTES else None)
        case Generated():
            return _generated(progress, entry)
        case Replied() if not progress.generating:
            return "replies to no turn"
        case Observed() if entry.call_id not in {call.id for call in progress.open_calls()}:
            return f"answers {entry.call_id!r}, which is no open call"
        case Snapshotted() if progress.turn_tokens or not progress.generating:
            return "is taken inside a turn"
        case Restored() if progress.snapshot is None or entry.cut_to != progress.snapshot_at:
            return f"goes back to entry {entry.cut_to}, which is not the last snapshot"
        case Stopped() if entry.reason not in set(StopReason):
            return f"has the unknown reason {entry.reason!r}"
        case Verifying() | Scored() if progress.stop is None:
            return "comes before the stop"
    return None


def _next_turn(progress: Progress, entry: Prompted | Extended) -> str | None:
    if progress.samples == 0:
        return None if isinstance(entry, Prompted) else "extends no sample"
    if progress.reply is None:
        return "comes before the turn's reply"
    return "comes before the turn's calls are answered" if progress.open_calls() else None


def _generated(progress: Progress, entry: Generated) -> str | None:
    if not progress.generating or progress.finish not in (None, FinishReason.ABORT):
        return "goes on with a turn that is over"
    if entry.finish not in set(FinishReason):
        return f"has the unknown finish reason {entry.finish!r}"
    if len(entry.token_ids) != len(entry.logprobs) or len(entry.token_ids) % ID_BYTES:
        return f"has {len(entry.token_ids)} bytes of ids and {len(entry.logprobs)} of log-probabilities"
    return None
