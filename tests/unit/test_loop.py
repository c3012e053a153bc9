"""The turn loop's decisions: a table of situations, and properties over random journals."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import journal
from service.journal import AnyEntry, Call
from service.progress import Progress
from service.records import FinishReason, Limits, StopReason
from workers.loop import Answer, Extend, Finish, Generate, OpenSample, Parse, Step, Stop, Verify, next_step

LIMITS = Limits(turns=3, tokens=100, turn_tokens=40, wall_s=60.0)
CONTEXT = 1000


def prompted(n: int = 10) -> journal.Prompted:
    return journal.Prompted(at=0.0, token_ids=journal.pack_ids(range(n)))


def generated(n: int, finish: str = "stop", *, seconds: float = 0.1, discarded: bool = False) -> journal.Generated:
    return journal.Generated(
        at=0.0,
        token_ids=journal.pack_ids(range(n)),
        logprobs=journal.pack_logprobs([-0.5] * n),
        spans=[(7, 0, 0, n)],
        finish=finish,
        generator="g",
        seconds=seconds,
        discarded=discarded,
    )


def replied(*calls: Call) -> journal.Replied:
    return journal.Replied(at=0.0, content="", calls=list(calls))


def observed(call_id: str, *, submitted: bool = False) -> journal.Observed:
    return journal.Observed(at=0.0, call_id=call_id, name="bash", text="ok", submitted=submitted)


BASH = Call(id="c0", name="bash", arguments='{"command":"ls"}')
BAD = Call(id="c1", name="bash", arguments=None, error="bad_json: x")
SUBMIT = Call(id="c2", name="submit", arguments="{}")
EXTENDED = journal.Extended(at=0.0, token_ids=journal.pack_ids([1, 2, 3]))
TURN = [generated(5), replied(BASH), observed("c0"), EXTENDED]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([], OpenSample(), id="new"),
        pytest.param([prompted()], Generate(max_new_tokens=40), id="first-turn"),
        pytest.param([prompted(985)], Generate(max_new_tokens=7), id="context-bounds-the-turn"),
        pytest.param([prompted(992)], Stop(StopReason.CONTEXT_LIMIT), id="prompt-fills-the-context"),
        pytest.param([prompted(), generated(15, "abort")], Generate(max_new_tokens=25), id="cut-turn-goes-on"),
        pytest.param([prompted(), generated(15, "abort", discarded=True)], Generate(max_new_tokens=40), id="cut-turn-starts-anew"),
        pytest.param([prompted(), generated(40, "abort")], Parse(cut=True), id="cut-turn-at-its-limit"),
        pytest.param([prompted(), generated(5)], Parse(cut=False), id="whole-turn"),
        pytest.param([prompted(), generated(40, "length")], Parse(cut=True), id="turn-at-its-limit"),
        pytest.param([prompted(), generated(5), replied()], Stop(StopReason.ANSWERED), id="no-call"),
        pytest.param([prompted(), generated(40, "length"), replied()], Stop(StopReason.TURN_TOKEN_LIMIT), id="cut-without-a-call"),
        pytest.param([prompted(), generated(9, "length"), replied()], Stop(StopReason.CONTEXT_LIMIT), id="engine-ran-out-of-context"),
        pytest.param([prompted(), generated(5), replied(BASH, BAD)], Answer(BASH), id="first-call"),
        pytest.param([prompted(), generated(5), replied(BASH, BAD), observed("c0")], Answer(BAD), id="bad-call-is-answered-in-its-place"),
        pytest.param([prompted(), generated(5), replied(BASH), observed("c0")], Extend(), id="all-answered"),
        pytest.param(
            [prompted(), generated(5), replied(SUBMIT, BASH), observed("c2", submitted=True)],
            Stop(StopReason.SUBMITTED),
            id="submit-ends-it",
        ),
        pytest.param([prompted(), *TURN], Generate(max_new_tokens=40), id="next-turn"),
        pytest.param([prompted(), *TURN, *TURN, *TURN[:3]], Stop(StopReason.TURN_LIMIT), id="turn-limit"),
        pytest.param([prompted(), generated(40, "length"), replied(BASH), observed("c0")], Extend(), id="cut-with-a-whole-call"),
        pytest.param([prompted(), generated(5, seconds=61.0), replied(BASH)], Stop(StopReason.WALL_LIMIT), id="wall-limit"),
        pytest.param([prompted(), journal.Stopped(at=0.0, reason="answered")], Verify(), id="verify"),
        pytest.param(
            [prompted(), journal.Stopped(at=0.0, reason="answered"), journal.Scored(at=0.0, reward=1.0, detail="{}", seconds=0.1)],
            Finish(),
            id="finish",
        ),
    ],
)
def test_next_step(entries: list[AnyEntry], expected: Step) -> None:
    assert next_step(Progress(entries), LIMITS, context_tokens=CONTEXT) == expected


def test_token_limit_stops_after_the_answers() -> None:
    limits = LIMITS.model_copy(update={"tokens": 5})
    progress = Progress([prompted(), generated(5), replied(BASH), observed("c0")])
    assert next_step(progress, limits, context_tokens=CONTEXT) == Stop(StopReason.TOKEN_LIMIT)


def test_a_journal_of_an_older_version_has_no_boot() -> None:
    old = msgspec.msgpack.encode(["sandbox_opened", 0.0, "s", 0.1])
    progress = Progress([journal.decode(old)])
    assert (progress.sandbox_id, progress.boot_id) == ("s", "")
    opened = journal.SandboxOpened(at=0.0, id="s", seconds=0.1, boot_id="b1")
    assert Progress([journal.decode(journal.encode(opened))]).boot_id == "b1"


@st.composite
def lives(draw: st.DrawFn) -> tuple[Limits, int, list[AnyEntry]]:
    """A rollout that always does what `next_step` says, with random answers from the world, until it finishes."""
    limits = Limits(
        turns=draw(st.integers(1, 6)),
        tokens=draw(st.integers(20, 200)),
        turn_tokens=draw(st.integers(1, 20)),
        wall_s=draw(st.floats(0.5, 20)),
    )
    context = draw(st.integers(40, 300))
    entries: list[AnyEntry] = []
    progress = Progress()
    for number in range(400):
        step = next_step(progress, limits, context_tokens=context)
        if isinstance(step, Finish):
            return limits, context, entries
        for entry in draw(answers(step, progress, number)):
            entries.append(entry)
            progress.apply(entry)
    raise AssertionError("a rollout did not end in 400 steps")


def answers(step: Step, progress: Progress, number: int) -> st.SearchStrategy[list[AnyEntry]]:
    match step:
        case OpenSample():
            return st.integers(1, 30).map(lambda n: [prompted(n)])
        case Generate(max_new_tokens=room):
            assert room > 0
            sizes = st.integers(1, room)
            return st.one_of(
                sizes.map(lambda n: [generated(n)]),
                sizes.map(lambda n: [generated(n, "abort", seconds=0.3)]),
                sizes.map(lambda n: [generated(n, "length")]),
                st.just([generated(0, "abort", seconds=0.3)]),
            )
        case Parse():
            assert progress.turn_tokens > 0
            calls = [replace_id(call, f"n{number}-{i}") for i, call in enumerate((BASH, BAD, SUBMIT))]
            return st.lists(st.sampled_from(calls), max_size=3, unique_by=lambda call: call.id).map(lambda some: [replied(*some)])
        case Answer(call=call):
            submitted = call.name == "submit" and call.error is None
            return st.just([observed(call.id, submitted=submitted)])
        case Extend():
            return st.one_of(st.just([EXTENDED]), st.integers(1, 60).map(lambda n: [prompted(n)]))
        case Stop(reason=reason):
            return st.just([journal.Stopped(at=0.0, reason=reason)])
        case _:
            return st.just([journal.Scored(at=0.0, reward=1.0, detail="{}", seconds=0.0)])


def replace_id(call: Call, call_id: str) -> Call:
    return Call(id=call_id, name=call.name, arguments=call.arguments, error=call.error)


@given(lives())
def test_limits_hold_whatever_the_world_answers(life: tuple[Limits, int, list[AnyEntry]]) -> None:
    limits, context, entries = life
    progress = Progress(entries)
    assert progress.turns <= limits.turns
    assert progress.sampled <= limits.tokens
    assert len(progress.ids) <= context + 60  # a template may overrun by its own suffix; sampling never does
    assert progress.stop is not None


@given(lives(), st.data())
def test_a_replayed_journal_stands_where_the_live_one_stood(life: tuple[Limits, int, list[AnyEntry]], data: st.DataObject) -> None:
    """P3: cut anywhere, encoded and decoded, the next step is the one the dead worker would have taken."""
    limits, context, entries = life
    cut = data.draw(st.integers(0, len(entries)))
    live = Progress(entries[:cut])
    replayed = Progress(journal.decode(journal.encode(entry)) for entry in entries[:cut])
    assert next_step(replayed, limits, context_tokens=context) == next_step(live, limits, context_tokens=context)
    assert replayed.ids == live.ids
    assert replayed.messages == live.messages
    assert replayed.length == cut


def test_finish_reason_is_kept_for_the_reply() -> None:
    progress = Progress([prompted(), generated(3, "length"), replied(BASH)])
    assert progress.finish is FinishReason.LENGTH
