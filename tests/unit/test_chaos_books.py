"""The books of the chaos run notice what they are there to notice; its schedule follows from its seed."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.chaos.books import LOST_ANSWERS, Found, Sampled, audit, left_keys, pack
from tests.e2e.chaos.schedule import DECK, Kind, draw

GROUP = "j0-g1"


def sampled(input_ids: tuple[int, ...], output_ids: tuple[int, ...]) -> Sampled:
    count = len(output_ids)
    return Sampled(group_id=GROUP, prompt=pack(input_ids), output_ids=output_ids, logprobs=(-0.5,) * count, versions=(3,) * count)


def trajectory() -> dict[str, Any]:
    """A turn in two pieces, an observation, a turn."""
    mask = [0, 0, 1, 1, 1, 0, 1]
    sample = {
        "token_ids": [1, 2, 10, 11, 12, 3, 13],
        "loss_mask": mask,
        "logprobs": [-0.5 * trained for trained in mask],
        "versions": [3 if trained else -1 for trained in mask],
    }
    return {"rollout_id": f"{GROUP}-r0", "attempt": 1, "reward": 1.0, "reward_detail": {}, "stop_reason": "submitted", "samples": [sample]}


def sound() -> Found:
    members = [{"rollout_id": f"{GROUP}-r0", "failures": []}]
    group = {"state": "acked", "reason": None, "requeues": 0, "members": members}
    delivery = {"size": 1, "requested_size": 1, "trajectories": [trajectory()]}
    counts = {"acked": 1, "cancelled": 0, "dropped": {}, "failed": {}, "backlog": 0, "running": 0, "ready": 0, "leased": 0, "charged": 0}
    return Found(
        submitted=[GROUP],
        groups={GROUP: group},
        counts=counts
        | {"in_flight_rollouts": 0, "tokens_delivered": 4, "tokens_generated": 4, "tokens_discarded": 0, "tokens_standing": 0}
        | {"ledger": {"kept": {"tokens": 4}, "discarded": {}}},
        deliveries={GROUP: [delivery]},
        acked={"j0-b1": [GROUP]},
        record=[sampled((1, 2), (10, 11)), sampled((1, 2, 10, 11), (12,)), sampled((1, 2, 10, 11, 12, 3), (13,))],
    )


def test_sound_books_have_no_problems() -> None:
    made = audit(sound())
    assert made.problems == []
    assert made.tokens == {"exported": 4, LOST_ANSWERS: 0}
    assert made.generations == 3


def test_an_answer_that_was_lost_and_sampled_again_is_accounted_for() -> None:
    found = sound()
    found.record = [*found.record, sampled((1, 2), (20, 21, 22))]
    made = audit(found)
    assert made.problems == []
    assert made.tokens == {"exported": 4, "sampled again": 3, LOST_ANSWERS: 3}


def cut_back(found: Found, tokens: int) -> None:
    """A turn and the one after it were given up for a snapshot before them."""
    found.record = [*found.record, sampled((1, 2), (20, 21)), sampled((1, 2, 20, 21, 3), (22, 23))]
    ledger = {"kept": {"tokens": 4}, "discarded": {"cut_back": {"tokens": tokens}}}
    found.counts = {**found.counts, "tokens_generated": 4 + tokens, "tokens_discarded": tokens, "ledger": ledger}


def test_what_lay_behind_a_snapshot_is_accounted_for() -> None:
    found = sound()
    cut_back(found, 4)
    made = audit(found)
    assert made.problems == []
    assert made.tokens == {"exported": 4, "sampled again": 2, "followed what was sampled again": 2, LOST_ANSWERS: 0}


def spoil_end(found: Found) -> None:
    found.groups[GROUP]["state"] = "running"  # type: ignore[index]


def spoil_ack(found: Found) -> None:
    found.acked = {**found.acked, "j0-b2": [GROUP]}


def spoil_reward(found: Found) -> None:
    found.deliveries[GROUP][0]["trajectories"][0]["reward"] = 0.0


def spoil_token(found: Found) -> None:
    found.deliveries[GROUP][0]["trajectories"][0]["samples"][0]["token_ids"][3] = 99


def spoil_version(found: Found) -> None:
    found.deliveries[GROUP][0]["trajectories"][0]["samples"][0]["versions"][3] = 4


def spoil_record(found: Found) -> None:
    found.record = [*found.record, sampled((1, 2, 10), (50,))]


def spoil_charge(found: Found) -> None:
    found.counts = {**found.counts, "charged": 1}


def spoil_delivery(found: Found) -> None:
    other = trajectory()
    other["samples"][0]["logprobs"][3] = -0.25
    found.deliveries = {GROUP: [{"size": 1, "requested_size": 1, "trajectories": [other]}, found.deliveries[GROUP][0]]}


def spoil_generated(found: Found) -> None:
    cut_back(found, 5)


def spoil_ledger(found: Found) -> None:
    cut_back(found, 3)
    found.counts = {**found.counts, "tokens_generated": 8}


def spoil_reason(found: Found) -> None:
    cut_back(found, 4)
    found.counts["ledger"]["discarded"] = {"requeued": {"tokens": 4}}


def spoil_standing(found: Found) -> None:
    found.counts = {**found.counts, "tokens_standing": 1}


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        pytest.param(spoil_end, "has no end", id="group-without-end"),
        pytest.param(spoil_ack, "2 acked batches held it", id="acked-twice"),
        pytest.param(spoil_reward, "reward 0.0", id="side-effect-doubled-or-lost"),
        pytest.param(spoil_token, "are not what was sampled", id="another-token"),
        pytest.param(spoil_version, "are not what was sampled", id="another-version"),
        pytest.param(spoil_record, "are nowhere", id="sampled-token-lost"),
        pytest.param(spoil_charge, "charged is 1", id="place-not-given-back"),
        pytest.param(spoil_delivery, "came twice and differed", id="delivered-again-differently"),
        pytest.param(spoil_generated, "only 8 were sampled", id="tokens-that-nobody-sampled"),
        pytest.param(spoil_ledger, "3 discarded with a reason", id="tokens-without-a-reason"),
        pytest.param(spoil_reason, "discarded as requeued, and at most 0", id="a-reason-that-was-not-at-work"),
        pytest.param(spoil_standing, "1 tokens stand with nothing", id="tokens-that-stand"),
    ],
)
def test_what_does_not_add_up_is_told(spoil: Callable[[Found], None], told: str) -> None:
    found = sound()
    spoil(found)
    assert any(told in problem for problem in audit(found).problems)


def test_what_is_left_of_a_deleted_job_is_named_and_goes_by_itself() -> None:
    may_stay_s = {"job": 4.0, "synced": 60.0}
    assert left_keys({"rw:{j0}:job": 4, "rw:{j0}:synced": 58}, may_stay_s) == []
    found = {"rw:{j0}:job": -1, "rw:{j0}:synced": 61, "rw:{j0}:counts": 3, "rw:{j0}:t:j0-g1-r0": -1}
    left = ["rw:{j0}:counts (3 s)", "rw:{j0}:job (-1 s)", "rw:{j0}:synced (61 s)", "rw:{j0}:t:j0-g1-r0 (-1 s)"]
    assert left_keys(found, may_stay_s) == left


POINTS = {"worker": ["after lease", "before finish", "before observed"], "gateway": ["after submit"]}


@given(seed=st.integers(0, 2**32), seconds=st.floats(10, 300), gap_s=st.floats(1, 10))
def test_a_schedule_follows_from_its_seed_and_stays_within_its_time(seed: int, seconds: float, gap_s: float) -> None:
    events = draw(seed, seconds=seconds, gap_s=gap_s, lease_s=5.0, points=POINTS)
    assert events == draw(seed, seconds=seconds, gap_s=gap_s, lease_s=5.0, points=POINTS)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert all(0 < event.at_s < seconds for event in events)
    assert sum(event.kind is Kind.KILL_STORE for event in events) == 2 * max(1, int(seconds // 60))
    assert all(event.seconds > 5.0 for event in events if event.kind in (Kind.PAUSE_WORKER, Kind.SILENCE_WORKER))


@given(seed=st.integers(0, 2**32))
def test_a_schedule_deals_everything_before_anything_comes_too_often(seed: int) -> None:
    events = [event for event in draw(seed, seconds=600, gap_s=2, lease_s=5.0, points=POINTS) if event.kind.noun != "store"]
    assert {event.kind for event in events[: sum(DECK.values())]} == set(DECK)
    for noun, points in POINTS.items():
        dealt = [event.point for event in events if event.point and event.kind.noun == noun]
        rounds = [dealt[at : at + len(points)] for at in range(0, len(dealt), len(points))]
        assert all(sorted(found) == sorted(points) for found in rounds if len(found) == len(points))
    assert all(bool(event.point) == (event.kind in (Kind.KILL_WORKER, Kind.KILL_GATEWAY)) for event in events)
