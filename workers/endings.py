"""How an attempt ends other than by finishing."""

from sandboxes.base import SandboxError, SandboxLostError, SandboxSpecError


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


def because(error: SandboxError, *, what: str) -> RestartError:
    """The end that a failing sandbox brings: the task's fault, the model's doing, or ours."""
    if isinstance(error, SandboxSpecError):
        return RestartError(f"task: {what} cannot start: {error}", retry=False)
    if isinstance(error, SandboxLostError) and error.by_command:
        return RestartError(DESTROYED, retry=True)
    return RestartError(f"sandbox: {what}: {error}", retry=True)
