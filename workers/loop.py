"""Every decision of one rollout. Pure: what is journaled goes in, the next step comes out.

The shell around it (`workers/rollout.py`) does what it is told, journals it, and asks again; a worker that takes a rollout over asks
the same question of the same journal and so does the same thing.
"""

from dataclasses import dataclass

from service.journal import Call
from service.progress import Progress
from service.records import FinishReason, JobSpec, Limits, SnapshotFields, StopReason

CONTEXT_RESERVE = 8
"""SGLang refuses prompts within 6 tokens of its context length and cuts generations 2 short of it."""


@dataclass(frozen=True, slots=True)
class OpenSample:
    """Render the messages so far as the first ids of a sample."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample up to `max_new_tokens` more tokens of the current turn."""

    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class BeginAnew:
    """The sandbox was written to by a policy that is `versions` behind: this attempt is over, and does not count."""

    versions: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Keep the sandbox's files before the next turn begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """The job's policy now, and how many versions it may be past the one that wrote to the sandbox last."""

    lineage: int
    version: int
    max_gap: int


def freshness(job: JobSpec, *, attempt: int, lineage: int, version: int) -> Freshness | None:
    """None where the job sets no bound, or the rollout has begun anew often enough: then it goes on, and its gap is told."""
    if job.max_environment_gap is None or attempt > job.max_requeues:
        return None
    return Freshness(lineage=lineage, version=version, max_gap=job.max_environment_gap)


@dataclass(frozen=True, slots=True)
class Parse:
    """The turn's tokens are complete; `cut`: by a limit, not by the model."""

    cut: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer this call: run it, or say what was wrong with it. The others of the turn follow one by one, in the model's order."""

    call: Call


@dataclass(frozen=True, slots=True)
class Extend:
    """Every call is answered: append the observations to the ids, or open the next sample where the template cannot extend."""


@dataclass(frozen=True, slots=True)
class Stop:
    reason: StopReason


@dataclass(frozen=True, slots=True)
class Verify:
    """Score what the rollout left behind."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to do."""


Step = OpenSample | Generate | BeginAnew | Snapshot | Parse | Answer | Extend | Stop | Verify | Finish


def next_step(
    progress: Progress,
    limits: Limits,
    *,
    context_tokens: int,
    snapshot: SnapshotFields | None = None,
    freshness: Freshness | None = None,
) -> Step:
    """What a rollout with this journal does next. `snapshot`: when the task wants one. `freshness`: where the job bounds it."""
    if progress.scored is not None:
        return Finish()
    if progress.stop is not None:
        return Verify()
    if progress.samples == 0:
        return OpenSample()
    if progress.reply is not None:
        return _after_reply(progress, limits, context_tokens)
    step = _in_turn(progress, limits, context_tokens)
    if isinstance(step, Generate) and freshness is not None and (behind := versions_behind(progress, freshness)) > freshness.max_gap:
        return BeginAnew(behind)
    due = snapshot is not None and isinstance(step, Generate) and snapshot_due(progress, snapshot)
    return Snapshot() if due else step


def _in_turn(progress: Progress, limits: Limits, context_tokens: int) -> Step:
    if progress.finish in (FinishReason.STOP, FinishReason.LENGTH):
        return Parse(cut=progress.finish is FinishReason.LENGTH)
    room = _room(progress, limits, context_tokens)
    if min(room.values()) <= 0:
        return Parse(cut=True) if progress.turn_tokens else Stop(_exhausted(room))
    if progress.wall_s >= limits.wall_s:
        return Stop(StopReason.WALL_LIMIT)
    return Generate(max_new_tokens=min(room.values()))


def _room(progress: Progress, limits: Limits, context_tokens: int) -> dict[StopReason, int]:
    """How many more tokens each limit leaves this turn."""
    return {
        StopReason.TURN_TOKEN_LIMIT: limits.turn_tokens - progress.turn_tokens,
        StopReason.TOKEN_LIMIT: limits.tokens - progress.sampled,
        StopReason.CONTEXT_LIMIT: context_tokens - CONTEXT_RESERVE - len(progress.ids),
    }


def _exhausted(room: dict[StopReason, int]) -> StopReason:
    """The limit that ended a turn: the tightest; an engine that stopped earlier than asked ran out of context."""
    reason = min(room, key=lambda limit: room[limit])
    return reason if room[reason] <= 0 else StopReason.CONTEXT_LIMIT


def _after_reply(progress: Progress, limits: Limits, context_tokens: int) -> Step:
    reply = progress.reply
    assert reply is not None
    if any(observed.submitted for observed in progress.observed.values()):
        return Stop(StopReason.SUBMITTED)
    if not reply.calls:
        if progress.finish is FinishReason.STOP:
            return Stop(StopReason.ANSWERED)
        return Stop(_exhausted(_room(progress, limits, context_tokens)))
    if progress.wall_s >= limits.wall_s:
        return Stop(StopReason.WALL_LIMIT)
    unanswered = progress.open_calls()
    if unanswered:
        return Answer(unanswered[0])
    if progress.turns >= limits.turns:
        return Stop(StopReason.TURN_LIMIT)
    if progress.sampled >= limits.tokens:
        return Stop(StopReason.TOKEN_LIMIT)
    return Extend()


def versions_behind(progress: Progress, freshness: Freshness) -> int:
    """How far the policy went on since it wrote to the sandbox, at the beginning of a turn; a turn that has begun is finished."""
    if progress.turn_tokens:
        return 0
    return progress.environment.versions_since(freshness.lineage, freshness.version) or 0


def snapshot_due(progress: Progress, wanted: SnapshotFields) -> bool:
    """Between two turns, with a sandbox: whether enough was done since the last one was due."""
    if progress.sandbox_id is None or progress.turn_tokens:
        return False
    turns = progress.turns - (progress.snapshot_due.turns if progress.snapshot_due else 0)
    seconds = progress.wall_s - progress.snapshot_wall_s
    enough = wanted.every_turns is not None and turns >= wanted.every_turns
    return turns > 0 and (enough or (wanted.every_s is not None and seconds >= wanted.every_s))


def needs_sandbox(call: Call) -> bool:
    return call.error is None and call.name != "submit"
