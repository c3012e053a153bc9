"""The gate as the pure rules of service/staleness.py say it, beside the real steps: who holds a place, and what is too old."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from service.batches import BatchRecord
from service.groups import GroupRecord
from service.leases import Lease
from service.records import GroupState
from service.staleness import capacity, charge_until, place_is_free, staleness, usable

OUT = frozenset({GroupState.RUNNING, GroupState.READY, GroupState.LEASED})
"""States in which a group holds a place."""
NEVER = -1
"""A place that waits for no version."""


@dataclass(frozen=True, order=True)
class Token:
    """A rollout's oldest sampled token, of this attempt."""

    attempt: int
    lineage: int
    version: int


@dataclass(kw_only=True)
class GateModel:
    """What a client and a trainer did to one job, as far as it matters for places and ages."""

    budget: int | None
    policy: str
    per_step: int = 2
    steps: int = 1
    version: int = 0
    lineage: int = 0
    most: int = 0
    """Places that may be taken: the capacity, or what a patch that lowered it found taken."""
    until: dict[str, int] = field(default_factory=dict)
    """The version that must have passed before the place of an acked group is free."""
    had: set[tuple[str, int]] = field(default_factory=set)
    """Groups, and which run of them, that a trainer has had."""
    oldest: dict[str, Token] = field(default_factory=dict)

    @property
    def capacity(self) -> int | None:
        return capacity(self.budget, self.per_step, self.steps)

    # ------------------------------------------------------------------------------------------------------------- places

    def acked(self, groups: Iterable[str], until: int) -> None:
        for group in groups:
            self.until.setdefault(group, NEVER if self.capacity is None else until)

    def free_all(self) -> None:
        """A rollback, or a gate that is turned off, clears the charges of acked groups."""
        self.until = dict.fromkeys(self.until, NEVER)

    def waiting(self) -> set[str]:
        """Acked groups that still hold a place."""
        return {g for g, until in self.until.items() if not place_is_free(acked=True, policy_version=self.version, until=until)}

    def holds(self, groups: Iterable[GroupRecord]) -> set[str]:
        """Every group that holds a place."""
        return {group.group_id for group in groups if group.state in OUT} | self.waiting()

    def within(self, charged: int) -> bool:
        """Whether so many places may be taken: never more than the capacity, nor than an earlier one let out."""
        if self.capacity is None:
            return True
        self.most = max(self.capacity, min(self.most, charged))
        return charged <= self.most

    # --------------------------------------------------------------------------------------------------------------- ages

    def sampled(self, lease: Lease, version: int, *, exactly: bool = False) -> None:
        """A member that ends says exactly which its oldest token is."""
        token, before = Token(lease.attempt, self.lineage, version), self.oldest.get(lease.rollout_id)
        earlier = before is not None and before.attempt == lease.attempt and not exactly
        self.oldest[lease.rollout_id] = min(token, before) if earlier and before is not None else token

    def may_train(self, token: Token) -> bool:
        return usable(
            policy_version=self.version,
            oldest=token.version,
            lineage=self.lineage,
            oldest_lineage=token.lineage,
            budget=self.budget,
            policy=self.policy,
        )

    def leased(self, batch: BatchRecord, runs: Sequence[int], trains: int | None) -> int:
        """Nothing in it is stale. runs: the groups' requeues. The version that must have passed before its places are free."""
        for group, run in zip(batch.groups, runs, strict=True):
            tokens = [self.oldest[member.rollout_id] for member in group.rollouts]
            assert all(self.may_train(token) for token in tokens)
            assert group.staleness == staleness(self.version, min(token.version for token in tokens))
            assert self.policy == "pace" or self.budget is None or group.staleness <= self.budget
            self.had.add((group.group_id, run))
        return charge_until(batch.policy_version, trains)

    def too_late(self, group: GroupRecord, state: GroupState) -> bool:
        """Whether a change that brought the group to `state` (unless it stopped it) had to stop it."""
        tokens = [
            token
            for member in group.members
            if (token := self.oldest.get(member.rollout_id)) is not None
            and token.attempt == member.attempt
            and member.state in ("pending", "leased", "ended")
        ]
        had = group.state is GroupState.READY and (group.group_id, group.requeues) in self.had
        trainers = state in (GroupState.ACKED, GroupState.LEASED)
        return group.state in OUT and not had and not trainers and not all(map(self.may_train, tokens))
