"""The books of the chaos run notice what they are there to notice; its schedule follows from its seed."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.chaos.books import Found, Sampled, audit
from tests.e2e.chaos.schedule import Kind, draw

GROUP = "j0-g1"


def sampled(input_ids: tuple[int, ...], output_ids: tuple[int, ...]) -> Sampled:
    count = len(output_ids)
    return Sampled(group_id=GROUP, input_ids=input_ids, output_ids=output_ids, logprobs=(-0.5,) * count, versions=(3,) * count)


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
        counts=counts | {"in_flight_rollouts": 0, "tokens_delivered": 4},
        deliveries={GROUP: [delivery]},
        acked={"j0-b1": [GROUP]},
        record=[sampled((1, 2), (10, 11)), sampled((1, 2, 10, 11), (12,)), sampled((1, 2, 10, 11, 12, 3), (13,))],
    )


def test_sound_books_have_no_problems() -> None:
    made = audit(sound())
    assert made.problems == []
    assert made.tokens == {"exported": 4}
    assert made.generations == 3


def test_an_answer_that_was_lost_and_sampled_again_is_accounted_for() -> None:
    found = sound()
    found.record = [*found.record, sampled((1, 2), (20, 21, 22))]
    made = audit(found)
    assert made.problems == []
    assert made.tokens == {"exported": 4, "sampled again": 3}


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
    ],
)
def test_what_does_not_add_up_is_told(spoil: Callable[[Found], None], told: str) -> None:
    found = sound()
    spoil(found)
    assert any(told in problem for problem in audit(found).problems)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), seconds=st.floats(10, 300), gap_s=st.floats(1, 10))
def test_a_schedule_follows_from_its_seed_and_stays_within_its_time(seed: int, seconds: float, gap_s: float) -> None:
    events = draw(seed, seconds=seconds, gap_s=gap_s, lease_s=5.0)
    assert events == draw(seed, seconds=seconds, gap_s=gap_s, lease_s=5.0)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert all(0 < event.at_s < seconds for event in events)
    assert sum(event.kind is Kind.KILL_STORE for event in events) == 2 * max(1, int(seconds // 60))
    assert all(event.seconds > 5.0 for event in events if event.kind is Kind.PAUSE_WORKER)
