"""The demo's child processes: each is started once, logs to a file of its own, and is gone when its context is left."""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx

logger = logging.getLogger(__name__)

STOP_S = 30.0
"""How long a child may take to leave after SIGTERM; above the gateway's own grace time."""
LOG_TAIL_BYTES = 2000


class ChildError(Exception):
    """A child process of the demo did not start or ended early. The message shows the end of its log."""


def rollway_argv(*arguments: str) -> list[str]:
    """A `rollway` command in this environment."""
    return [str(Path(sys.executable).with_name("rollway")), *arguments]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Child:
    """A started process; `check` raises ChildError once it has ended."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    def check(self) -> None:
        if self._process.returncode is not None:
            raise ChildError(f"{self.name} ended with status {self._process.returncode}; {self.log} ends with:\n{self._tail()}")

    async def ready(self, url: str, *, timeout_s: float, key: str = "") -> None:
        """Wait until `url` answers 200.

        Raises:
            ChildError: the process ended, or `timeout_s` passed.
        """
        deadline = time.monotonic() + timeout_s
        async with httpx.AsyncClient(timeout=5.0, headers={"Authorization": f"Bearer {key}"} if key else {}) as client:
            while time.monotonic() < deadline:
                self.check()
                with suppress(httpx.TransportError):
                    if (await client.get(url)).status_code == 200:
                        return
                await asyncio.sleep(0.1)
        raise ChildError(f"{self.name} did not answer at {url} within {timeout_s:.0f} s; {self.log} ends with:\n{self._tail()}")

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to its whole process group."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            logger.warning("%s did not leave within %.0f s: killing it", self.name, STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def _tail(self) -> str:
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


@asynccontextmanager
async def running(name: str, argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> AsyncIterator[Child]:
    """Run `argv` in a process group of its own (a Ctrl-C at the terminal reaches only the demo, which then stops it)."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=dict(env), start_new_session=True
        )
    child = Child(name, process, log)
    try:
        yield child
    finally:
        await child.stop()


async def output_of(argv: Sequence[str], *, env: Mapping[str, str], log: Path, timeout_s: float = 120.0) -> str:
    """Run `argv` to its end and return its stdout.

    Raises:
        ChildError: it ended with another status than 0, or was killed after `timeout_s`.
    """
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, stderr=errors, env=dict(env))
    try:
        async with asyncio.timeout(timeout_s):
            stdout, _ = await process.communicate()
    except TimeoutError:
        raise ChildError(f"{argv[0]} {argv[-1]} did not end within {timeout_s:.0f} s; its log is {log}") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ChildError(f"{argv[0]} {argv[-1]} ended with status {process.returncode}; its log is {log}")
    return stdout.decode()
