"""Who owns a sandbox. Its name says it, alone: `rw-{deployment}-{rollout}-a{attempt}`, with `-v` behind it the verifier's own, or
`rw-{deployment}-pool-{worker}-{pool}-{n}` while it waits for a rollout. What lives, the store says.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from service.jobs import Jobs
from service.leases import Leases
from service.store import Store


def sandbox_name(deployment_id: str, rollout_id: str, attempt: int) -> str:
    """The name of an attempt's sandbox; its verifier's has `-v` behind it."""
    return f"rw-{deployment_id}-{rollout_id}-a{attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose a sandbox is, and whether that one lives. `name`: a rollout's id or a worker's name; empty where the name says nothing."""

    kind: Literal["rollout", "pool", "unknown"]
    name: str
    live: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Everything alive in a deployment that may own sandboxes.

    attempts: live rollouts, with the attempt that is theirs now. prefixes: how the names of live workers' warm sandboxes begin.
    """

    deployment_id: str
    attempts: Mapping[str, int]
    prefixes: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        """The sandboxes that live rollouts have or may have."""
        names = {sandbox_name(self.deployment_id, rollout_id, attempt) for rollout_id, attempt in self.attempts.items()}
        return frozenset(names | {f"{name}-v" for name in names})

    def of(self, name: str) -> Owner:
        """The owner of the sandbox of this name."""
        rest = name.removeprefix(f"rw-{self.deployment_id}-")
        if pooled := re.fullmatch(r"pool-(.+)-\w+-\d+", rest):
            return Owner(kind="pool", name=pooled[1], live=name.startswith(self.prefixes))
        if rolled := re.fullmatch(r"(.+)-a\d+(?:-v)?", rest):
            return Owner(kind="rollout", name=rolled[1], live=name in self.names)
        return Owner(kind="unknown", name="", live=False)


async def live_owners(store: Store, jobs: Jobs, leases: Leases, *, deployment_id: str) -> Owners:
    """Whoever lives now. Raises UnavailableError: then nothing is known to be ownerless."""
    attempts: dict[str, int] = {}
    for job_id in await jobs.ids():
        attempts |= await leases.live_attempts(job_id)
    prefixes = {str(prefix) for info in await store.workers() for prefix in info.get("pools", ())}
    return Owners(deployment_id=deployment_id, attempts=attempts, prefixes=tuple(sorted(prefixes)))
