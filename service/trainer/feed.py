"""A backlog that does not run dry."""

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from service.trainer.gateway import Gateway
from service.trainer.options import TrainerError

POLL_S = 0.5
MAX_TASKS = 500
"""In one call."""

Task = Mapping[str, Any]


def read_tasks(path: Path) -> list[Task]:
    """`{"tasks": [...]}` or the list alone.

    Raises:
        TrainerError: the file is neither.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TrainerError(f"--tasks {path}: {error}") from error
    tasks = found.get("tasks") if isinstance(found, dict) else found
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, dict) for task in tasks):
        raise TrainerError(f'--tasks {path}: no tasks; it must be {{"tasks": [...]}} as POST /v1/jobs/JOB/tasks takes it')
    return tasks


def endless() -> Iterator[Task]:
    """Prompts that all differ, with no tools and no verifier."""
    for number in itertools.count(1):
        yield {"task_id": f"simulated/{number}", "messages": [{"role": "user", "content": f"Task {number}."}]}


def tasks_of(path: Path | None, epochs: int | None) -> Iterator[Task]:
    """Those of the file, `epochs` times over (None: for ever); without a file those of `endless`."""
    if path is None:
        return endless()
    tasks = read_tasks(path)
    passes = itertools.repeat(tasks) if epochs is None else itertools.repeat(tasks, epochs)
    return itertools.chain.from_iterable(passes)


class Feed:
    """Keeps a job's backlog between half of `groups` and `groups`, as long as there are tasks."""

    def __init__(self, gateway: Gateway, job_id: str, tasks: Iterator[Task], *, groups: int) -> None:
        self._gateway = gateway
        self._job_id = job_id
        self._tasks = tasks
        self._groups = groups
        self.over = False
        """Every task was submitted."""

    async def run(self) -> None:
        while not self.over:
            backlog = (await self._gateway.job(self._job_id))["counts"]["backlog"]
            if backlog <= self._groups // 2:
                await self._submit(self._groups - backlog)
            await asyncio.sleep(POLL_S)

    async def _submit(self, groups: int) -> None:
        while groups > 0 and not self.over:
            tasks = list(itertools.islice(self._tasks, min(groups, MAX_TASKS)))
            if tasks:
                await self._gateway.submit(self._job_id, tasks)
            self.over = len(tasks) < min(groups, MAX_TASKS)
            groups -= len(tasks)


def backlog_for(job: Mapping[str, Any]) -> int:
    """Groups to keep queued: twice what the gate could let out at one bump, within what the job takes."""
    spec = job["spec"]
    out: int = job["counts"]["capacity"] or spec["queue_groups"]
    limit: int = spec["backlog_limit"]
    return max(1, min(2 * out, limit))
