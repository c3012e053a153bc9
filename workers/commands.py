"""Commands in a sandbox, with what every caller here wants: an outer bound of our own and a directory that may be gone."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sandboxes.base import ExecResult, Sandbox, SandboxError
from workers import metrics

SLACK_S = 4.0
"""Past its own limit by this much (or half of it, if longer), a call that the backend never answered is given up."""

COPY_S = 300.0
"""One copy of files into or out of a sandbox."""

SHELL = "main"
"""The bash session that all bash calls of a rollout share."""

_IN_WORKDIR = 'mkdir -p "$1" 2>/dev/null; cd "$1" 2>/dev/null || cd /; shift; exec "$@"'
"""Runs a program as it is, also where the model removed the directory or put a file in its place. A program that is not there is exit
code 127 in the sandbox."""

T = TypeVar("T")


async def within(limit_s: float, work: Awaitable[T], *, what: str) -> T:
    """The bound on our side, for a backend that breaks its promise to end on time.

    Raises:
        SandboxError: it did.
    """
    try:
        async with asyncio.timeout(limit_s + max(SLACK_S, limit_s / 2)) as deadline:
            return await work
    except TimeoutError:
        if not deadline.expired():
            raise
        raise SandboxError(f"the sandbox backend did not answer: {what} was given {limit_s:g} s") from None


async def run_program(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    workdir: str,
    timeout_s: float,
    max_output_bytes: int,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    call_id: str | None = None,
) -> ExecResult:
    """Run `argv` on its own, outside any session, in `workdir`, which is made again where it is gone."""
    wrapped = ["sh", "-c", _IN_WORKDIR, "sh", workdir, *argv]
    work = sandbox.exec(wrapped, workdir="/", stdin=stdin, env=env, timeout_s=timeout_s, max_output_bytes=max_output_bytes, call_id=call_id)
    return await within(timeout_s, work, what=f"{argv[0]!r}")


@dataclass(slots=True)
class Steps:
    """The commands of one tool call, `timeout_s` each. `seconds`: what those that ended took, as the sandbox measured it.

    `call_id` names the call in its sandbox, and each step under it: asked again, by whichever worker, a step is not run again. None: the
    steps have no ids.
    """

    sandbox: Sandbox
    call_id: str | None
    timeout_s: float
    seconds: float = 0.0

    async def shell(self, script: str, *, max_output_bytes: int) -> ExecResult:
        """Run `script` in the rollout's lasting bash."""
        argv = ["bash", "-c", script]
        work = self.sandbox.exec(
            argv, session=SHELL, timeout_s=self.timeout_s, max_output_bytes=max_output_bytes, call_id=self._step("shell")
        )
        return self._ended(await within(self.timeout_s, work, what="a shell command"))

    async def program(
        self, step: str, argv: Sequence[str], *, max_output_bytes: int, workdir: str = "/", stdin: bytes | None = None
    ) -> ExecResult:
        """Run `argv` on its own as the step of this name."""
        result = await run_program(
            self.sandbox,
            argv,
            workdir=workdir,
            stdin=stdin,
            timeout_s=self.timeout_s,
            max_output_bytes=max_output_bytes,
            call_id=self._step(step),
        )
        return self._ended(result)

    def _step(self, name: str) -> str | None:
        return None if self.call_id is None else f"{self.call_id}/{name}"

    def _ended(self, result: ExecResult) -> ExecResult:
        self.seconds += result.seconds
        if result.disk_full:
            metrics.kills.labels("disk").inc()
        if result.oom_killed:
            metrics.kills.labels("memory").inc()
        return result
