"""Journals read back: those of older versions still are, and what no worker wrote is refused with its place and reason."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import journal
from service.errors import JournalError
from service.journal import AnyEntry
from service.records import Limits
from service.replay import replayed
from service.samples import build_trajectory
from tests.unit.test_loop import BAD, BASH, EXTENDED, generated, lives, observed, prompted, replied

GOLDEN = Path(__file__).parent.parent / "data" / "journal_v1.msgpack"
"""As the first version wrote it: one array of encoded entries; its sandbox has no boot id. Never made anew."""

OPENED = journal.Opened(at=0.0, attempt=1, worker="w1")
STOPPED = journal.Stopped(at=0.0, reason="answered")
SCORED = journal.Scored(at=0.0, reward=1.0, detail="{}", seconds=0.1)


def golden() -> list[AnyEntry]:
    return [journal.decode(entry) for entry in msgspec.msgpack.decode(GOLDEN.read_bytes(), type=list[bytes])]


def test_a_journal_of_the_first_version_is_read() -> None:
    progress = replayed(golden())
    assert (progress.attempt, progress.turns, progress.tool_calls, progress.sampled) == (2, 2, 3, 7)
    assert (progress.sandbox_name, progress.sandbox_id, progress.boot_id) == ("rw-old-j0-g1-r0-a2", "0123abcd", "")
    assert (progress.oldest_version, progress.newest_version, progress.stop_reason) == (4, 5, "submitted")
    assert [message["role"] for message in progress.messages] == ["assistant", "tool", "tool", "assistant"]


def test_a_journal_of_the_first_version_is_exported() -> None:
    trajectory = build_trajectory(golden(), rollout_id="j0-g1-r0", index=0, outcome="completed")
    (sample,) = trajectory.samples
    assert sample.token_ids.tolist() == [1, 2, 3, 10, 11, 12, 13, 14, 20, 21, 22, 23]
    assert sample.versions.tolist() == [-1, -1, -1, 4, 4, 4, 5, 5, -1, -1, 5, 5]
    assert (trajectory.reward, trajectory.reward_detail) == (1.0, {"exit_code": 0})


@given(lives(), st.data())
def test_whatever_a_worker_wrote_is_read(life: tuple[Limits, int, list[AnyEntry]], data: st.DataObject) -> None:
    entries = life[2][: data.draw(st.integers(0, len(life[2])))]
    assert replayed([OPENED, *entries]).length == len(entries) + 1


TURN = [prompted(), generated(5), replied(BASH, BAD)]


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        pytest.param([prompted()], "entry 0 (prompted) is out of place", id="not-opened"),
        pytest.param([OPENED, OPENED], "entry 1 (opened) is out of place", id="opened-twice"),
        pytest.param([journal.Opened(at=0.0, attempt=1, worker="w", version=journal.WIRE_VERSION + 1)], "upgrade it", id="newer"),
        pytest.param([journal.Opened(at=0.0, attempt=1, worker="w", version=0)], "wire version 0", id="no-version"),
        pytest.param([OPENED, generated(5)], "goes on with a turn that is over", id="sampled-from-nothing"),
        pytest.param([OPENED, prompted(), generated(5), generated(5)], "goes on with a turn that is over", id="sampled-past-the-end"),
        pytest.param([OPENED, prompted(), generated(5, "magic")], "finish reason 'magic'", id="finish"),
        pytest.param([OPENED, EXTENDED], "extends no sample", id="extends-nothing"),
        pytest.param([OPENED, prompted(), EXTENDED], "before the turn's reply", id="extends-a-prompt"),
        pytest.param([OPENED, *TURN, observed("c0"), EXTENDED], "before the turn's calls are answered", id="call-left-open"),
        pytest.param([OPENED, *TURN, prompted()], "before the turn's calls are answered", id="prompt-in-a-turn"),
        pytest.param([OPENED, *TURN, observed("c0"), observed("c0")], "'c0', which is no open call", id="answered-twice"),
        pytest.param([OPENED, prompted(), observed("c0")], "'c0', which is no open call", id="answers-nothing"),
        pytest.param([OPENED, *TURN, replied()], "replies to no turn", id="replied-twice"),
        pytest.param([OPENED, prompted(), SCORED], "comes before the stop", id="scored-before-the-stop"),
        pytest.param([OPENED, prompted(), journal.Stopped(at=0.0, reason="bored")], "unknown reason 'bored'", id="stop-reason"),
        pytest.param([OPENED, prompted(), STOPPED, generated(5)], "follows the stop", id="goes-on-after-the-stop"),
        pytest.param([OPENED, prompted(), STOPPED, SCORED, SCORED], "follows the verdict", id="scored-twice"),
        pytest.param([OPENED, journal.Prompted(at=0.0, token_ids=b"123")], "3 bytes of ids", id="half-an-id"),
    ],
)
def test_what_no_worker_wrote_is_refused(entries: list[AnyEntry], why: str) -> None:
    with pytest.raises(JournalError) as caught:
        replayed(entries)
    assert why in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\xc1", journal.encode(OPENED)[:-3], msgspec.msgpack.encode(["invented", 1.0])])
def test_undecodable_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(JournalError, match="cannot be decoded"):
        journal.decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_entry_or_refused(data: bytes) -> None:
    try:
        journal.decode(data)
    except JournalError:
        pass
