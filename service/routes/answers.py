"""What the API answers, as the wire shows it: records of the store without what is only ours, secrets masked."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field
from starlette.responses import Response

from service.batches import BatchRecord
from service.events import detail_object
from service.groups import GroupRecord, RolloutRecord
from service.jobs import JobCounts, JobRecord
from service.preflight import Finding
from service.records import GroupState

MASK = "***"
"""Stands where a secret was given; secrets are never read back."""


class FateAnswer(BaseModel):
    """Rollouts of one fate."""

    rollouts: int
    tokens: int
    lengths: dict[int, int] = Field(
        description="rollouts by sampled tokens: each key (0, 1, 2, 4, 8...) counts those with at most so many, and more than the key below"
    )


class LedgerAnswer(BaseModel):
    """What became of sampled tokens, for a look at what discarding does to lengths."""

    kept: FateAnswer = Field(description="acked by the trainer")
    discarded: dict[str, FateAnswer] = Field(
        description="by reason: stale, requeued, rolled_back, zero_variance, surplus, cancelled, sibling_failed, failed:<why> (attempts "
        "without a trajectory); cut_back and sampled_anew are tokens that a rollout gave up and went on"
    )


class CountsAnswer(BaseModel):
    """Live counts of a job: groups, unless the name says rollouts or tokens."""

    backlog: int
    running: int
    ready: int
    leased: int
    acked: int
    cancelled: int
    dropped: dict[str, int]
    failed: dict[str, int]
    requeued: int
    charged: int
    capacity: int | None = Field(description="groups the gate admits; null: the gate is off")
    pending_rollouts: int
    leased_rollouts: int
    in_flight_rollouts: int
    in_flight_cap: int = Field(
        description="of rollouts in flight, as it is now: max_in_flight_rollouts, or below it with concurrency adaptive"
    )
    left_out_rollouts: int = Field(description="members that failed and were left out of a group")
    surplus_rollouts: int = Field(description="members that were stopped since their group had enough without them (extra_members)")
    tokens_generated: int = Field(description="sampled and journaled: delivered, discarded or standing")
    tokens_discarded: int
    tokens_delivered: int
    tokens_standing: int = Field(description="of rollouts whose group has not ended")
    ledger: LedgerAnswer


class JobAnswer(BaseModel):
    job_id: str
    name: str
    policy_version: int
    lineage: int
    created_at: float
    deleted: bool
    spec: dict[str, Any] = Field(description="as it was created and patched; secrets are masked")
    counts: CountsAnswer | None = None
    warnings: list[Finding] = []


class JobsAnswer(BaseModel):
    jobs: list[JobAnswer]


class PreflightAnswer(BaseModel):
    ok: bool = Field(description="no finding is an error")
    findings: list[Finding]
    disk_limits: dict[str, list[str]] = Field(description="by sandbox backend, how its live workers bound disk_mib")


class SubmittedGroup(BaseModel):
    task_id: str
    group_id: str


class SubmittedAnswer(BaseModel):
    groups: list[SubmittedGroup]
    backlog: int
    warnings: list[Finding]


class RolloutAnswer(BaseModel):
    rollout_id: str
    index: int
    attempt: int
    state: str
    outcome: str | None
    stop_reason: str | None
    reward: float | None
    reward_detail: Any
    turns: int
    tool_calls: int
    sampled_tokens: int
    oldest_version: int | None
    newest_version: int | None
    worker: str | None
    sandbox_id: str | None
    created_at: float
    ended_at: float | None
    failures: list[str] = Field(description="why earlier attempts ended")


class GroupAnswer(BaseModel):
    group_id: str
    job_id: str
    task_id: str
    state: GroupState
    reason: str | None
    size: int = Field(description="members that ended or still may: the others failed and were left out, or were surplus")
    requested_size: int
    requeues: int
    failed_attempts: int = Field(description="attempts that infrastructure ended, against group_retries")
    priority: int
    created_at: float
    batch_id: str | None
    oldest_version: int | None
    members: list[RolloutAnswer]


class GroupsAnswer(BaseModel):
    groups: list[GroupAnswer]
    next: str | None = Field(description="pass as `after` for the next page; null: this was the last")


class RolloutTimings(BaseModel):
    """Seconds so far, of this attempt."""

    queued_s: float
    sandbox_s: float
    generate_s: float
    tool_s: float
    verify_s: float


class SampleAnswer(BaseModel):
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    prompt_len: int


class RolloutDetailAnswer(RolloutAnswer):
    timings: RolloutTimings
    sandbox: str | None = Field(description="the sandbox's name, once one was asked for")
    error: str | None = Field(default=None, description="where its journal cannot be read, and why: all else is as far as that goes")
    messages: list[dict[str, Any]] | None = Field(default=None, description="with include=messages, until the group is acked")
    samples: list[SampleAnswer] | None = Field(default=None, description="with include=samples, until the group is acked")


class LeasedGroup(BaseModel):
    group_id: str
    task_id: str
    staleness: int
    requested_size: int
    size: int


class LiveBatch(BaseModel):
    batch_id: str
    policy_version: int
    lineage: int
    lease_until: float
    groups: list[LeasedGroup]


class LiveBatchesAnswer(BaseModel):
    batches: list[LiveBatch]


class LeaseAnswer(BaseModel):
    batch_id: str
    lease_until: float


class BatchStateAnswer(BaseModel):
    batch_id: str
    state: str


class TimingAnswer(BaseModel):
    """Seconds."""

    queued_s: float
    sandbox_s: float
    generate_s: float
    tool_s: float
    verify_s: float
    ready_s: float


class VersionsAnswer(BaseModel):
    oldest: int
    newest: int
    environment_gap: int = Field(description="the most versions that passed between a tool call and the turn after it")


class TrajectoryAnswer(BaseModel):
    rollout_id: str
    index: int
    attempt: int
    outcome: str
    stop_reason: str
    reward: float | None
    reward_detail: dict[str, Any]
    samples: list[SampleAnswer]
    turns: int
    tool_calls: int
    timing: TimingAnswer
    versions: VersionsAnswer
    metadata: dict[str, Any]


class BatchGroupAnswer(LeasedGroup):
    trajectories: list[TrajectoryAnswer]


class BatchAnswer(BaseModel):
    """Also as an Arrow stream, one row a sample, by `Accept`."""

    batch_id: str
    policy_version: int
    lineage: int
    lease_until: float
    groups: list[BatchGroupAnswer]


def answer(model: BaseModel, status: int = 200, *, location: str | None = None) -> Response:
    headers = {"Location": location} if location else None
    return Response(model.model_dump_json(), status_code=status, media_type="application/json", headers=headers)


def job_answer(record: JobRecord, counts: JobCounts | None = None, *, warnings: Sequence[Finding] = ()) -> JobAnswer:
    return JobAnswer(
        job_id=record.job_id,
        name=record.spec.name,
        policy_version=record.policy_version,
        lineage=record.lineage,
        created_at=record.created_at,
        deleted=record.deleted,
        spec=masked_spec(record),
        counts=CountsAnswer.model_validate(counts, from_attributes=True) if counts else None,
        warnings=list(warnings),
    )


def masked_spec(record: JobRecord) -> dict[str, Any]:
    spec = record.spec.model_dump(mode="json")
    for generator in spec["generators"]:
        if isinstance(generator, dict):
            for secret in ("api_key", "admin_api_key"):
                generator[secret] = MASK if generator[secret] else None
            generator["headers"] = dict.fromkeys(generator["headers"], MASK)
    return spec


def rollout_fields(record: RolloutRecord) -> dict[str, Any]:
    """The fields of `RolloutAnswer`."""
    fields = {name: getattr(record, name) for name in RolloutAnswer.model_fields}
    return fields | {"reward_detail": detail_object(record.reward_detail), "failures": list(record.failures)}


def group_answer(record: GroupRecord) -> GroupAnswer:
    fields = {name: getattr(record, name) for name in GroupAnswer.model_fields if name != "members"}
    return GroupAnswer(**fields, members=[RolloutAnswer(**rollout_fields(member)) for member in record.members])


def live_batch(record: BatchRecord) -> LiveBatch:
    return LiveBatch(
        batch_id=record.batch_id,
        policy_version=record.policy_version,
        lineage=record.lineage,
        lease_until=record.lease_until,
        groups=[LeasedGroup.model_validate(group, from_attributes=True) for group in record.groups],
    )
