"""The books of a run: what was submitted, sampled and delivered must add up. Pure: what was found goes in, what is wrong comes out."""

import json
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ENDS = frozenset({"acked", "dropped", "failed", "cancelled"})
OURS = ("internal", "misaligned tokens", "task")
"""Reasons of attempts that no fault of the machinery explains: here they are bugs."""

Ids = tuple[int, ...]

WIDTH = 4
"""Bytes of one packed id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One line of a generator's record. group: whose task was in the prompt. prompt: its ids, packed: there may be many."""

    group_id: str
    prompt: bytes
    output_ids: Ids
    logprobs: tuple[float, ...]
    versions: Ids


def pack(ids: Iterable[int]) -> bytes:
    return array("i", ids).tobytes()


def read_record(lines: Iterable[str], group_of: Callable[[Sequence[int]], str]) -> Iterator[Sampled]:
    for line in lines:
        told = json.loads(line)
        yield Sampled(
            group_id=group_of(told["input_ids"]),
            prompt=pack(told["input_ids"]),
            output_ids=tuple(told["output_ids"]),
            logprobs=tuple(np.float32(told["logprobs"]).tolist()),
            versions=tuple(told["versions"]),
        )


@dataclass(slots=True, kw_only=True)
class Found:
    """What a run left. groups: as the API answers them at the end. deliveries: of each group, every time it came to the trainer."""

    submitted: Sequence[str]
    groups: Mapping[str, Mapping[str, Any]]
    counts: Mapping[str, Any]
    deliveries: Mapping[str, Sequence[Mapping[str, Any]]]
    acked: Mapping[str, Sequence[str]]
    record: Sequence[Sampled]


@dataclass(slots=True)
class Audit:
    """problems: what does not add up. tokens: sampled ones, by what became of them."""

    problems: list[str] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    generations: int = 0

    def need(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


def audit(found: Found) -> Audit:
    made = Audit()
    check_ends(found, made)
    check_counts(found, made)
    check_deliveries(found, made)
    check_tokens(found, made)
    check_ledger(found, made)
    return made


def check_ends(found: Found, made: Audit) -> None:
    """Every submitted group has one end, and those that were acked were acked once."""
    made.need(sorted(found.groups) == sorted(found.submitted), "the groups that exist are not those that were submitted")
    made.need(len(set(found.submitted)) == len(found.submitted), "a group was made twice")
    acks = Counter(group_id for groups in found.acked.values() for group_id in groups)
    for group_id, group in found.groups.items():
        state = group["state"]
        made.need(state in ENDS, f"{group_id} has no end: {state}")
        made.need(state not in ("dropped", "failed") or bool(group["reason"]), f"{group_id} {state} without a reason")
        made.need(acks[group_id] == 1 if state == "acked" else acks[group_id] == 0 or state == "cancelled",
                  f"{group_id} is {state}, and {acks[group_id]} acked batches held it")  # fmt: skip
        for member in group["members"]:
            for reason in member["failures"]:
                made.attempts[reason.partition(":")[0]] += 1
                made.need(not reason.startswith(OURS), f"{member['rollout_id']}: {reason}")


def check_counts(found: Found, made: Audit) -> None:
    """What the job counts is what its groups say, and nothing holds a place any more."""
    states, counts = Counter(group["state"] for group in found.groups.values()), found.counts
    for state in ENDS:
        counted = sum(counts[state].values()) if isinstance(counts[state], dict) else counts[state]
        made.need(counted == states[state], f"{counted} groups counted as {state}, {states[state]} are")
    for name in ("backlog", "running", "ready", "leased", "charged", "in_flight_rollouts"):
        made.need(counts[name] == 0, f"{name} is {counts[name]} at the end")


def check_deliveries(found: Found, made: Audit) -> None:
    """A group that comes again is the same, unless it ran again; whole; and no command's effect was doubled or lost."""
    for group_id, deliveries in found.deliveries.items():
        versions: dict[tuple[int, ...], list[Any]] = {}
        for group in deliveries:
            trajectories = group["trajectories"]
            made.need(len(trajectories) == group["size"] == group["requested_size"], f"{group_id} came with {len(trajectories)} members")
            attempts = tuple(trajectory["attempt"] for trajectory in trajectories)
            samples = [trajectory["samples"] for trajectory in trajectories]
            made.need(versions.setdefault(attempts, samples) == samples, f"{group_id} came twice and differed")
            for told in trajectories:
                made.need(told["reward"] == 1.0 and told["stop_reason"] == "submitted",
                          f"{told['rollout_id']} a{told['attempt']}: {told['stop_reason']}, reward {told['reward']}: "
                          f"{told['reward_detail']}")  # fmt: skip


def check_tokens(found: Found, made: Audit) -> None:
    """Each exported run of sampled tokens is what generators say they sampled, for exactly the ids before it; every other sampled token
    belongs to something whose end has a reason."""
    by_prompt: dict[bytes, list[Sampled]] = defaultdict(list)
    for sampled in found.record:
        by_prompt[sampled.prompt].append(sampled)
    exported: set[int] = set()
    starts: set[bytes] = set()
    for group_id, deliveries in found.deliveries.items():
        if found.groups[group_id]["state"] == "acked":
            for trajectory in deliveries[-1]["trajectories"]:
                for sample in trajectory["samples"]:
                    chain = generations_of(sample, by_prompt)
                    made.need(chain is not None, f"{trajectory['rollout_id']}: exported tokens are not what was sampled")
                    exported |= {id(sampled) for sampled in chain or ()}
                    starts |= {sampled.prompt for sampled in chain or ()}
    made.generations = len(exported)
    by_group: dict[str, list[Sampled]] = defaultdict(list)
    for sampled in found.record:
        by_group[sampled.group_id].append(sampled)
    for group_id, of_group in by_group.items():
        given_up: list[bytes] = []  # histories that nothing exported begins with
        for sampled in sorted(of_group, key=lambda sampled: len(sampled.prompt)):
            if id(sampled) in exported:
                what = "exported"
            else:
                what = fate(sampled, found.groups[group_id], starts, given_up)
                given_up.append(sampled.prompt + pack(sampled.output_ids))
            made.tokens[what] += len(sampled.output_ids)
            made.need(what != "unexplained", f"{group_id}: {len(sampled.output_ids)} sampled tokens are nowhere")
    delivered = found.counts["tokens_delivered"]
    made.need(delivered == made.tokens["exported"], f"{delivered} tokens counted as delivered, {made.tokens['exported']} are")


def generations_of(sample: Mapping[str, Any], by_prompt: Mapping[bytes, Sequence[Sampled]]) -> list[Sampled] | None:
    """The recorded generations that a sample's sampled tokens are made of, in order; None where something else is in it."""
    ids, mask = tuple(sample["token_ids"]), np.asarray(sample["loss_mask"])
    logprobs, versions = tuple(np.float32(sample["logprobs"]).tolist()), tuple(sample["versions"])
    if not len(ids) == len(mask) == len(logprobs) == len(versions):
        return None
    outside = mask == 0
    if np.asarray(logprobs)[outside].any() or (np.asarray(versions)[outside] != -1).any():
        return None
    packed = pack(ids)
    found: list[Sampled] = []
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    for at, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        while at < end:
            here = (
                sampled
                for sampled in by_prompt.get(packed[: at * WIDTH], ())
                if 0 < len(sampled.output_ids) <= end - at
                and (sampled.output_ids, sampled.logprobs, sampled.versions)
                == tuple(part[at : at + len(sampled.output_ids)] for part in (ids, logprobs, versions))
            )
            longest = max(here, key=lambda sampled: len(sampled.output_ids), default=None)
            if longest is None:
                return None
            found.append(longest)
            at += len(longest.output_ids)
    return found


def fate(sampled: Sampled, group: Mapping[str, Any], starts: set[bytes], given_up: Sequence[bytes]) -> str:
    """Why a generation was not exported. starts: the ids from which exported ones were sampled."""
    if group["state"] != "acked":
        return f"{group['state']}: {reason}" if (reason := str(group["reason"] or "").partition(":")[0]) else str(group["state"])
    if group["requeues"]:
        return "requeued"
    if sampled.prompt in starts:
        return "sampled again"  # the answer was lost with whoever waited for it; or the rollout went back to a snapshot
    if any(sampled.prompt.startswith(history) for history in given_up):
        return "followed what was sampled again"
    failures = [reason.partition(":")[0] for member in group["members"] for reason in member["failures"]]
    return f"attempt ended: {failures[-1]}" if failures else "unexplained"


LOST_ANSWERS = "answers that nobody got"


def check_ledger(found: Found, made: Audit) -> None:
    """What the job says became of its tokens adds up, and gives no reason more tokens than were sampled where that reason was at work."""
    counts, discarded = found.counts, found.counts["ledger"]["discarded"]
    generated, delivered = counts["tokens_generated"], counts["tokens_delivered"]
    sampled = sum(len(sampled.output_ids) for sampled in found.record)
    made.tokens[LOST_ANSWERS] = sampled - generated
    by_reason = sum(entry["tokens"] for entry in discarded.values())
    made.need(sampled >= generated, f"{generated} tokens counted as generated, and only {sampled} were sampled")
    made.need(counts["tokens_standing"] == 0, f"{counts['tokens_standing']} tokens stand with nothing")
    made.need(
        generated == delivered + by_reason, f"of {generated} tokens {delivered} were delivered and {by_reason} discarded with a reason"
    )
    made.need(counts["tokens_discarded"] == by_reason, f"{counts['tokens_discarded']} tokens discarded, {by_reason} of them with a reason")
    kept = counts["ledger"]["kept"]["tokens"]
    made.need(kept == delivered, f"{kept} tokens entered as kept, {delivered} as delivered")
    most: Counter[str] = Counter()
    for one in found.record:
        group = found.groups[one.group_id]
        for reason in reasons_at(group):
            most[reason] += len(one.output_ids)
    for reason, entry in discarded.items():
        made.need(entry["tokens"] <= most[reason], f"{entry['tokens']} tokens discarded as {reason}, and at most {most[reason]} can be")


def reasons_at(group: Mapping[str, Any]) -> set[str]:
    """Why tokens of a group may have been discarded, by what its own record says."""
    failures = {f"failed:{reason.partition(':')[0]}" for member in group["members"] for reason in member["failures"]}
    reasons = failures | {"cut_back", "sampled_anew"}
    if group["requeues"]:
        reasons |= {"requeued"}
    if group["state"] == "cancelled":
        reasons |= {"cancelled"}
    if group["state"] == "failed":
        reasons |= {"sibling_failed"}
    if group["state"] == "dropped":
        reasons |= {str(group["reason"])}
    return reasons


def left_keys(found: Mapping[str, float], may_stay_s: Mapping[str, float]) -> list[str]:
    """What should not be left of a deleted job. found: its keys, and for how long each still lives (-1: for ever). may_stay_s: for how
    long at most those of a kind, which is the last part of a key's name, may."""
    kinds = {key: key.rpartition(":")[2] for key in found}
    return [f"{key} ({ttl_s} s)" for key, ttl_s in sorted(found.items()) if not 0 <= ttl_s <= may_stay_s.get(kinds[key], -1)]


def task_of(text: str) -> str:
    """The task named in a prompt."""
    named = re.search(r"Please do (\S+)\.", text)
    assert named is not None, text[:200]
    return named[1]
