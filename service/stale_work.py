"""Work that can no longer be in time is stopped early: before it costs more, and before the trainer asks for it.

What must always hold: a group that could still be delivered goes on untouched, and no version waits for this: the step that publishes it is
done by then, and what is left over is found with the next renewal of a lease.
"""

from service.keys import JobKeys
from service.store import Store

ROUNDS = 20
"""Of about a thousand rollouts each; together well below a second."""


async def stop_stale(store: Store, job_id: str) -> None:
    """Requeue or drop, as the job's `stale_policy` says, running and ready groups with a token that may not train any more.

    Under `pace` and without a budget that is only what a rollback left. Repeating the call is safe. Raises UnavailableError.
    """
    job = JobKeys(job_id)
    groups: list[str] = []
    journals: list[str] = []
    for _ in range(ROUNDS + 1):
        reply = await store.script("stop_stale")(job, groups, journals=journals)
        groups = reply.get("groups", [])
        if not groups:
            return
        journals = [key for group in groups for key in job.journals(group, reply["members"])]
