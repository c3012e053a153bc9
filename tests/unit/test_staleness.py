import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.staleness import capacity, charge_until, place_is_free, staleness, usable

versions = st.integers(min_value=0, max_value=2**31 - 1)


@pytest.mark.parametrize(
    ("budget", "groups_per_step", "steps_per_version", "expected"),
    [
        pytest.param(0, 4, 1, 4, id="on-policy-still-schedules-case-054"),
        pytest.param(1, 4, 1, 8, id="one-version-ahead"),
        pytest.param(3, 2, 5, 40, id="several-batches-a-version"),
        pytest.param(None, 4, 1, None, id="gate-off"),
    ],
)
def test_capacity(budget: int | None, groups_per_step: int, steps_per_version: int, expected: int | None) -> None:
    assert capacity(budget, groups_per_step, steps_per_version) == expected


@pytest.mark.parametrize(
    ("oldest", "lineage", "budget", "policy", "expected"),
    [
        pytest.param(7, 0, 0, "requeue", True, id="on-policy"),
        pytest.param(6, 0, 1, "drop", True, id="at-the-bound"),
        pytest.param(5, 0, 1, "drop", False, id="one-past-the-bound"),
        pytest.param(5, 0, 1, "pace", True, id="pace-never-turns-away-by-age"),
        pytest.param(0, 0, None, "requeue", True, id="no-budget-no-age"),
        pytest.param(7, 1, None, "pace", False, id="dead-lineage-under-pace"),
        pytest.param(8, 0, 0, "drop", True, id="sampled-ahead-of-the-bump"),
    ],
)
def test_usable_at_version_7(oldest: int, lineage: int, budget: int | None, policy: str, expected: bool) -> None:
    assert usable(policy_version=7, oldest=oldest, lineage=lineage, oldest_lineage=0, budget=budget, policy=policy) is expected


@given(versions, versions)
def test_staleness_is_never_negative_and_grows_with_each_bump(policy: int, oldest: int) -> None:
    assert staleness(policy, oldest) >= 0
    assert 0 <= staleness(policy + 1, oldest) - staleness(policy, oldest) <= 1


@given(versions, st.one_of(st.none(), versions), st.integers(min_value=0, max_value=3))
def test_the_order_of_ack_and_bump_does_not_matter(leased: int, trains: int | None, bumps: int) -> None:
    until = charge_until(leased, trains)
    bumped = leased + bumps
    ack_then_bump = place_is_free(acked=True, policy_version=leased, until=until) or place_is_free(
        acked=True, policy_version=bumped, until=until
    )
    bump_then_ack = place_is_free(acked=False, policy_version=bumped, until=until) or place_is_free(
        acked=True, policy_version=bumped, until=until
    )
    assert ack_then_bump == bump_then_ack
