"""Processes that die at crash points of theirs: one that has loaded everything becomes all of them, at the price of one start.

`python -m tests.e2e.doomed <tokenizer> <point>...`: workers, or gateways where a port stands before the point (`8000 before submit`). A
JSON line of all process ids comes first, and one of all statuses when they have ended.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from service.crash_points import VARIABLE

WORKERS = (
    "take", "renew", "purge", "opened", "prompted", "generated", "replied", "sandbox_intended", "sandbox_opened", "observed", "extended",
    "snapshotted", "restored", "stopped", "verifying", "scored", "finish", "restart", "handed_back", "release",
)  # fmt: skip
LOSERS = ("sandbox_lost",)
GATEWAYS = (
    "publish", "submit", "patch_job", "lease_batch", "hold_batch", "spoil", "ack_batch", "policy", "stop_stale", "cancel", "delete_job",
)  # fmt: skip
"""Steps of workers, of those whose sandbox the model destroys, and of gateways: together all that there are."""


def points(steps: Sequence[str]) -> list[str]:
    return [f"{moment} {step}" for step in steps for moment in ("before", "after")]


@dataclass(frozen=True, slots=True)
class Doomed:
    """pids: by what they were made of, as given."""

    pids: dict[str, int]
    parent: asyncio.subprocess.Process

    async def end(self) -> dict[str, int]:
        """Wait for all; how each ended (as subprocesses tell it: a signal's number is negative)."""
        assert self.parent.stdout is not None
        statuses: dict[str, int] = json.loads(await self.parent.stdout.readline())
        return statuses


@asynccontextmanager
async def doomed(env: dict[str, str], log: Path, tokenizer: Path, lives: Sequence[str]) -> AsyncIterator[Doomed]:
    """Whoever still lives in the end is killed."""
    argv = (sys.executable, "-m", "tests.e2e.doomed", str(tokenizer), *lives)
    with log.open("ab") as out:
        parent = await asyncio.create_subprocess_exec(
            *argv, env=os.environ | env, stdout=asyncio.subprocess.PIPE, stderr=out, start_new_session=True
        )
    try:
        assert parent.stdout is not None
        yield Doomed(json.loads(await parent.stdout.readline()), parent)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        await parent.wait()


def live(life: str) -> None:
    """One process's whole life."""
    os.dup2(2, 1)  # stdout is the parent's
    port, _, point = life.partition(" ") if life[0].isdigit() else ("", "", life)
    os.environ[VARIABLE] = point
    if not port:
        from workers.__main__ import main as work

        work()
        return
    from service.cli import serve

    serve(port=int(port))


def main() -> None:
    import service.server  # noqa: F401  # loaded before, not once by each
    import workers.__main__  # noqa: F401
    from service.chat import load_chat_model
    from service.settings import Settings

    tokenizer, *lives = sys.argv[1:]
    load_chat_model(tokenizer, "qwen3", settings=Settings())
    pids = {}
    for life in lives:
        if (pid := os.fork()) == 0:
            try:
                live(life)
            finally:
                os._exit(0)
        pids[life] = pid
    sys.stdout.write(json.dumps(pids) + "\n")
    sys.stdout.flush()
    sys.stdout.write(json.dumps({life: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for life, pid in pids.items()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
