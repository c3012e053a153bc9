"""Who may be dispatched and who may train: the rules of the gate, pure. The Lua steps apply the same rules atomically.

What must always hold: a group holds one place from its dispatch until it is turned away, or until it is acked *and* the policy version has
passed the version it was leased for, whichever of the two comes last. So bump-then-ack and ack-then-bump leave the same gate behind.
"""


def capacity(budget: int | None, groups_per_step: int, steps_per_version: int) -> int | None:
    """Groups that may be out at once; None: the gate is off. A budget of 0 is one version's batches: on-policy."""
    return None if budget is None else (budget + 1) * groups_per_step * steps_per_version


def staleness(policy_version: int, oldest: int) -> int:
    """Versions between the oldest sampled token and the trainer. Tokens labelled ahead of a bump that is still on its way count as 0."""
    return max(0, policy_version - oldest)


def usable(*, policy_version: int, oldest: int, lineage: int, oldest_lineage: int, budget: int | None, policy: str) -> bool:
    """Whether a group may be leased to the trainer. Tokens of a dead lineage never are; `pace` and a null budget never turn away by age."""
    if oldest_lineage < lineage:
        return False
    return budget is None or policy == "pace" or staleness(policy_version, oldest) <= budget


def charge_until(policy_version: int, trains_version: int | None = None) -> int:
    """The version that must have passed before an acked group's place is free."""
    return policy_version if trains_version is None else trains_version


def place_is_free(*, acked: bool, policy_version: int, until: int) -> bool:
    """Whether a delivered group has given its place back."""
    return acked and policy_version > until
