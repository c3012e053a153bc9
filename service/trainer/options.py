"""What a simulated trainer is asked to do."""

from dataclasses import dataclass
from pathlib import Path


class TrainerError(Exception):
    """The simulated trainer cannot do what it was asked: names the option or the call, and the cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things take, in simulated seconds; `time_scale` of them pass in a real one.

    step_s: mean of a step's computation, lognormal with `step_sigma` (0: always the mean). update_s: for weights to reach the generators.
    """

    step_s: float
    step_sigma: float = 0.0
    update_s: float = 0.0
    time_scale: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """`job`: an id; or `spec`: a job's body in a file. `steps`, `epochs`: None means without an end.

    tasks: a file as `POST /v1/jobs/{job_id}/tasks` takes it; None: prompts without tools or a verifier. prefetch: batches leased ahead of
    the one that is trained on. weight_updates: through the service's weight updates instead of labelling the generators itself. warm_up:
    first steps that are left out of the figures. keep: leave a job that this trainer created.
    """

    url: str
    key: str = ""
    job: str | None = None
    spec: Path | None = None
    tasks: Path | None = None
    epochs: int | None = None
    steps: int | None = None
    pace: Pace
    prefetch: int = 0
    weight_updates: bool = False
    warm_up: int = 0
    lease_s: float = 60.0
    keep: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        if (self.job is None) == (self.spec is None):
            raise TrainerError("give the job: either --job ID of one that is there, or --spec FILE with the body of POST /v1/jobs")
        if self.steps is not None and self.warm_up >= self.steps:
            raise TrainerError(f"--warm-up {self.warm_up} leaves no step of --steps {self.steps} for the figures: lower it")
        if self.epochs is not None and self.tasks is None:
            raise TrainerError("--epochs counts passes over --tasks FILE, which is missing")
