"""What the API takes, beyond the records themselves."""

from typing import Annotated, Any, Literal

from pydantic import Field

from service.records import JobPatch, JobSpec, TaskSpec, Version
from service.submissions import MAX_TASKS
from service.wire import Wire

MAX_WAIT_S = 60.0
"""Proxies cut silent requests not much later."""


class TaskList(Wire):
    """Tasks as clients send them; each is laid over the job's defaults before it is validated."""

    tasks: list[Any] = Field(min_length=1, max_length=MAX_TASKS)


class TasksBody(Wire):
    """Documents `TaskList`: what each task may say."""

    tasks: list[TaskSpec] = Field(min_length=1, max_length=MAX_TASKS)


Seconds = Annotated[float, Field(gt=0, le=604_800)]


class BatchBody(Wire):
    """Lease `groups` ready groups for `lease_s`, waiting up to `wait_s` for them. `trains_version`: the version that a prefetched batch
    will train, if it is later than the job's."""

    groups: int = Field(ge=1, le=1_000_000)
    wait_s: float = Field(default=0.0, ge=0, le=MAX_WAIT_S)
    lease_s: Seconds = 900.0
    allow_fewer: bool = False
    trains_version: Version | None = None


class ExtendBody(Wire):
    """The lease runs for `lease_s` from now."""

    lease_s: Seconds = 900.0


BatchId = Annotated[str, Field(max_length=200)]


class PolicyBody(Wire):
    """The trainer has published weights `version`."""

    version: Version
    ack: list[BatchId] = Field(default_factory=list, max_length=10_000)
    rollback: bool = False


class WeightUpdateBody(Wire):
    """Bring the job's generators to weights `version`.

    from_disk: a path as the generators see it; null: the trainer moves the weights itself, between `paused` and finish. rollback: as of
    PUT policy. timeout_s: the longest that a phase (pausing, the trainer's, loading) may take. flush_cache: null: the job's.
    """

    version: Version
    from_disk: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    rollback: bool = False
    timeout_s: float = Field(default=600.0, ge=1, le=21_600)
    flush_cache: bool | None = None


class AbandonBody(Wire):
    """Whether the trainer has moved weights, or may have."""

    weights: Literal["untouched", "moved"]


class EmptyBody(Wire):
    """Nothing, or `{}`."""


BODIES = (JobSpec, JobPatch, TasksBody, BatchBody, ExtendBody, PolicyBody, WeightUpdateBody, AbandonBody, EmptyBody)
"""Bodies are read and validated by the routes themselves (bounded, off the loop); OpenAPI learns of them here."""


def takes(model: type[Wire], *, required: bool = True) -> dict[str, Any]:
    """The `openapi_extra` of a route with this body."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}
