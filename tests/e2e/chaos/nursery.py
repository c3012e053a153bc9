"""Where processes that are killed all the time come from: one that has imported everything forks them. That saves each start seconds of
CPU, and so lets a small machine spend its time on rollouts. What is forked is a process of its own like any other.

`python -m tests.e2e.chaos.nursery TOKENIZER` reads a JSON line per birth from stdin (`words` of the `rollway` command, `env`, `log`),
answers each with `{"pid"}`, and tells every death with `{"pid", "status"}`. At the end of its stdin it kills all that still live.
"""

import asyncio
import gc
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

LOOK_S = 0.02


class Child:
    """A forked process; like `asyncio.subprocess.Process` as far as it goes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = asyncio.Event()

    async def wait(self) -> int:
        await self.ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Nursery:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._births: list[asyncio.Future[Child]] = []
        self._children: dict[int, Child] = {}

    async def start(self, words: Sequence[str], *, env: Mapping[str, str], log: Path) -> Child:
        assert self._process.stdin is not None
        birth: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._births.append(birth)
        self._process.stdin.write(json.dumps({"words": list(words), "env": dict(env), "log": str(log)}).encode() + b"\n")
        await self._process.stdin.drain()
        return await birth

    async def listen(self) -> None:
        """Until it is gone: every answer to whom it is for."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            told = json.loads(line)
            if "status" not in told:
                child = self._children[told["pid"]] = Child(told["pid"])
                self._births.pop(0).set_result(child)
            else:
                child = self._children.pop(told["pid"])
                child.returncode = told["status"]
                child.ended.set()


@asynccontextmanager
async def nursery(tokenizer: Path, *, env: dict[str, str], log: Path) -> AsyncIterator[Nursery]:
    """Leaves no child behind."""
    argv = (sys.executable, "-m", "tests.e2e.chaos.nursery", str(tokenizer))
    pipe = asyncio.subprocess.PIPE
    threads = {"TOKENIZERS_PARALLELISM": "false"}  # no thread of the first process is in a forked one
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(*argv, env=os.environ | env | threads, stdin=pipe, stdout=pipe, stderr=out)
    made = Nursery(process)
    listening = asyncio.create_task(made.listen())
    try:
        yield made
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await listening
        await process.wait()


# ------------------------------------------------------------------------------------------------------------- in the other process


def preload(tokenizer: str) -> None:
    import service.server  # noqa: F401
    import workers.__main__  # noqa: F401
    from service.standin.server import load_model

    load_model(Path(tokenizer), "qwen3")
    gc.freeze()  # what is shared stays shared


def live(words: Sequence[str], env: Mapping[str, str], log: str) -> int:
    """One process's whole life; its status."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(old, new)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["rollway", *words]
    try:
        if words == ["worker"]:
            from workers.__main__ import main as work

            work()
        else:
            from service.cli import main as rollway

            rollway()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # what Python does for a process of its own
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main() -> None:
    preload(sys.argv[1])
    answers, living = os.fdopen(os.dup(1), "w"), set[int]()

    def tell(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    def born(order: Mapping[str, Any]) -> None:
        if (pid := os.fork()) == 0:
            status = 1
            try:
                os.close(answers.fileno())
                status = live(**order)
            finally:
                os._exit(status)
        living.add(pid)
        tell(pid=pid)

    def bury() -> None:
        for pid in list(living):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                living.discard(pid)
                tell(pid=pid, status=os.waitstatus_to_exitcode(status))

    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], LOOK_S)
        if readable:
            if not (data := os.read(0, 65536)):
                break
            *orders, pending = (pending + data).split(b"\n")
            for order in orders:
                born(json.loads(order))
        bury()
    for pid in living:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while living:
        bury()


if __name__ == "__main__":
    main()
