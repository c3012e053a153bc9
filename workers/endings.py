"""How an attempt ends."""

import logging

from sandboxes.base import SandboxError, SandboxFencedError, SandboxLostError, SandboxSpecError
from service.errors import LeaseLostError, UnavailableError
from service.leases import Ended, Lease
from service.progress import Progress
from workers import metrics
from workers.resources import Resources

logger = logging.getLogger(__name__)


class HandBackError(Exception):
    """The worker is leaving: the rollout goes back as it stands."""


class RestartError(Exception):
    """This attempt is over, and why. `retry`: a new one may do better. `counts`: it is one of the rollout's `max_attempts`."""

    def __init__(self, reason: str, *, retry: bool, counts: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry = retry
        self.counts = counts


DESTROYED = "sandbox_destroyed"
"""The reason that the store counts apart: the second time it is the model's answer (P6)."""


class FencedError(LeaseLostError):
    """Whoever holds the rollout's later lease has its sandbox: nothing may be done there any more."""


def because(error: SandboxError, *, what: str) -> RestartError:
    """The end that a failing sandbox brings: the task's fault, the model's doing, or ours.

    Raises:
        FencedError: the sandbox is another worker's now, and the rollout with it.
    """
    if isinstance(error, SandboxFencedError):
        raise FencedError(str(error)) from error
    if isinstance(error, SandboxSpecError):
        return RestartError(f"task: {what} cannot start: {error}", retry=False)
    if isinstance(error, SandboxLostError) and error.by_command:
        return RestartError(DESTROYED, retry=True)
    return RestartError(f"sandbox: {what}: {error}", retry=True)


def ended(progress: Progress) -> Ended:
    """The end of one that has its verdict."""
    assert progress.stop_reason is not None
    assert progress.scored is not None
    return Ended(
        outcome=progress.stop_reason.outcome,
        stop_reason=progress.stop_reason,
        reward=progress.scored.reward,
        reward_detail=progress.scored.detail,
        turns=progress.turns,
        tool_calls=progress.tool_calls,
        sampled_tokens=progress.sampled,
        discarded_tokens=progress.discarded,
        cut_back_tokens=progress.cut_back,
        oldest_version=progress.oldest_version,
        newest_version=progress.newest_version,
        oldest_lineage=progress.oldest_lineage,
        seconds=progress.seconds,
    )


def stale_environment(versions: int) -> RestartError:
    """The end of an attempt whose sandbox was written to by a policy of `versions` ago: nobody's failure, so it does not count."""
    told = f"stale_environment: the policy is {versions} versions past the one whose calls wrote to the sandbox"
    return RestartError(told, retry=True, counts=False)


async def end_attempt(lease: Lease, resources: Resources, end: RestartError) -> bool:
    """Tell the store that `lease`'s attempt is over; whoever ended it before us was right too. Whether it is known to be over."""
    metrics.restarts.labels(metrics.reason_class(end.reason)).inc()
    try:
        state = await resources.leases.restart(lease, end.reason[:2000], retry=end.retry, attempt_counts=end.counts)
        logger.warning("attempt %d of %s ended (%s): %s", lease.attempt, lease.rollout_id, state, end.reason)
        return True
    except LeaseLostError:
        logger.info("%s was ended by others", lease.rollout_id)
    except UnavailableError:
        logger.warning("%s left to its lease: the store is away", lease.rollout_id)
    return False
