"""What is known of a job's weights: its generators, and the update that moves them. Values only; what follows what is `weight_rules`'."""

from enum import StrEnum
from typing import Literal

import msgspec

Mode = Literal["in_flight", "abort_resume", "drain"]
PauseMode = Literal["in_place", "retract", "abort"]
Said = Literal["untouched", "moved"]


class UpdateState(StrEnum):
    """Where an update, or one generator in it, is."""

    PAUSING = "pausing"
    PAUSED = "paused"
    """Everything that could be paused is: the trainer may move weights."""
    LOADING = "loading"
    """Weights, labels, and going on."""
    DONE = "done"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in (UpdateState.DONE, UpdateState.FAILED)


class Standing(StrEnum):
    """What a job's workers may do with a generator."""

    SERVING = "serving"
    HELD = "held"
    """An update is on, or has just failed without touching it: no new calls; those that run stand still or finish."""
    QUARANTINED = "quarantined"
    """No new calls; those that run are continued elsewhere."""


class GeneratorWeights(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What is known of the weights of one generator. `label`: what it said of itself last, or was told; None: never known.

    lineage: of the job when that was read; a label that names none is of it.
    moved: its weights may be others than the label says. unprovable: then no label that it says proves anything either, since a load of an
    update before may come to its end late, under the label of the present one.

    paused: it was told to stand still. paused_s: how long it stood still so far.
    """

    standing: Standing = Standing.SERVING
    label: str | None = None
    lineage: int = 0
    moved: bool = False
    unprovable: bool = False
    why: str = ""
    paused: bool = False
    paused_at: float = 0.0
    paused_s: float = 0.0


class Part(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One generator in an update. `doubted`: its weights were in doubt before the update began."""

    state: UpdateState = UpdateState.PAUSING
    detail: str = ""
    doubted: bool = False


class WeightUpdate(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One update. `deadline`: unix time at which its present phase is over, done or not; a phase lasts `timeout_s`."""

    update_id: str
    n: int
    version: int
    lineage: int
    rollback: bool
    from_disk: str | None
    mode: Mode
    flush_cache: bool
    timeout_s: float
    began_at: float
    deadline: float
    state: UpdateState = UpdateState.PAUSING
    reason: str = ""
    finished: bool = False
    """The trainer said that it has moved the weights."""
    said: Said | None = None
    ended_at: float | None = None
    parts: dict[str, Part] = {}
    request: str | None = None
    """The key of the client's request that began it."""

    @property
    def label(self) -> str:
        """What its generators are called from then on: with the lineage, since version 8 before a rollback is not version 8 after it."""
        return f"{self.lineage}.{self.version}"

    @property
    def pause_mode(self) -> PauseMode:
        """SGLang's word. Under requests that stand still in place nothing can be flushed, since they keep their KV: they are retracted."""
        if self.mode == "abort_resume":
            return "abort"
        return "retract" if self.flush_cache else "in_place"


class JobWeights(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Everything about the weights of one job. `current`: the label of its last update that was done; None: none was yet."""

    generators: dict[str, GeneratorWeights] = {}
    current: str | None = None
    update: WeightUpdate | None = None
    """The one that runs, or ran last."""
    count: int = 0

    @property
    def running(self) -> WeightUpdate | None:
        return self.update if self.update is not None and not self.update.state.over else None

    @property
    def unsettled(self) -> bool:
        """Whether there is anything left to be driven."""
        return self.running is not None or any(g.standing is not Standing.SERVING for g in self.generators.values())


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer asks for."""

    version: int
    from_disk: str | None
    rollback: bool
    timeout_s: float
    mode: Mode
    flush_cache: bool
    request: str | None = None


_decoder = msgspec.json.Decoder(JobWeights)


def decode(raw: bytes | None) -> JobWeights:
    return _decoder.decode(raw) if raw else JobWeights()


def encode(weights: JobWeights) -> bytes:
    return msgspec.json.encode(weights)
