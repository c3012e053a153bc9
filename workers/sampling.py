"""One generation of a rollout, in the worker's terms: its tokens, or why the attempt is over."""

from array import array

from service.errors import GeneratorError, MisalignedTokensError
from service.leases import Lease
from service.records import TaskSpec
from service.trajectories import Generation
from workers.endings import RestartError
from workers.resources import JobContext


async def sampled(
    context: JobContext, lease: Lease, task: TaskSpec, ids: "array[int]", max_new_tokens: int, *, timeout_s: float
) -> Generation:
    """Sample up to `max_new_tokens` from `ids`; fewer where somebody cut it. Raises RestartError."""
    try:
        return await context.pool.generate(
            rollout_id=lease.rollout_id,
            ids=ids,
            max_new_tokens=max_new_tokens,
            sampling=task.sampling,
            version=context.record.policy_version,
            lineage=context.record.lineage,
            timeout_s=timeout_s,
        )
    except GeneratorError as error:
        raise RestartError(f"generator: {error}", retry=error.retryable) from error
    except MisalignedTokensError as error:
        raise RestartError(f"misaligned tokens: {error}", retry=True) from error
