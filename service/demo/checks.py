"""What must hold of everything a demo was given: pure functions that return the problems they find, in words.

Truth is the stand-in generator's own record of what it was sent and what it sampled. A sampled stretch of an exported sample is one
or more of these records (more where a generation was cut off and continued), each used once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One exported sample as arrays, T tokens each."""

    token_ids: Ids
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    prompt_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """N tokens that the generator says it sampled in one call."""

    token_ids: Ids
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]


class Truth:
    """The generator's records, by the ids that it was sent."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._by_prompt: dict[bytes, list[Sampled]] = defaultdict(list)
        self.taken = 0
        """Tokens that were compared and found equal."""
        for record in records:
            sampled = Sampled(
                token_ids=np.asarray(record["output_ids"], np.int32),
                logprobs=np.asarray(record["logprobs"], np.float32),
                versions=np.asarray([int(version) for version in record["versions"]], np.int32),
            )
            if len(sampled.token_ids):
                self._by_prompt[np.asarray(record["input_ids"], np.int32).tobytes()].append(sampled)

    def take(self, row: Row, start: int, end: int) -> int | None:
        """Use up the record of the tokens sampled at `[start, end)` or at a beginning of it: where it ends, None if there is none."""
        found = self._by_prompt.get(row.token_ids[:start].tobytes(), [])
        for place, sampled in enumerate(found):
            stop = start + len(sampled.token_ids)
            if stop <= end and _same(row, start, stop, sampled):
                del found[place]
                self.taken += stop - start
                return stop
        return None


def _same(row: Row, start: int, stop: int, sampled: Sampled) -> bool:
    return (
        np.array_equal(row.token_ids[start:stop], sampled.token_ids)
        and np.array_equal(row.logprobs[start:stop], sampled.logprobs)
        and np.array_equal(row.versions[start:stop], sampled.versions)
    )


def row(sample: Mapping[str, Any]) -> Row:
    """A sample of a JSON batch as arrays."""
    return Row(
        token_ids=np.asarray(sample["token_ids"], np.int32),
        loss_mask=np.asarray(sample["loss_mask"], np.uint8),
        logprobs=np.asarray(sample["logprobs"], np.float32),
        versions=np.asarray(sample["versions"], np.int32),
        prompt_len=int(sample["prompt_len"]),
    )


def stretches(loss_mask: npt.NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """Each `[start, end)` where the mask is 1."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], loss_mask, [0])).astype(np.int8))).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def misaligned(row: Row) -> list[str]:
    """Whether the arrays of one sample belong together."""
    lengths = {len(row.token_ids), len(row.loss_mask), len(row.logprobs), len(row.versions)}
    if len(lengths) != 1:
        return [f"arrays of different lengths {sorted(lengths)}"]
    sampled = row.loss_mask == 1
    found = {
        "a mask other than 0 and 1": bool(np.any(row.loss_mask > 1)),
        "no sampled token": not sampled.any(),
        "a log-probability or version beside the sampled tokens": bool(
            np.any(row.logprobs[~sampled]) or np.any(row.versions[~sampled] != -1)
        ),
        "a sampled token without a version": bool(np.any(row.versions[sampled] < 0)),
        "a log-probability that is none": not bool(np.all(np.isfinite(row.logprobs)) and np.all(row.logprobs <= 0)),
        "a wrong prompt_len": row.prompt_len != int(np.argmax(sampled)),
    }
    return [problem for problem, holds in found.items() if holds]


def untrue(row: Row, truth: Truth) -> list[str]:
    """Whether each sampled stretch is what the generator recorded: ids, log-probabilities as float32, versions."""
    for start, end in stretches(row.loss_mask):
        at: int | None = start
        while at is not None and at < end:
            at = truth.take(row, at, end)
        if at is None:
            return [f"tokens {start}..{end} are not what the generator recorded"]
    return []


def check_group(group: Mapping[str, Any], *, policy_version: int, budget: int, truth: Truth | None) -> list[str]:
    """Everything about one delivered group. `truth` None: the generator keeps no record, so only the shapes are checked."""
    problems = []
    oldest = policy_version
    for trajectory in group["trajectories"]:
        for number, sample in enumerate(trajectory["samples"]):
            exported = row(sample)
            wrong = misaligned(exported) or (untrue(exported, truth) if truth else [])
            problems += [f"{trajectory['rollout_id']} sample {number}: {problem}" for problem in wrong]
            if not wrong:
                oldest = min(oldest, int(exported.versions[exported.loss_mask == 1].min()))
    if group["staleness"] > budget:
        problems.append(f"{group['group_id']}: staleness {group['staleness']} is above the budget {budget}")
    if policy_version - oldest != group["staleness"]:
        problems.append(f"{group['group_id']}: its tokens say staleness {policy_version - oldest}, the batch says {group['staleness']}")
    if len(group["trajectories"]) != group["size"]:
        problems.append(f"{group['group_id']}: {len(group['trajectories'])} trajectories, size {group['size']}")
    return problems


ENDS = frozenset({"acked", "dropped", "failed", "cancelled"})


def check_ends(submitted: Iterable[str], delivered: Iterable[str], states: Mapping[str, str]) -> list[str]:
    """Whether each submitted group came to exactly one end, and exactly the delivered ones to `acked`; none may fail here."""
    delivered = list(delivered)
    problems = [f"{group_id} was delivered more than once" for group_id in sorted({g for g in delivered if delivered.count(g) > 1})]
    for group_id in submitted:
        state = states.get(group_id, "lost")
        if state not in ENDS or state == "failed":
            problems.append(f"{group_id} is {state}")
        elif (state == "acked") != (group_id in delivered):
            problems.append(f"{group_id} is {state} but was {'' if group_id in delivered else 'not '}delivered")
    return problems
