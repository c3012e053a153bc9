"""Going back to a snapshot: whatever came after it, the rollout then stands where one stands that never went past it."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sandboxes.base import SandboxLostError
from service.errors import JournalError
from service.journal import AnyEntry, Generated, Restored, SandboxOpened, Snapshotted, decode, encode, standing
from service.progress import Progress
from service.records import Limits, SandboxFields, SnapshotFields
from service.samples import build_samples, build_trajectory
from tests.unit.test_loop import CONTEXT, LIMITS, TURN, generated, lives, prompted, replied
from workers.attempt_sandbox import MAX_RESTORES, way_back
from workers.endings import RestartError
from workers.loop import Generate, Snapshot, next_step

OPENED = SandboxOpened(at=0.0, id="box0", seconds=0.5, boot_id="b0")
HISTORY = frozenset({"length", "discarded", "cut_back", "restores", "snapshot_at", "_kept"})
"""What tells of the way here; all else says where a rollout stands."""


def snapshotted(turns: int, snapshot_id: str = "s", *, live: bool = False) -> Snapshotted:
    return Snapshotted(at=0.0, id=snapshot_id, turns=turns, live=live, seconds=0.1)


def restored(cut_to: int, number: int = 1) -> Restored:
    return Restored(at=0.0, id=f"box{number}", boot_id=f"b{number}", cut_to=cut_to, seconds=0.25)


def where(progress: Progress) -> dict[str, Any]:
    return {name: value for name, value in vars(progress).items() if name not in HISTORY}


def tokens(entries: list[AnyEntry]) -> int:
    return sum(len(entry.token_ids) // 4 for entry in entries if isinstance(entry, Generated))


@dataclass
class Story:
    """A journal that goes back now and then, and `straight`: that of a rollout to which it never happened."""

    life: list[AnyEntry]
    journal: list[AnyEntry] = field(default_factory=list)
    straight: list[AnyEntry] = field(default_factory=list)
    lived: int = 0
    kept: tuple[int, int, int] | None = None
    """Of the last snapshot: its index here and there, and how much of `life` was lived by then."""

    def live(self, steps: int) -> None:
        some = self.life[self.lived : self.lived + steps]
        self.lived += len(some)
        self.add(*some)

    def add(self, *entries: AnyEntry) -> None:
        self.journal += entries
        self.straight += entries

    def snapshot(self, snapshot_id: str) -> None:
        self.add(snapshotted(Progress(self.journal).turns, snapshot_id, live=not snapshot_id))
        if snapshot_id:
            self.kept = (len(self.journal) - 1, len(self.straight) - 1, self.lived)

    def go_back(self, number: int) -> None:
        if self.kept is None:
            return
        here, there, self.lived = self.kept
        back = restored(here, number)
        self.journal.append(back)
        self.straight[there + 1 :] = [SandboxOpened(at=0.0, id=back.id, seconds=back.seconds, boot_id=back.boot_id)]


@st.composite
def stories(draw: st.DrawFn) -> tuple[Limits, int, Story]:
    limits, context, life = draw(lives())
    story = Story(life)
    story.live(1)
    story.add(OPENED)
    for number in range(draw(st.integers(1, 12))):
        match draw(st.sampled_from(["live", "snapshot", "live", "failed", "back"])):
            case "live":
                story.live(draw(st.integers(1, 12)))
            case "snapshot":
                story.snapshot(f"s{number}")
            case "failed":
                story.snapshot("")
            case "back":
                story.go_back(number)
    return limits, context, story


@given(stories())
def test_a_rollout_that_went_back_stands_where_one_stands_that_never_went_on(told: tuple[Limits, int, Story]) -> None:
    limits, context, story = told
    went_back, straight = Progress(decode(encode(entry)) for entry in story.journal), Progress(story.straight)
    assert where(went_back) == where(straight)
    assert next_step(went_back, limits, context_tokens=context) == next_step(straight, limits, context_tokens=context)
    assert went_back.length == len(story.journal)
    assert went_back.sampled + went_back.discarded == tokens(story.journal)  # every token is accounted for
    assert 0 <= went_back.cut_back <= went_back.discarded


@given(stories())
def test_what_is_exported_is_what_stands(told: tuple[Limits, int, Story]) -> None:
    _, _, story = told
    exported, straight = build_samples(story.journal), build_samples(story.straight)
    assert [sample.token_ids.tolist() for sample in exported] == [sample.token_ids.tolist() for sample in straight]
    assert [sample.logprobs.tolist() for sample in exported] == [sample.logprobs.tolist() for sample in straight]
    assert sum(int(sample.loss_mask.sum()) for sample in exported) == Progress(story.journal).sampled
    shown, said = (build_trajectory(journal, rollout_id="r", index=0, outcome="completed") for journal in (story.journal, story.straight))
    assert (shown.turns, shown.tool_calls, shown.timing) == (said.turns, said.tool_calls, said.timing)


def test_going_back_takes_turns_calls_time_and_tokens_back() -> None:
    entries = [prompted(), OPENED, *TURN, snapshotted(1), *TURN, *TURN, generated(3, "abort"), restored(6)]
    progress = Progress(entries)
    assert (progress.turns, progress.tool_calls, progress.sampled, progress.discarded, progress.cut_back) == (1, 1, 5, 13, 13)
    assert (progress.sandbox_id, progress.boot_id, progress.restores) == ("box1", "b1", 1)
    assert progress.wall_s == pytest.approx(0.5 + 0.1 + 0.25)
    assert progress.snapshot is not None  # to go back to once more
    assert standing(entries) == [*entries[:7], entries[-1]]


def test_a_rollout_that_had_stopped_goes_on() -> None:
    """Its verification needs what the sandbox held."""
    entries = [prompted(), OPENED, *TURN, snapshotted(1), generated(2), replied(), restored(6)]
    assert next_step(Progress(entries), LIMITS, context_tokens=CONTEXT) == Generate(max_new_tokens=40)


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([prompted(), OPENED, restored(1)], id="no-snapshot"),
        pytest.param([prompted(), OPENED, *TURN, snapshotted(1), *TURN, restored(5)], id="another-entry"),
        pytest.param([prompted(), OPENED, *TURN, snapshotted(1), snapshotted(1), restored(6)], id="one-that-is-kept-no-more"),
    ],
)
def test_a_journal_that_goes_back_to_nothing_is_refused(entries: list[AnyEntry]) -> None:
    with pytest.raises(JournalError, match="goes back"):
        Progress(entries)


@pytest.mark.parametrize(
    ("wanted", "entries", "due"),
    [
        pytest.param({"every_turns": 1}, [prompted(), OPENED], False, id="before-the-first-turn"),
        pytest.param({"every_turns": 1}, [prompted(), *TURN], False, id="no-sandbox"),
        pytest.param({"every_turns": 1}, [prompted(), OPENED, *TURN], True, id="after-a-turn"),
        pytest.param({"every_turns": 1}, [prompted(), OPENED, *TURN, generated(2, "abort")], False, id="inside-a-turn"),
        pytest.param({"every_turns": 2}, [prompted(), OPENED, *TURN], False, id="not-yet"),
        pytest.param({"every_turns": 2}, [prompted(), OPENED, *TURN, snapshotted(1), *TURN], False, id="counted-from-the-last-one"),
        pytest.param({"every_turns": 1}, [prompted(), OPENED, *TURN, snapshotted(1, "")], False, id="one-that-failed-is-not-tried-at-once"),
        pytest.param({"every_turns": 1}, [prompted(), OPENED, *TURN, snapshotted(1), *TURN[:3]], False, id="observations-not-in-yet"),
        pytest.param({"every_s": 0.5}, [prompted(), OPENED, *TURN], True, id="time-with-the-start-of-the-sandbox"),
        pytest.param({"every_s": 0.5}, [prompted(), OPENED, *TURN, snapshotted(1), *TURN], False, id="time-since-the-last-one"),
        pytest.param({"every_s": 0.05}, [prompted(), OPENED, *TURN, snapshotted(1), *TURN], True, id="time-is-over"),
    ],
)
def test_when_one_is_due(wanted: dict[str, Any], entries: list[AnyEntry], due: bool) -> None:
    step = next_step(Progress(entries), LIMITS, context_tokens=CONTEXT, snapshot=SnapshotFields(**wanted))
    assert (step == Snapshot()) is due


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        pytest.param([], "no snapshot was taken before", id="none"),
        pytest.param([snapshotted(1, "")], "no snapshot was taken before", id="failed"),
        pytest.param([snapshotted(1, "", live=True)], "set sandbox.shell to per_call", id="live"),
        pytest.param([snapshotted(1), *[restored(6, n) for n in range(MAX_RESTORES)]], f"{MAX_RESTORES} times", id="too-often"),
    ],
)
def test_without_a_way_back_the_attempt_ends_and_says_why(entries: list[AnyEntry], why: str) -> None:
    progress = Progress([prompted(), OPENED, *TURN, *entries])
    with pytest.raises(RestartError, match=why) as end:
        way_back(progress, SandboxLostError("no such container"))
    assert end.value.retry


def test_the_way_back_is_the_last_snapshot_that_was_taken() -> None:
    progress = Progress(
        [prompted(), OPENED, *TURN, snapshotted(1, "s1"), *TURN, snapshotted(2, "s2"), *TURN, snapshotted(3, "", live=True)]
    )
    assert way_back(progress, SandboxLostError("gone")).id == "s2"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        pytest.param({"backend": "process", "snapshot": {"every_turns": 1}}, "use the docker backend", id="process"),
        pytest.param({"snapshot": {}}, "set every_turns or every_s", id="never-due"),
        pytest.param({"snapshot": {"every_turns": 0}}, "greater than or equal to 1", id="zero-turns"),
        pytest.param({"shell": "none"}, "'lasting' or 'per_call'", id="shell"),
    ],
)
def test_fields_that_cannot_be_kept_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        SandboxFields.model_validate(fields)
