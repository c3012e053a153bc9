"""The words of the service as types: what clients send (pydantic, strict, bounded). `wire.py` has the values that they are made of,
`trajectories.py` what passes between our parts.

Client models refuse unknown fields. A task's `sandbox`, `limits` and `sampling` are laid over the job's defaults at submit time
(`merge_defaults`), so that what is stored for a group is complete and never changes with the job.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from service.wire import AbsolutePath, EnvName, EnvValue, Name, Network, Text, Url, User, Wire, no_nul

MAX_GROUP_SIZE = 1024
"""Redis steps work through one group at a time; a larger one would hold the store too long."""

MAX_VERSION = 2**31 - 1
"""Versions are exported as int32."""


class Outcome(StrEnum):
    """How a rollout ended, for the trainer."""

    COMPLETED = "completed"
    """The model ended it."""
    TRUNCATED = "truncated"
    """One of the task's limits ended it."""
    CANCELLED = "cancelled"
    """The client ended it."""
    FAILED = "failed"
    """Infrastructure ended it; never exported."""


class StopReason(StrEnum):
    """Why a rollout ended."""

    SUBMITTED = "submitted"
    """The model called `submit`."""
    ANSWERED = "answered"
    """The model answered without calling a tool."""
    TURN_LIMIT = "turn_limit"
    TURN_TOKEN_LIMIT = "turn_token_limit"
    """One reply reached `turn_tokens` without a call in it."""
    TOKEN_LIMIT = "token_limit"
    CONTEXT_LIMIT = "context_limit"
    WALL_LIMIT = "wall_limit"
    SANDBOX_DESTROYED = "sandbox_destroyed"
    """The model's own commands destroyed the sandbox twice."""

    @property
    def outcome(self) -> Outcome:
        done = {StopReason.SUBMITTED, StopReason.ANSWERED, StopReason.SANDBOX_DESTROYED}
        return Outcome.COMPLETED if self in done else Outcome.TRUNCATED


class GroupState(StrEnum):
    """Where a group is. It ends exactly once, in one of the last four."""

    QUEUED = "queued"
    """In the backlog, not yet admitted by the gate."""
    RUNNING = "running"
    """Dispatched: charged against the gate."""
    READY = "ready"
    """Every member ended, or was left out; waits for the trainer."""
    LEASED = "leased"
    """In a batch that the trainer holds."""
    ACKED = "acked"
    DROPPED = "dropped"
    """Stale or filtered; the reason is counted."""
    FAILED = "failed"
    """Infrastructure or a fault of the task."""
    CANCELLED = "cancelled"


class FinishReason(StrEnum):
    """Why one generation ended, in SGLang's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


# ---------------------------------------------------------------------------------------------------------------- from clients

Version = Annotated[int, Field(ge=0, le=MAX_VERSION)]


class SnapshotFields(Wire):
    """When a sandbox's files are kept, so that a rollout whose sandbox is lost goes on from there: between two turns.

    `every_s` counts as `limits.wall_s` does. `ttl_s`: for how long a snapshot that nobody removes is kept.
    """

    every_turns: int | None = Field(default=None, ge=1, le=10_000)
    every_s: float | None = Field(default=None, gt=0, le=604_800)
    ttl_s: float = Field(default=86_400.0, ge=60, le=2_592_000)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.every_turns is None and self.every_s is None:
            raise ValueError("snapshot: set every_turns or every_s, or snapshot itself to null")
        return self


class SandboxFields(Wire):
    """Where a rollout's tools run. shell: `bash` is one lasting shell, or a new one `per_call`: no process is left then but what the
    model starts in the background, and a snapshot lacks nothing."""

    backend: Literal["docker", "process", "modal"] = "docker"
    image: Annotated[Name, Field(description="image reference; the process backend uses the host's own system")] = "rollway-sandbox:1"
    files: dict[AbsolutePath, Text] = Field(default_factory=dict, max_length=1000)
    setup: list[Annotated[Text, Field(max_length=65_536), AfterValidator(no_nul)]] = Field(default_factory=list, max_length=50)
    workdir: AbsolutePath = "/work"
    network: Network = "none"
    user: User | None = None
    capabilities: Literal["none", "root"] = "none"
    cpus: float = Field(default=1.0, gt=0, le=64)
    memory_mib: int = Field(default=512, ge=16, le=262_144)
    pids: int = Field(default=256, ge=8, le=32_768)
    disk_mib: int = Field(default=1024, ge=16, le=262_144)
    env: dict[EnvName, EnvValue] = Field(default_factory=dict, max_length=200)
    lazy: bool = True
    read_only: bool = False
    runtime: Literal["default", "runsc"] = "default"
    shell: Literal["lasting", "per_call"] = "lasting"
    snapshot: SnapshotFields | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.snapshot is not None and self.backend != "docker":
            raise ValueError(f"snapshot: {self.backend} sandboxes have none; use the docker backend, or set snapshot to null")
        return self


class Limits(Wire):
    """What ends a rollout. Tokens are sampled tokens; `wall_s` counts generation, tools and sandbox start, never queues."""

    turns: int = Field(default=50, ge=1, le=10_000)
    tokens: int = Field(default=32_768, ge=1, le=10_000_000)
    turn_tokens: int = Field(default=4096, ge=1, le=1_000_000)
    wall_s: float = Field(default=1800.0, gt=0, le=604_800)
    tool_s: float = Field(default=120.0, gt=0, le=86_400)
    tool_output_bytes: int = Field(default=16_384, ge=64, le=10_000_000)


class Sampling(Wire):
    """SGLang sampling parameters a job or task may set. Lengths and stop tokens are the turn loop's."""

    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)
    min_new_tokens: int | None = Field(default=None, ge=0, le=1_000_000)
    stop: list[Annotated[Text, Field(min_length=1, max_length=200)]] | None = Field(default=None, max_length=16)
    regex: Annotated[Text, Field(max_length=65_536)] | None = None
    json_schema: Annotated[Text, Field(max_length=65_536)] | None = None

    @property
    def restarts(self) -> bool:
        """Whether an engine would restart this state in a continued turn: then a cut turn is generated anew."""
        state = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty, self.min_new_tokens, self.regex, self.json_schema)
        return any(value is not None for value in state)


def _no_parameters() -> dict[str, JsonValue]:
    return {"type": "object", "properties": {}}


class ToolFunction(Wire):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
    description: Text = ""
    parameters: dict[str, JsonValue] = Field(default_factory=_no_parameters)


class RunArgv(Wire):
    """How a custom tool runs in the sandbox: `argv` as it is, the call's arguments as JSON on stdin."""

    argv: list[Annotated[Text, Field(max_length=65_536), AfterValidator(no_nul)]] = Field(min_length=1, max_length=100)


class CustomTool(Wire):
    type: Literal["function"]
    function: ToolFunction
    run: RunArgv


BuiltinTool = Literal["bash", "edit_file", "submit"]


class CommandVerifier(Wire):
    """A command that scores what the rollout left behind. `fresh` runs it in a new sandbox that gets the `artifacts` only.

    It is run by `sh -c` in the task's workdir; its stdin is `{"answer": ...}`, the text of `submit` or of the last reply. With `number`
    and `json` it must exit 0. In the `same` sandbox, directories that hold nothing of the task but `files` are emptied first.
    """

    files: dict[AbsolutePath, Text] = Field(default_factory=dict, max_length=1000)
    command: Annotated[Text, Field(min_length=1, max_length=65_536), AfterValidator(no_nul)]
    timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    reward: Literal["exit_code", "number", "json"] = "exit_code"
    sandbox: Literal["fresh", "same"] = "fresh"
    artifacts: list[AbsolutePath] = Field(default_factory=list, max_length=100)
    max_artifact_bytes: int = Field(default=67_108_864, ge=1, le=1_073_741_824)


class UrlVerifier(Wire):
    """A reward service: it is sent the trajectory (messages, no token ids unless asked) and answers `{"reward": r, ...}`."""

    url: Url
    headers: dict[str, EnvValue] = Field(default_factory=dict, max_length=20)
    timeout_s: float = Field(default=60.0, gt=0, le=3600)


class Message(BaseModel):
    """One message of the prompt, in the OpenAI form. Text stays text: control markers in it never become control tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    reasoning_content: Text | None = None
    tool_calls: list[dict[str, JsonValue]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class TaskSpec(Wire):
    """Prompt, tools, sandbox, verifier and limits: immutable, complete (defaults of the job laid under)."""

    task_id: Name
    messages: list[Message] = Field(min_length=1, max_length=1000)
    tools: list[BuiltinTool | CustomTool] = Field(default_factory=list, max_length=128)
    sandbox: SandboxFields = SandboxFields()
    verifier: CommandVerifier | UrlVerifier | None = None
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    priority: int = Field(default=0, ge=-1000, le=1000)
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [tool if isinstance(tool, str) else tool.function.name for tool in self.tools]
        if len(set(names)) != len(names):
            raise ValueError("tools: two tools have one name; give each its own")
        if self.limits.turn_tokens > self.limits.tokens:
            raise ValueError("limits.turn_tokens is above limits.tokens; lower it, or raise limits.tokens")
        if self.messages[-1].role not in ("user", "tool"):
            raise ValueError("messages: the last one must come from the user or a tool, since the model speaks next")
        return self


class ModelFields(Wire):
    tokenizer: Name
    renderer: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")] = "auto"
    context_tokens: int = Field(ge=16, le=100_000_000)


class GeneratorSpec(Wire):
    """One SGLang server, or a router in front of some. `control_urls`: the workers behind a router, for aborts and weights."""

    url: Url
    max_concurrency: int = Field(default=64, ge=1, le=100_000)
    api_key: Annotated[str, Field(max_length=4000)] | None = None
    admin_api_key: Annotated[str, Field(max_length=4000)] | None = None
    headers: dict[str, EnvValue] = Field(default_factory=dict, max_length=20)
    control_urls: list[Url] = Field(default_factory=list, max_length=1000)


FLUSH_CACHE = Field(description="weight updates also forget the KV of the weights before; what runs is then computed anew")
ENVIRONMENT_GAP = Field(ge=0, le=10_000, description="versions between a tool call and the next turn, beyond which a rollout begins anew")
GROUP_RETRIES = Field(ge=0, le=100_000, description="attempts that infrastructure may cost a group before it fails; null: 2 x group_size")
MIN_GROUP_SIZE = Field(ge=1, le=MAX_GROUP_SIZE, description="a group goes on short while so many members are left; null: never short")


EXTRA_MEMBERS = "rollouts of a group beyond group_size: the first group_size that end are taken, the others stopped"
WEIGHT = "share of the workers, against the weights of the other jobs that have work"

CONCURRENCY = Field(
    description="the cap on rollouts in flight: max_in_flight_rollouts, or what queue, staleness and generators bear below it"
)
MIN_IN_FLIGHT = Field(ge=1, le=1_000_000, description="an adaptive cap never falls below it; null: one group")


class JobSpec(Wire):
    """One training run. `staleness_budget: null` turns the gate off; then `queue_groups` bounds what is out and ready."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    model: ModelFields
    generators: list[Url | GeneratorSpec] = Field(min_length=1, max_length=1000)
    group_size: int = Field(default=8, ge=1, le=MAX_GROUP_SIZE)
    extra_members: int = Field(default=0, ge=0, le=MAX_GROUP_SIZE - 1, description=EXTRA_MEMBERS)
    weight: float = Field(default=1.0, ge=0.01, le=100, description=WEIGHT)
    groups_per_step: int = Field(default=1, ge=1, le=10_000)
    steps_per_version: int = Field(default=1, ge=1, le=1000)
    staleness_budget: int | None = Field(default=1, ge=0, le=10_000)
    max_requeues: int = Field(default=2, ge=0, le=100)
    stale_policy: Literal["requeue", "drop", "pace"] = "requeue"
    weight_update: Literal["in_flight", "abort_resume", "drain"] = "in_flight"
    flush_cache: Annotated[bool, FLUSH_CACHE] = False
    max_environment_gap: Annotated[int | None, ENVIRONMENT_GAP] = None
    zero_variance: Literal["keep", "drop"] = "keep"
    group_retries: Annotated[int | None, GROUP_RETRIES] = None
    min_group_size: Annotated[int | None, MIN_GROUP_SIZE] = None
    concurrency: Annotated[Literal["fixed", "adaptive"], CONCURRENCY] = "fixed"
    max_in_flight_rollouts: int = Field(default=256, ge=1, le=1_000_000)
    min_in_flight_rollouts: Annotated[int | None, MIN_IN_FLIGHT] = None
    queue_groups: int = Field(default=256, ge=1, le=1_000_000)
    backlog_limit: int = Field(default=10_000, ge=1, le=1_000_000)
    sandbox: dict[str, JsonValue] = Field(default_factory=dict)
    limits: dict[str, JsonValue] = Field(default_factory=dict)
    sampling: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.members > MAX_GROUP_SIZE:
            raise ValueError(f"extra_members: with group_size there are more than {MAX_GROUP_SIZE} members; lower one of them")
        if self.max_in_flight_rollouts < self.members:
            sizes = "group_size" if not self.extra_members else "group_size and extra_members together"
            raise ValueError(f"max_in_flight_rollouts is below {sizes}: no group could ever start; raise it")
        if self.least_in_flight > self.max_in_flight_rollouts:
            raise ValueError("min_in_flight_rollouts is above max_in_flight_rollouts; lower it, or leave it out")
        if self.min_group_size is not None and self.min_group_size > self.group_size:
            raise ValueError("min_group_size is above group_size: no group has so many members; lower it, or leave it out")
        return self

    @property
    def members(self) -> int:
        """Rollouts of one group, those included that it has more than it takes."""
        return self.group_size + self.extra_members

    @property
    def least_in_flight(self) -> int:
        """An adaptive cap never falls below it."""
        return max(self.min_in_flight_rollouts or 0, self.members)

    @property
    def generator_specs(self) -> list[GeneratorSpec]:
        return [GeneratorSpec(url=g) if isinstance(g, str) else g for g in self.generators]


class JobPatch(Wire):
    """What may change in a live job; what is left out stays."""

    nullable: ClassVar = frozenset({"staleness_budget", "group_retries", "min_group_size", "max_environment_gap", "min_in_flight_rollouts"})
    """Where null is a value."""

    generators: list[Url | GeneratorSpec] | None = Field(default=None, min_length=1, max_length=1000)
    weight: float | None = Field(default=None, ge=0.01, le=100, description=WEIGHT)
    staleness_budget: int | None = Field(default=None, ge=0, le=10_000)
    max_requeues: int | None = Field(default=None, ge=0, le=100)
    stale_policy: Literal["requeue", "drop", "pace"] | None = None
    weight_update: Literal["in_flight", "abort_resume", "drain"] | None = None
    flush_cache: Annotated[bool | None, FLUSH_CACHE] = None
    max_environment_gap: Annotated[int | None, ENVIRONMENT_GAP] = None
    zero_variance: Literal["keep", "drop"] | None = None
    group_retries: Annotated[int | None, GROUP_RETRIES] = None
    min_group_size: Annotated[int | None, MIN_GROUP_SIZE] = None
    concurrency: Annotated[Literal["fixed", "adaptive"] | None, CONCURRENCY] = None
    max_in_flight_rollouts: int | None = Field(default=None, ge=1, le=1_000_000)
    min_in_flight_rollouts: Annotated[int | None, MIN_IN_FLIGHT] = None
    queue_groups: int | None = Field(default=None, ge=1, le=1_000_000)
    backlog_limit: int | None = Field(default=None, ge=1, le=1_000_000)
    groups_per_step: int | None = Field(default=None, ge=1, le=10_000)
    steps_per_version: int | None = Field(default=None, ge=1, le=1000)
    sandbox: dict[str, JsonValue] | None = None
    limits: dict[str, JsonValue] | None = None
    sampling: dict[str, JsonValue] | None = None


def merge_defaults(job: JobSpec, task: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Lay a client's task over its job's defaults, field by field inside `sandbox`, `limits` and `sampling`."""
    merged = dict(task)
    for part, defaults in (("sandbox", job.sandbox), ("limits", job.limits), ("sampling", job.sampling)):
        given = merged.get(part, {})
        if isinstance(given, Mapping) and (defaults or given):
            merged[part] = {**defaults, **given}
    return merged
