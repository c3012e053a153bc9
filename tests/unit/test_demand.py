"""What is kept warm follows what is asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.demand import Demand, shares, targets


def demanded(*asks: tuple[float, int, int], window_s: float = 60.0) -> Demand:
    """asks: (when, how many, how many of them were given a warm one)."""
    demand = Demand(window_s=window_s)
    for when, asked, used in asks:
        for number in range(asked):
            demand.note(when, used_warm=number < used)
    return demand


@pytest.mark.parametrize(
    ("asks", "now", "wanted"),
    [
        pytest.param((), 0.0, 0, id="never-asked"),
        pytest.param(((0.0, 1, 0),), 1.0, 1, id="asked-once"),
        pytest.param(((0.0, 16, 0),), 1.0, 1, id="a-burst-is-probed-with-one"),
        pytest.param(((0.0, 16, 0), (10.0, 16, 1)), 11.0, 3, id="twice-what-was-used-and-one"),
        pytest.param(((0.0, 16, 0), (10.0, 16, 16)), 11.0, 16, id="never-more-than-were-asked-for-at-once"),
        pytest.param(((0.0, 16, 16), (30.0, 1, 1)), 31.0, 16, id="the-peak-counts"),
        pytest.param(((0.0, 16, 16), (30.0, 1, 1)), 61.0, 1, id="until-the-window-has-passed-it"),
        pytest.param(((0.0, 16, 16),), 60.0, 0, id="idle-is-nothing"),
    ],
)
def test_wanted(asks: tuple[tuple[float, int, int], ...], now: float, wanted: int) -> None:
    assert demanded(*asks).wanted(now) == wanted


def test_a_steady_burst_is_met_whole_after_a_few() -> None:
    demand, warm = Demand(window_s=60.0), []
    for round_ in range(5):
        now = round_ * 10.0
        warm.append(demand.wanted(now))
        for number in range(8):
            demand.note(now, used_warm=number < warm[-1])
    assert warm == [0, 1, 3, 7, 8]


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(0, 64))
def test_shares_are_fair_and_leave_nothing_unused(wanted: list[int], size: int) -> None:
    dealt = shares(wanted, size)
    assert sum(dealt) == min(size, sum(wanted))
    assert all(got <= want for got, want in zip(dealt, wanted, strict=True))
    short = [got for got, want in zip(dealt, wanted, strict=True) if got < want]
    assert not short or max(dealt) <= min(short) + 1


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 20), st.integers(0, 20)), max_size=30), st.integers(0, 32))
def test_targets_fit_the_size(kinds: list[tuple[float, int, int]], size: int) -> None:
    demands = [demanded(each) for each in kinds]
    found = targets(demands, size, 100.0)
    assert sum(found) <= size
    assert all(0 <= target <= demand.wanted(100.0) for target, demand in zip(found, demands, strict=True))
    if sum(demand.wanted(100.0) for demand in demands) <= size - size // 4 - 1:
        assert found == [demand.wanted(100.0) for demand in demands]


def test_tasks_with_images_of_their_own_do_not_displace_what_is_used() -> None:
    often = demanded((0.0, 16, 16))
    once = [demanded((0.0, 8, 0)) for _ in range(100)]
    found = targets([often, *once], 16, 1.0)
    assert found[0] == 12
    assert found[1:] == [0] * 96 + [1] * 4
