"""Weight updates as rules: who may serve under which label, whatever happens in whatever order."""

from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from service.errors import ConflictError
from service.weight_records import GeneratorWeights, JobWeights, Standing, UpdateState, Wanted, WeightUpdate, decode, encode
from service.weight_rules import (
    abandon,
    all_asked,
    begin,
    close,
    expire,
    finish,
    may_serve,
    missed,
    paused,
    readmitted,
    serving,
    untouched,
    without,
)

JOB = "j" + "0" * 16
A, B = "http://a", "http://b"


def wanted(version: int = 1, **changes: Any) -> Wanted:
    fields: dict[str, Any] = {"from_disk": None, "rollback": False, "timeout_s": 10.0, "mode": "in_flight", "flush_cache": False}
    return Wanted(version=version, **fields | changes)


def begun(weights: JobWeights | None = None, *urls: str, policy: tuple[int, int] = (0, 0), **changes: Any) -> JobWeights:
    labels: dict[str, str | None] = dict.fromkeys(urls or (A, B), "default")
    return begin(weights or JobWeights(), wanted(**changes), job_id=JOB, policy=policy, labels=labels, now=0.0)


def running(weights: JobWeights) -> WeightUpdate:
    assert weights.running is not None
    return weights.running


def with_all_paused(weights: JobWeights) -> JobWeights:
    update = running(weights)
    for url in update.parts:
        weights = paused(weights, update.update_id, url, now=1.0)
    return all_asked(weights, update.update_id, now=1.0)


def done(weights: JobWeights) -> JobWeights:
    update = running(weights)
    for url, part in update.parts.items():
        if not part.state.over:
            weights = serving(weights, update.update_id, url, now=2.0)
    return close(weights, update.update_id, now=2.0)


def standings(weights: JobWeights) -> dict[str, Standing]:
    return {url: generator.standing for url, generator in weights.generators.items()}


def test_an_update_from_disk_goes_its_way() -> None:
    weights = begun(from_disk="/w")
    assert standings(weights) == {A: Standing.HELD, B: Standing.HELD}
    assert running(weights).label == "0.1"
    weights = with_all_paused(weights)
    assert running(weights).state is UpdateState.LOADING
    weights = done(weights)
    assert weights.running is None
    assert weights.current == "0.1"
    assert weights.generators[A] == GeneratorWeights(label="0.1", paused_s=1.0)


def test_a_trainer_moves_the_weights_between_paused_and_finish() -> None:
    weights = begun()
    update_id = running(weights).update_id
    with pytest.raises(ConflictError, match="still pausing") as early:
        finish(weights, update_id, now=1.0)
    assert early.value.retry_after_s
    weights = with_all_paused(weights)
    assert running(weights).state is UpdateState.PAUSED
    weights = finish(weights, update_id, now=1.0)
    assert finish(weights, update_id, now=5.0) == weights
    weights = done(weights)
    assert finish(weights, update_id, now=5.0) == weights
    with pytest.raises(ConflictError, match="is done"):
        abandon(weights, update_id, "untouched", now=5.0)


def test_updates_do_not_overlap_nor_go_back() -> None:
    weights = begun()
    with pytest.raises(ConflictError, match=f"update {JOB}-u1 is pausing") as second:
        begun(weights, version=2)
    assert second.value.retry_after_s
    weights = done(finish(with_all_paused(weights), running(weights).update_id, now=1.0))
    with pytest.raises(ConflictError, match="version 0 is below the current 1"):
        begun(weights, version=0, policy=(0, 1))
    assert running(begun(weights, version=1, policy=(0, 1))).label == "0.1"
    assert running(begun(weights, version=0, policy=(0, 1), rollback=True)).label == "1.0"


def test_who_misses_it_is_quarantined_and_comes_back_by_the_current_label_only() -> None:
    weights = begun()
    update_id = running(weights).update_id
    weights = paused(missed(weights, update_id, B, "connection refused"), update_id, A, now=1.0)
    weights = done(finish(all_asked(weights, update_id, now=1.0), update_id, now=1.0))
    assert weights.update is not None
    assert weights.update.state is UpdateState.DONE
    assert standings(weights) == {A: Standing.SERVING, B: Standing.QUARANTINED}
    for label in ("default", "0.0", "1.1", None):
        assert readmitted(weights, B, label, now=3.0) == weights
    assert standings(readmitted(weights, B, "0.1", now=3.0))[B] is Standing.SERVING


def test_a_trainer_that_died_leaves_quarantine_until_it_speaks_or_weights_come() -> None:
    weights = with_all_paused(begun())
    update_id = running(weights).update_id
    assert expire(weights, now=10.9) == weights
    weights = expire(weights, now=11.0)
    assert weights.running is None
    assert standings(weights) == {A: Standing.QUARANTINED, B: Standing.QUARANTINED}
    assert not may_serve(weights, A, "default")
    assert not may_serve(weights, A, "0.1")
    with pytest.raises(ConflictError, match="has failed"):
        finish(weights, update_id, now=12.0)
    believed = abandon(weights, update_id, "untouched", now=12.0)
    assert abandon(believed, update_id, "untouched", now=13.0) == believed
    with pytest.raises(ConflictError, match="was abandoned with weights 'untouched'"):
        abandon(believed, update_id, "moved", now=13.0)
    assert may_serve(believed, A, "default")
    reloaded = done(with_all_paused(begun(weights, from_disk="/w")))
    assert standings(reloaded) == {A: Standing.SERVING, B: Standing.SERVING}
    with pytest.raises(ConflictError, match="another one began since"):
        abandon(reloaded, update_id, "untouched", now=12.0)


def test_a_label_that_the_trainer_gave_meanwhile_is_as_good() -> None:
    weights = done(with_all_paused(begun(from_disk="/w")))
    labels: dict[str, str | None] = {A: "5", B: "0.0"}
    weights = begin(weights, wanted(2), job_id=JOB, policy=(0, 1), labels=labels, now=3.0)
    weights = abandon(weights, running(weights).update_id, "untouched", now=4.0)
    assert may_serve(weights, A, "5")
    assert not may_serve(weights, B, "0.0")
    assert may_serve(weights, B, "0.1")


@pytest.mark.parametrize(("rollback", "serves"), [(True, False), (False, True)])
def test_a_label_without_a_lineage_is_of_the_one_in_which_it_was_read(rollback: bool, serves: bool) -> None:
    """7 of before a rollback is not 7 after it, however long the generator was out of service."""
    policy, labels = (0, 7), dict[str, str | None]({A: "7", B: "7"})
    weights = begin(JobWeights(), wanted(5 if rollback else 7, rollback=rollback), job_id=JOB, policy=policy, labels=labels, now=0.0)
    update_id = running(weights).update_id
    weights = paused(missed(weights, update_id, B, "away"), update_id, A, now=1.0)
    weights = done(finish(all_asked(weights, update_id, now=1.0), update_id, now=1.0))
    assert may_serve(weights, B, "7") is serves
    assert may_serve(weights, B, weights.current)
    if rollback:
        after = begin(weights, wanted(6), job_id=JOB, policy=(1, 5), labels=labels, now=2.0)
        assert not may_serve(after, B, "7")


def test_untouched_clears_no_older_doubt() -> None:
    weights = expire(with_all_paused(begun()), now=99.0)
    weights = begun(weights)
    weights = abandon(weights, running(weights).update_id, "untouched", now=100.0)
    assert all(generator.moved for generator in weights.generators.values())


@pytest.mark.parametrize("late", [False, True])
def test_a_load_that_ends_late_is_not_taken_for_that_of_the_next_update(late: bool) -> None:
    """Both are of version 1, but not from the same place. late: after the second one began."""
    weights = with_all_paused(begun(from_disk="/wrong"))
    weights = close(missed(missed(weights, f"{JOB}-u1", A, "broke"), f"{JOB}-u1", B, "too slow"), f"{JOB}-u1", now=1.0)
    labels: dict[str, str | None] = {A: "default", B: None if late else "0.1"}
    weights = begin(weights, wanted(from_disk="/right"), job_id=JOB, policy=(0, 0), labels=labels, now=2.0)
    weights = paused(missed(weights, f"{JOB}-u2", B, "away"), f"{JOB}-u2", A, now=2.0)
    weights = done(all_asked(weights, f"{JOB}-u2", now=2.0))
    assert standings(weights) == {A: Standing.SERVING, B: Standing.QUARANTINED}
    assert not any(may_serve(weights, B, label) for label in ("default", "0.1", None))
    assert standings(done(with_all_paused(begun(weights, from_disk="/right", policy=(0, 1)))))[B] is Standing.SERVING


def test_what_was_finished_is_not_untouched() -> None:
    weights = finish(with_all_paused(begun()), f"{JOB}-u1", now=1.0)
    for url in (A, B):
        weights = missed(weights, f"{JOB}-u1", url, "it cannot be labelled")
    weights = close(weights, f"{JOB}-u1", now=2.0)
    with pytest.raises(ConflictError, match="failed after finish"):
        abandon(weights, f"{JOB}-u1", "untouched", now=3.0)
    assert not may_serve(abandon(weights, f"{JOB}-u1", "moved", now=3.0), A, "default")


@pytest.mark.parametrize("moved", [False, True])
def test_a_load_that_fails_everywhere(moved: bool) -> None:
    """A path that nobody can read leaves everybody what it was; a load that broke off leaves doubt, which no word of a trainer clears."""
    weights = with_all_paused(begun(from_disk="/nope"))
    update_id = running(weights).update_id
    for url in (A, B):
        weights = missed(weights, update_id, url, "timeout") if moved else untouched(weights, update_id, url, "no such path")
    weights = close(weights, update_id, now=2.0)
    assert weights.update is not None
    assert weights.update.state is UpdateState.FAILED
    assert may_serve(weights, A, "default") is not moved
    if moved:
        with pytest.raises(ConflictError, match="weights may have moved"):
            abandon(weights, update_id, "untouched", now=3.0)


def test_nobody_paused_is_a_failure_that_moved_nothing() -> None:
    weights = begun()
    update_id = running(weights).update_id
    for url in (A, B):
        weights = missed(weights, update_id, url, "connection refused")
    weights = all_asked(weights, update_id, now=1.0)
    assert weights.update is not None
    assert (weights.update.state, weights.update.reason) == (UpdateState.FAILED, "no generator could be paused")
    assert may_serve(weights, A, "default")


def test_how_long_it_stood_still_adds_up() -> None:
    weights = begun(from_disk="/w")
    weights = paused(weights, running(weights).update_id, A, now=1.0)
    weights = paused(weights, running(weights).update_id, A, now=2.0)
    weights = serving(all_asked(weights, running(weights).update_id, now=2.0), f"{JOB}-u1", A, now=4.0)
    assert weights.generators[A].paused_s == 3.0


@pytest.mark.parametrize(
    ("mode", "flush_cache", "said"),
    [
        pytest.param("in_flight", False, "in_place", id="kv-is-kept"),
        pytest.param("in_flight", True, "retract", id="nothing-can-be-flushed-in-place"),
        pytest.param("drain", False, "in_place", id="nothing-runs"),
        pytest.param("abort_resume", True, "abort", id="what-runs-comes-back-cut"),
    ],
)
def test_how_generators_are_paused(mode: str, flush_cache: bool, said: str) -> None:
    assert running(begun(mode=mode, flush_cache=flush_cache)).pause_mode == said


class World(RuleBasedStateMachine):
    """Generators with weights of their own, a trainer that is honest or dies, and a driver that may lose every answer.

    The promise: what serves has the weights that its label names.
    """

    urls: Bundle[str] = Bundle("urls")

    def __init__(self) -> None:
        super().__init__()
        self.weights = JobWeights()
        self.policy = (0, 0)
        self.label: dict[str, str] = {}
        self.holds: dict[str, str] = {}
        self.trainer_moved = False
        self.now = 0.0

    @initialize(target=urls, count=st.integers(1, 3))
    def start(self, count: int) -> Any:
        names = [f"http://g{number}" for number in range(count)]
        self.label = dict.fromkeys(names, "default")
        self.holds = dict.fromkeys(names, "default")
        return multiple(*names)

    @property
    def update(self) -> WeightUpdate | None:
        return self.weights.running

    def step(self, weights: JobWeights) -> None:
        before = self.weights.running
        self.weights = decode(encode(weights))
        update = self.weights.update
        if before is not None and update is not None and update.state is UpdateState.DONE:
            self.policy = (update.lineage, update.version)

    @precondition(lambda self: self.update is None)
    @rule(ahead=st.integers(0, 2), disk=st.booleans(), rollback=st.booleans(), silent=st.booleans())
    def begin(self, ahead: int, disk: bool, rollback: bool, silent: bool) -> None:
        labels = {url: None if silent else label for url, label in self.label.items()}
        asked = wanted(self.policy[1] + ahead, from_disk="/w" if disk else None, rollback=rollback)
        self.trainer_moved = False
        self.step(begin(self.weights, asked, job_id=JOB, policy=self.policy, labels=labels, now=self.now))

    @precondition(lambda self: self.update is not None and self.update.state is UpdateState.PAUSING)
    @rule(url=urls, answers=st.booleans())
    def pause(self, url: str, answers: bool) -> None:
        assert self.update is not None
        if self.update.parts[url].state is UpdateState.PAUSING:
            update_id = self.update.update_id
            self.step(paused(self.weights, update_id, url, now=self.now) if answers else missed(self.weights, update_id, url, "away"))

    @precondition(lambda self: self.update is not None and all(p.state is not UpdateState.PAUSING for p in self.update.parts.values()))
    @rule()
    def asked(self) -> None:
        assert self.update is not None
        self.step(all_asked(self.weights, self.update.update_id, now=self.now))

    @precondition(lambda self: self.update is not None and self.update.state is UpdateState.PAUSED)
    @rule(url=urls)
    def trainer_moves(self, url: str) -> None:
        assert self.update is not None
        self.holds[url], self.trainer_moved = self.update.label, True

    @precondition(lambda self: self.update is not None and self.update.state is UpdateState.PAUSED)
    @rule()
    def trainer_finishes(self) -> None:
        assert self.update is not None
        for url, part in self.update.parts.items():
            if part.state is UpdateState.PAUSED:
                self.holds[url] = self.update.label
        self.step(finish(self.weights, self.update.update_id, now=self.now))

    @precondition(lambda self: self.weights.update is not None)
    @rule()
    def trainer_gives_up(self) -> None:
        assert self.weights.update is not None
        try:
            said = "moved" if self.trainer_moved else "untouched"
            self.step(abandon(self.weights, self.weights.update.update_id, said, now=self.now))
        except ConflictError:
            pass

    @rule(seconds=st.sampled_from([1.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.step(expire(self.weights, now=self.now))

    @precondition(lambda self: self.update is not None and self.update.state is UpdateState.LOADING)
    @rule(url=urls, fate=st.sampled_from(["well", "refused", "lost before", "lost after"]))
    def bring(self, url: str, fate: str) -> None:
        update = self.update
        assert update is not None
        if update.parts[url].state.over:
            return
        if fate == "refused" and update.from_disk is not None:
            self.step(untouched(self.weights, update.update_id, url, "no such path"))
            return
        if fate in ("well", "lost after"):
            self.holds[url] = self.label[url] = update.label
        if fate == "well":
            self.step(serving(self.weights, update.update_id, url, now=self.now))
        else:
            self.step(missed(self.weights, update.update_id, url, fate))

    @precondition(lambda self: self.update is not None and all(p.state.over for p in self.update.parts.values()))
    @rule()
    def close(self) -> None:
        assert self.update is not None
        self.step(close(self.weights, self.update.update_id, now=self.now))

    @rule(url=urls)
    def reconcile(self, url: str) -> None:
        if url in self.weights.generators:
            self.step(readmitted(self.weights, url, self.label[url], now=self.now))

    @rule(url=urls, what=st.sampled_from(["paused", "missed", "serving"]))
    def late(self, url: str, what: str) -> None:
        """An answer that belongs to an update that is long over."""
        before, over = self.weights.update, f"{JOB}-u0"
        if what == "paused":
            self.step(paused(self.weights, over, url, now=self.now))
        else:
            self.step(missed(self.weights, over, url, "late") if what == "missed" else serving(self.weights, over, url, now=self.now))
        assert self.weights.update == before

    @invariant()
    def what_serves_is_what_its_label_says(self) -> None:
        for url, generator in self.weights.generators.items():
            if generator.standing is Standing.SERVING:
                assert self.holds[url] == self.label[url]
                assert generator.label == self.label[url]

    @invariant()
    def nothing_serves_while_it_is_paused(self) -> None:
        assert not any(g.paused for g in self.weights.generators.values() if g.standing is Standing.SERVING)

    @invariant()
    def what_is_over_is_left_alone_until_it_is_settled(self) -> None:
        assert self.weights.unsettled or all(g.standing is Standing.SERVING for g in self.weights.generators.values())


World.TestCase.settings = hypothesis_settings(max_examples=100, stateful_step_count=40)
TestWorld = World.TestCase


def test_a_generator_that_left_the_job_is_forgotten() -> None:
    assert set(without(begun(), {A}).generators) == {B}
