"""What passes between our parts, from a generator's answer to the trainer's row: frozen dataclasses."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from service.records import FinishReason, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled tokens `[start, end)` of one generation and the policy version (and lineage) that sampled them."""

    version: int
    start: int
    end: int
    lineage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One answer of a generator: N sampled tokens, aligned.

    token_ids int[N], logprobs float[N] in nats, spans cover [0, N) without gaps. `seconds` is wall time of the call.
    """

    token_ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    finish: FinishReason
    matched: int | str | None = None
    cached_tokens: int = 0
    generator: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row for the trainer; T tokens.

    token_ids int32[T], loss_mask uint8[T] (1 exactly on sampled tokens), logprobs float32[T] in nats (0.0 where the mask is 0),
    versions int32[T] (-1 where the mask is 0), prompt_len: tokens before the first sampled one.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    prompt_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where a rollout's time went, in seconds."""

    queued_s: float = 0.0
    sandbox_s: float = 0.0
    generate_s: float = 0.0
    tool_s: float = 0.0
    verify_s: float = 0.0
    ready_s: float = 0.0
    """From the rollout's end to its group's lease by the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What a rollout produced. environment_gap: the most versions that passed between a tool call and the turn after it."""

    rollout_id: str
    index: int
    attempt: int
    outcome: Outcome
    stop_reason: str
    reward: float | None
    reward_detail: dict[str, Any]
    samples: tuple[Sample, ...]
    turns: int
    tool_calls: int
    timing: Timing
    oldest_version: int
    newest_version: int
    environment_gap: int = 0
    metadata: dict[str, Any]
