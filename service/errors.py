"""Every exception the gateway and the workers raise on purpose.

* RollwayError
  + RequestError              the caller's fault or the state's; becomes problem+json with `status`
    - InvalidError     422    a field is wrong: `fields` names each and its cure
    - UnauthorizedError 401
    - NotFoundError    404    also: it is another tenant's
    - NotAcceptableError 406
    - ConflictError    409
    - GoneError        410
    - TooLargeError    413
    - UnsupportedMediaError 415
    - BusyError        429    a bound was reached; try again after `retry_after_s`
    - UnavailableError 503    the store or what we need is away; try again after `retry_after_s`
  + GeneratorError            SGLang refused, timed out or answered out of contract
  + LeaseLostError            another worker may own the rollout now: stop, write nothing, destroy nothing
  + RolloutCancelledError     the client cancelled the rollout: stop and clean up
  + VerifierUnavailableError  a reward service is away or answers nonsense: infrastructure
  + TaskFaultError            the task itself is broken (its setup or verifier): the group fails with this reason
  + MisalignedTokensError     a bug of ours or a lying engine; never exported
  + UnexportableError         a group whose journals must not be exported: it fails, the others of its batch are leased again
  + JournalError              a journal that this process cannot read: the attempt begins anew, nothing is guessed
  + StoreRefusedError         this Redis would lose data: refused at start, with the cure
  + PortRefusedError          nothing can listen there: refused at start, with the cure
"""

from collections.abc import Sequence
from dataclasses import dataclass


class RollwayError(Exception):
    """Base of all errors raised on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """One wrong field: `field` is a path such as `tasks.3.limits.turns`, `problem` says what is wrong and the cure."""

    field: str
    problem: str


class RequestError(RollwayError):
    """A request that cannot be answered as asked. `status` is the HTTP status it becomes."""

    status = 400
    title = "Bad request"

    def __init__(self, detail: str, *, fields: Sequence[FieldProblem] = (), retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields = tuple(fields)
        self.retry_after_s = retry_after_s


class InvalidError(RequestError):
    status = 422
    title = "Invalid input"


class UnauthorizedError(RequestError):
    status = 401
    title = "Unauthorized"


class NotFoundError(RequestError):
    status = 404
    title = "Not found"


class ConflictError(RequestError):
    status = 409
    title = "Conflict"


class GoneError(RequestError):
    status = 410
    title = "Gone"


class NotAcceptableError(RequestError):
    status = 406
    title = "Not acceptable"


class TooLargeError(RequestError):
    status = 413
    title = "Body too large"


class UnsupportedMediaError(RequestError):
    status = 415
    title = "Unsupported media type"


class BusyError(RequestError):
    status = 429
    title = "Too many requests"


class UnavailableError(RequestError):
    status = 503
    title = "Unavailable"


class GeneratorError(RollwayError):
    """A generation call failed.

    `retryable`: True for 429, 5xx, timeouts and closed connections; False if the same call would fail again anywhere.
    """

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class LeaseLostError(RollwayError):
    """The lease of a rollout is no longer ours."""


class RolloutCancelledError(RollwayError):
    """The rollout or its group was cancelled while we ran it."""


class VerifierUnavailableError(RollwayError):
    """The reward service could not be reached or did not answer as agreed; trying again may do better."""


class TaskFaultError(RollwayError):
    """The task cannot be run or scored as it is written."""


class MisalignedTokensError(RollwayError):
    """Ids, log-probabilities, versions and mask do not belong together."""


class UnexportableError(RollwayError):
    """A rollout of group `group_id` has a journal that must not be exported: the group fails with this reason."""

    def __init__(self, message: str, *, group_id: str) -> None:
        super().__init__(message)
        self.group_id = group_id


class JournalError(RollwayError):
    """A journal of a version that this process does not know, or one that no worker wrote like this."""


class StoreRefusedError(RollwayError):
    """The Redis behind `ROLLWAY_REDIS_URL` is set up to lose data."""


class PortRefusedError(RollwayError):
    """The address to listen on is taken, or is none of ours."""
