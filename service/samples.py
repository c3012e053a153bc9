"""From a rollout's journal to the rows a trainer consumes. Pure: entries in, arrays out; cost O(tokens), no token looked at in Python.

Always: ids, mask, log-probabilities and versions of a sample have one length; the mask is 1 exactly on tokens that an engine sampled,
and each of those has that engine's own log-probability and version (P2). What does not fit is refused, never padded.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from service.errors import MisalignedTokensError
from service.journal import (
    AnyEntry,
    Extended,
    Generated,
    Observed,
    Opened,
    Prompted,
    Replied,
    Restored,
    SandboxOpened,
    Scored,
    Stopped,
    standing,
)
from service.progress import Environment
from service.records import Outcome
from service.trajectories import Sample, Timing, Trajectory

ID_BYTES = LOGPROB_BYTES = 4
"""Little-endian int32 and float32 in the journal."""

MAX_INT32 = 2**31 - 1


def build_samples(entries: Iterable[AnyEntry]) -> tuple[Sample, ...]:
    """The samples of one attempt, in order; their arrays may be read-only views of the journal's bytes.

    A sample in which nothing was sampled (the rollout stopped before its first turn) is left out unless it is the only one.

    Raises:
        MisalignedTokensError: the entries' ids, log-probabilities and version spans do not belong together.
    """
    drafts: list[_Draft] = []
    for entry in standing(entries):
        match entry:
            case Opened():
                drafts = []
            case Prompted(token_ids=data):
                drafts.append(_Draft(data))
            case Generated() if drafts:
                drafts[-1].generate(entry)
            case Extended(token_ids=data) if drafts:
                drafts[-1].append(data)
            case Generated() | Extended():
                raise MisalignedTokensError(f"a journal has {type(entry).__name__} before its first prompt")
    sampled = [draft for draft in drafts if draft.spans]
    return tuple(draft.sample() for draft in sampled or drafts[:1])


def build_trajectory(
    entries: Iterable[AnyEntry], *, rollout_id: str, index: int, outcome: str, ready_s: float = 0.0, metadata: dict[str, Any] | None = None
) -> Trajectory:
    """What a rollout produced: all but the arguments comes from its journal. Versions are -1 where nothing was sampled.

    Raises:
        MisalignedTokensError: as `build_samples`.
    """
    journal = standing(entries)
    end = _Summary(journal)
    return Trajectory(
        rollout_id=rollout_id,
        index=index,
        attempt=end.attempt,
        outcome=Outcome(outcome),
        stop_reason=end.stop_reason,
        reward=end.reward,
        reward_detail=orjson.loads(end.detail),
        samples=build_samples(journal),
        turns=end.turns,
        tool_calls=end.tool_calls,
        timing=Timing(**end.seconds, ready_s=ready_s),
        oldest_version=min(end.versions, default=-1),
        newest_version=max(end.versions, default=-1),
        environment_gap=end.environment.gap,
        metadata=metadata or {},
    )


class _Summary:
    """What a trajectory says beside its samples. `Progress` knows it too, but keeps ids and messages, which would double the work."""

    def __init__(self, entries: Iterable[AnyEntry]) -> None:
        self.attempt, self.turns, self.tool_calls = 1, 0, 0
        self.stop_reason, self.detail = "", "{}"
        self.reward: float | None = None
        self.versions: set[int] = set()
        self.environment = Environment()
        self.seconds = {"queued_s": 0.0, "sandbox_s": 0.0, "generate_s": 0.0, "tool_s": 0.0, "verify_s": 0.0}
        for entry in entries:
            self._add(entry)

    def _add(self, entry: AnyEntry) -> None:
        self.environment.apply(entry)
        match entry:
            case Generated(seconds=seconds, spans=spans):
                self.seconds["generate_s"] += seconds
                self.versions.update(version for version, _, start, end in spans if end > start and not entry.discarded)
            case Replied(calls=calls):
                self.turns += 1
                self.tool_calls += len(calls)
            case Observed(seconds=seconds):
                self.seconds["tool_s"] += seconds
            case SandboxOpened(seconds=seconds) | Restored(seconds=seconds):
                self.seconds["sandbox_s"] += seconds
            case Opened(attempt=attempt, queued_s=queued_s):
                self.attempt, self.seconds["queued_s"] = attempt, queued_s
            case Stopped(reason=reason):
                self.stop_reason = reason
            case Scored(reward=reward, detail=detail, seconds=seconds):
                self.reward, self.detail = reward, detail or "{}"
                self.seconds["verify_s"] += seconds


class _Draft:
    """One sample in the making: pieces of bytes, and which of its tokens were sampled."""

    def __init__(self, prompt: bytes) -> None:
        self.spans: list[tuple[int, int, int]] = []
        """(start, end, version) of sampled tokens."""
        self._ids: list[bytes] = []
        self._logprobs: list[bytes] = []
        """As many bytes as the ids of the same piece: zeros where nothing was sampled."""
        self._size = 0
        self.append(prompt)

    def append(self, data: bytes) -> None:
        """Ids that nobody sampled: a prompt, or what follows a turn; then a turn begins."""
        _check_whole(data, ID_BYTES)
        self._add(data, bytes(len(data)))
        self._turn = (self._size, len(self._ids), len(self.spans))

    def generate(self, entry: Generated) -> None:
        """Sampled ids. Discarded ones take the parts of the same turn with them: it is sampled anew."""
        if entry.discarded:
            self._size, pieces, spans = self._turn
            del self._ids[pieces:], self._logprobs[pieces:], self.spans[spans:]
            return
        _check_generation(entry)
        self.spans += [(self._size + start, self._size + end, version) for version, _, start, end in entry.spans if end > start]
        self._add(entry.token_ids, entry.logprobs)

    def _add(self, ids: bytes, logprobs: bytes) -> None:
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        self._size += len(ids) // ID_BYTES

    def sample(self) -> Sample:
        """T = all tokens of the sample."""
        versions = np.full(self._size, -1, dtype=np.int32)
        for start, end, version in self.spans:
            versions[start:end] = version
        token_ids = np.frombuffer(b"".join(self._ids), dtype="<i4")
        logprobs = np.frombuffer(b"".join(self._logprobs), dtype="<f4")
        _check_values(token_ids, logprobs)
        mask = (versions >= 0).view(np.uint8)  # every sampled token has a version of at least 0
        prompt_len = self.spans[0][0] if self.spans else self._size
        return Sample(token_ids=token_ids, loss_mask=mask, logprobs=logprobs, versions=versions, prompt_len=prompt_len)


def _check_values(token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
    if len(token_ids) and int(token_ids.min()) < 0:
        raise MisalignedTokensError("a journal has a negative token id")
    finite = np.isfinite(logprobs)
    if not finite.all():
        raise MisalignedTokensError(f"non_finite_logprob: token {int(finite.argmin())} of a sample has {logprobs[finite.argmin()]}")


def _check_whole(data: bytes, item_bytes: int) -> None:
    if len(data) % item_bytes:
        raise MisalignedTokensError(f"a journal has {len(data)} bytes where items of {item_bytes} belong")


def _check_generation(entry: Generated) -> None:
    """Its ids, log-probabilities and spans have one length, and every version fits the export."""
    _check_whole(entry.token_ids, ID_BYTES)
    _check_whole(entry.logprobs, LOGPROB_BYTES)
    count, scores = len(entry.token_ids) // ID_BYTES, len(entry.logprobs) // LOGPROB_BYTES
    if scores != count:
        raise MisalignedTokensError(f"logprob_mismatch: {count} sampled tokens with {scores} log-probabilities")
    covered = 0
    for version, _, start, end in entry.spans:
        if start != covered or end < start or not 0 <= version <= MAX_INT32:
            raise MisalignedTokensError(f"version span [{start}, {end}) of version {version} does not follow {covered} covered tokens")
        covered = end
    if covered != count:
        raise MisalignedTokensError(f"version spans cover {covered} of {count} sampled tokens")
