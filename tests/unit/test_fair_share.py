"""The next free slot goes to the job with the least in flight for its weight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.fair_share import Load, shares


def load(in_flight: int, weight: float = 1.0) -> Load:
    return Load(in_flight=in_flight, weight=weight)


@pytest.mark.parametrize(
    ("free", "loads", "expected"),
    [
        pytest.param(4, {}, {}, id="no-jobs"),
        pytest.param(0, {"a": load(0)}, {}, id="no-slots"),
        pytest.param(5, {"a": load(7)}, {"a": 5}, id="alone"),
        pytest.param(4, {"a": load(0), "b": load(0)}, {"a": 2, "b": 2}, id="even"),
        pytest.param(1, {"a": load(0), "b": load(0)}, {"a": 1}, id="the-first-of-two-alike"),
        pytest.param(3, {"big": load(16), "small": load(0)}, {"small": 3}, id="who-has-less-catches-up"),
        pytest.param(6, {"big": load(4), "small": load(0)}, {"small": 5, "big": 1}, id="and-no-further"),
        pytest.param(8, {"a": load(0, 3.0), "b": load(0, 1.0)}, {"a": 6, "b": 2}, id="by-weight"),
        pytest.param(4, {"a": load(9, 3.0), "b": load(3, 1.0)}, {"a": 3, "b": 1}, id="at-balance-by-weight"),
        pytest.param(2, {"a": load(0, 0.01), "b": load(0, 100.0)}, {"b": 2}, id="extreme-weights"),
    ],
)
def test_shares(free: int, loads: dict[str, Load], expected: dict[str, int]) -> None:
    assert shares(free, loads) == expected


loads = st.builds(load, st.integers(0, 50), st.floats(0.01, 100))


@given(st.integers(0, 200), st.dictionaries(st.sampled_from("abcdef"), loads, max_size=6))
def test_no_job_gets_a_slot_that_another_has_a_better_claim_to(free: int, loads: dict[str, Load]) -> None:
    offered = shares(free, loads)
    assert sum(offered.values()) == (free if loads else 0)
    has = {job: load.in_flight + offered.get(job, 0) for job, load in loads.items()}
    for job in offered:
        assert all(has[job] / loads[job].weight <= (has[other] + 1) / loads[other].weight * (1 + 1e-12) for other in loads)
