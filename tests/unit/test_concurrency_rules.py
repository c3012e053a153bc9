"""The controller of rollouts in flight, on a small plant: it converges, stays within its bounds, and follows what changes."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.concurrency import GROWTH, Bounds, Load, Sample, State, begin, clamp, first, steer, turnover_s

BOUNDS = Bounds(lowest=8, highest=4000, group=8)
TICK_S = 2.0


@dataclass
class Plant:
    """Generators with `slots` each, in which a rollout takes `latency_s`, and a trainer that takes `consumption` rollouts/s.

    What has no slot waits in an engine. Rollouts are begun up to the cap while the gate has places, and none is stopped when it falls.
    """

    slots: int = 100
    generators: int = 4
    latency_s: float = 40.0
    consumption: float = 1e9
    step_groups: int = 40
    tells_usage: bool = True
    in_flight: float = 0.0
    ready: float = 0.0
    fed: deque[float] = field(default_factory=deque)
    at: float = 0.0

    @property
    def places(self) -> int:
        return self.slots * self.generators

    @property
    def enough(self) -> float:
        """Rollouts in flight that use every slot, or feed the trainer."""
        return min(self.places, self.consumption * self.latency_s)

    def tick(self, cap: int) -> Sample:
        self.at += TICK_S
        ended = min(self.in_flight, self.places) * TICK_S / self.latency_s
        self.ready += ended / BOUNDS.group
        gate = BOUNDS.group * (5 * self.step_groups - self.ready)
        self.in_flight = max(self.in_flight - ended, min(cap, gate))
        wanted = self.consumption * TICK_S / BOUNDS.group
        taken = min(self.ready, wanted)
        self.ready -= taken
        self.fed.append(taken / wanted)
        if len(self.fed) > turnover_s(self.latency_s, BOUNDS) / TICK_S:
            self.fed.popleft()
        return self.sample()

    def sample(self) -> Sample:
        running = min(self.in_flight, self.places)
        load = Load(
            running=round(running / max(1, self.generators)),
            waiting=round(max(0.0, self.in_flight - self.places) / max(1, self.generators)),
            usage=0.85 * running / self.places if self.tells_usage and self.places else 0.0,
        )
        return Sample(
            at=self.at,
            in_flight=round(self.in_flight),
            ready_groups=int(self.ready),
            step_groups=self.step_groups,
            wait_fraction=1 - sum(self.fed) / len(self.fed) if self.fed else None,
            staleness=None,
            budget=4,
            latency_s=self.latency_s,
            loads=[load] * self.generators,
        )


def run(plant: Plant, state: State, *, seconds: float, bounds: Bounds = BOUNDS) -> Iterator[State]:
    for _ in range(int(seconds / TICK_S)):
        state = steer(state, plant.tick(state.cap), bounds)
        yield state


@pytest.mark.parametrize("start", [8, 64, 400, 4000])
@pytest.mark.parametrize(
    "plant",
    [
        pytest.param({}, id="fast-trainer"),
        pytest.param({"tells_usage": False}, id="engines-tell-no-usage"),
        pytest.param({"consumption": 4.0, "step_groups": 8}, id="slow-trainer"),
        pytest.param({"consumption": 4.0, "step_groups": 8, "tells_usage": False, "latency_s": 15.0}, id="slow-trainer-short-rollouts"),
        pytest.param({"slots": 5, "generators": 2}, id="few-slots"),
        pytest.param({"latency_s": 200.0}, id="long-rollouts"),
    ],
)
def test_it_converges_and_does_not_swing(start: int, plant: dict[str, float]) -> None:
    """After 100 turnovers at most, it feeds what can be fed with little to spare, and swings by a third or four groups."""
    made = Plant(**plant)  # type: ignore[arg-type]
    turnover = turnover_s(made.latency_s, BOUNDS)
    list(run(made, state := begin(start, made.sample()), seconds=0))
    caps = [state.cap for state in run(made, state, seconds=200 * turnover)]
    assert all(BOUNDS.lowest <= cap <= BOUNDS.highest for cap in caps)
    late = caps[len(caps) // 2 :]
    mean = sum(late) / len(late)
    assert max(late) - min(late) <= max(mean / 3, 4 * BOUNDS.group)
    assert 0.6 * made.enough - BOUNDS.group <= mean <= 1.35 * made.enough + BOUNDS.group


def test_a_lost_generator_takes_its_share_at_once_and_brings_it_back() -> None:
    plant = Plant()
    *_, settled = run(plant, begin(400, plant.sample()), seconds=4000)
    plant.generators = 2
    lost = steer(settled, plant.tick(settled.cap), BOUNDS)
    assert (lost.cap, lost.reason) == (settled.cap // 2, "generators")
    plant.generators = 4
    back = steer(lost, plant.tick(lost.cap), BOUNDS)
    assert abs(back.cap - settled.cap) <= 2


def test_with_no_generator_left_nothing_is_concluded() -> None:
    plant = Plant()
    state = begin(200, plant.sample())
    none = replace(plant.sample(), loads=[None] * 4, at=1.0)
    gone = steer(state, none, BOUNDS)
    assert gone.cap == 200
    assert steer(gone, replace(plant.sample(), at=2.0), BOUNDS).cap == 200


LOAD = Load(running=50, waiting=0, usage=0.3)
HUNGRY = Sample(
    at=1000.0,
    in_flight=100,
    ready_groups=0,
    step_groups=4,
    wait_fraction=0.5,
    staleness=1.0,
    budget=4,
    latency_s=30.0,
    loads=[LOAD, LOAD],
)
STATE = State(cap=100, changed_at=0.0, generators=2)


@pytest.mark.parametrize(
    ("state", "sample", "cap", "reason"),
    [
        pytest.param(STATE, HUNGRY, 125, "grows", id="hungry-and-room"),
        pytest.param(STATE, replace(HUNGRY, at=29.0), 100, "turnover", id="too-soon"),
        pytest.param(STATE, replace(HUNGRY, in_flight=80), 100, "settled", id="something-else-holds-back"),
        pytest.param(STATE, replace(HUNGRY, loads=[LOAD, replace(LOAD, usage=0.7)]), 100, "settled", id="no-room-in-one"),
        pytest.param(STATE, replace(HUNGRY, loads=[LOAD, replace(LOAD, usage=0.95)]), 80, "full", id="kv-full"),
        pytest.param(STATE, replace(HUNGRY, loads=[replace(LOAD, waiting=11)] * 2), 90, "queued", id="requests-queue"),
        pytest.param(STATE, replace(HUNGRY, loads=[replace(LOAD, waiting=5)] * 2), 125, "grows", id="some-may-queue"),
        pytest.param(replace(STATE, cuts=3), replace(HUNGRY, loads=[replace(LOAD, waiting=50)] * 2), 50, "queued", id="again-and-again"),
        pytest.param(STATE, replace(HUNGRY, wait_fraction=0.01, ready_groups=9), 95, "surplus", id="more-than-it-takes"),
        pytest.param(STATE, replace(HUNGRY, wait_fraction=0.01, staleness=3.5), 95, "stale", id="near-the-budget"),
        pytest.param(STATE, replace(HUNGRY, wait_fraction=0.01, staleness=3.5, budget=None), 100, "settled", id="no-budget"),
        pytest.param(STATE, replace(HUNGRY, wait_fraction=0.01), 100, "settled", id="fed"),
        pytest.param(STATE, replace(HUNGRY, wait_fraction=None, ready_groups=1), 125, "grows", id="less-than-a-batch-ready"),
        pytest.param(replace(STATE, too_much=110), HUNGRY, 108, "grows", id="careful-near-what-was-too-much"),
        pytest.param(STATE, replace(HUNGRY, loads=[LOAD, None]), 50, "generators", id="one-lost"),
        pytest.param(replace(STATE, cap=9000), replace(HUNGRY, at=1.0), 4000, "turnover", id="highest-was-lowered"),
    ],
)
def test_decisions(state: State, sample: Sample, cap: int, reason: str) -> None:
    after = steer(state, sample, BOUNDS)
    assert (after.cap, after.reason) == (cap, reason)


LOADS = st.none() | st.builds(Load, running=st.integers(0, 10_000), waiting=st.integers(0, 10_000), usage=st.floats(0, 1))
SAMPLES = st.builds(
    Sample,
    at=st.floats(0, 1e6),
    in_flight=st.integers(0, 10_000),
    ready_groups=st.integers(0, 1000),
    step_groups=st.integers(1, 100),
    wait_fraction=st.none() | st.floats(0, 1),
    staleness=st.none() | st.floats(0, 50),
    budget=st.none() | st.integers(0, 16),
    latency_s=st.none() | st.floats(0, 1e5),
    loads=st.lists(LOADS, max_size=5),
)


@given(
    samples=st.lists(SAMPLES, min_size=1, max_size=30), lowest=st.integers(1, 100), more=st.integers(0, 5000), start=st.integers(0, 9999)
)
def test_whatever_is_sampled_the_cap_stays_within_its_bounds_and_steps(samples: list[Sample], lowest: int, more: int, start: int) -> None:
    bounds = Bounds(lowest=lowest, highest=lowest + more, group=8)
    state = begin(clamp(start, bounds), samples[0])
    for sample in samples:
        before, state = state, steer(state, sample, bounds)
        assert bounds.lowest <= state.cap <= bounds.highest
        if state.reason != "generators":
            assert state.cap <= max(before.cap * GROWTH, before.cap + bounds.group)
            soon = sample.at - before.changed_at < turnover_s(sample.latency_s, bounds)
            assert not soon or state.cap == before.cap


def test_a_job_begins_with_one_batch() -> None:
    assert first(BOUNDS, 4) == 32
    assert first(replace(BOUNDS, lowest=64), 4) == 64
    assert first(replace(BOUNDS, highest=16), 4) == 16
