"""Score a rollout: by a command in a sandbox, by a reward service, or not at all.

What always holds when a verifier's command runs:

* every process of the agent is dead, and the command runs outside every session of the agent;
* the command starts in the task's workdir, made anew where the agent removed it;
* the verifier's files are written just before it, over whatever lay there; in the agent's own sandbox (`same`) the directories that are
  the verifier's alone are emptied first;
* a `fresh` sandbox is the task's own (image, files, setup, environment) and gets of the agent's only the `artifacts`, see artifacts.py.

With `same` the model was root where its judge runs and can have changed any program there; `fresh` is the default for that reason.
The command is run by `sh -c` in the task's workdir with the sandbox's fixed PATH; its stdin is `{"answer": ...}`, the text of `submit` or
of the last reply. A verifier of a task we ship runs the submission in a child process and decides in the parent, by a sign that only the
finished check can give (a random token the parent hands to its own checking code), never by the child's exit status alone: a submission
may call `os._exit(0)`.
"""

import json
import posixpath
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import msgspec

from sandboxes.base import Sandbox, SandboxContentError, SandboxLostError
from service.errors import TaskFaultError
from service.records import CommandVerifier, TaskSpec, UrlVerifier
from workers.artifacts import Artifacts, ArtifactsError, collect
from workers.commands import COPY_S, run_program, within
from workers.reward_service import ask_service
from workers.rewards import MAX_OUTPUT_BYTES, Verdict, judge

__all__ = ["OpenFresh", "Verdict", "verify"]

OpenFresh = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Opens a new sandbox from the task's spec; leaving it destroys it."""

_IN_WORKDIR = '[ -d "$1" ] || { rm -f "$1"; mkdir -p "$1"; }; cd "$1" && exec sh -c "$2"'
"""Elsewhere the command might find nothing to complain about."""

_REMOVE = 'for path; do [ -L "$path" ] || chmod -R u+rwX "$path"; done; rm -rf -- "$@"'
"""A root without capabilities obeys the modes that the agent gave."""

CLEAR_S = 60.0
"""Removing what lies where copies are about to land."""

_PROGRAMS = frozenset("/bin /boot /dev /etc /lib /lib64 /proc /run /sbin /sys /usr /var".split())
"""What lies here keeps a sandbox going: nothing at or below them is removed before a copy lands."""

_PLACES = frozenset("/ /home /media /mnt /opt /root /srv /tmp".split())
"""Nobody's alone; what lies below them may be."""


async def verify(
    task: TaskSpec,
    *,
    sandbox: Sandbox | None,
    open_fresh: OpenFresh,
    trajectory_messages: Sequence[Mapping[str, Any]],
    http: aiohttp.ClientSession,
    stop_reason: str | None = None,
) -> Verdict:
    """Score what the rollout left behind. `sandbox`: the agent's, None when it never needed one.

    Raises:
        TaskFaultError: the verifier itself is broken.
        SandboxError, VerifierUnavailableError: infrastructure; no verdict.
    """
    match task.verifier:
        case None:
            return Verdict(None)
        case UrlVerifier() as service:
            return await ask_service(service, task, trajectory_messages, stop_reason=stop_reason, http=http)
        case CommandVerifier() as command:
            return await _verify_by_command(task, command, sandbox, open_fresh, stdin=answer_json(trajectory_messages))


async def _verify_by_command(
    task: TaskSpec, verifier: CommandVerifier, sandbox: Sandbox | None, open_fresh: OpenFresh, *, stdin: bytes
) -> Verdict:
    if sandbox is not None:
        await within(COPY_S, sandbox.kill_all(), what="ending the agent's processes")
    try:
        if sandbox is not None and verifier.sandbox == "same":
            return await _verify_in_place(task, verifier, sandbox, stdin=stdin)
        artifacts = await _collect(verifier, sandbox)
        async with open_fresh() as fresh:
            return await _verify_in_fresh(task, verifier, fresh, artifacts, stdin=stdin)
    except ArtifactsError as error:
        return Verdict(0.0, {"reason": error.reason, "message": str(error)[:500]})


async def _verify_in_place(task: TaskSpec, verifier: CommandVerifier, sandbox: Sandbox, *, stdin: bytes) -> Verdict:
    await _clear(sandbox, own_directories(task, verifier))
    return await _score(task, verifier, sandbox, stdin=stdin, touched=True)


async def _verify_in_fresh(
    task: TaskSpec, verifier: CommandVerifier, fresh: Sandbox, artifacts: Artifacts | None, *, stdin: bytes
) -> Verdict:
    if artifacts is None:
        return await _score(task, verifier, fresh, stdin=stdin, touched=False)
    await _clear(fresh, [path for path in verifier.artifacts if not _keeps_going(path)])
    try:
        await within(COPY_S, fresh.put_tar(artifacts.archive), what="copying the artifacts")
    except SandboxContentError as error:
        raise ArtifactsError("artifacts_too_large", str(error)) from error
    verdict = await _score(task, verifier, fresh, stdin=stdin, touched=True)
    return Verdict(verdict.reward, verdict.detail | ({"artifacts_dropped": artifacts.dropped} if artifacts.dropped else {}))


async def _collect(verifier: CommandVerifier, sandbox: Sandbox | None) -> Artifacts | None:
    if sandbox is None or not verifier.artifacts:
        return None
    return await collect(sandbox, verifier.artifacts, max_bytes=verifier.max_artifact_bytes)


async def _clear(sandbox: Sandbox, paths: Sequence[str]) -> None:
    """Remove these paths, so that what follows is all there is. What cannot be removed (a mount point) is in the way or is not."""
    if paths:
        argv = ["sh", "-c", _REMOVE, "sh", *paths]
        await run_program(sandbox, argv, workdir="/", timeout_s=CLEAR_S, max_output_bytes=1024)


async def _score(task: TaskSpec, verifier: CommandVerifier, sandbox: Sandbox, *, stdin: bytes, touched: bool) -> Verdict:
    """Write the verifier's files and run its command. `touched`: something of the agent's lies here and may be in the way."""
    try:
        if verifier.files:
            files = {path: text.encode() for path, text in verifier.files.items()}
            await within(COPY_S, sandbox.put(files), what="writing the verifier's files")
    except SandboxContentError as error:
        if touched:
            return Verdict(0.0, {"reason": "verifier_files_refused", "message": str(error)[:500]})
        raise TaskFaultError(f"the verifier's files cannot be written into a fresh sandbox: {error}") from error
    result = await run_program(
        sandbox,
        ["sh", "-c", _IN_WORKDIR, "sh", task.sandbox.workdir, verifier.command],
        workdir="/",
        stdin=stdin,
        env={"PYTHONNOUSERSITE": "1"},  # packages in the agent's home are no part of the verifier
        timeout_s=verifier.timeout_s,
        max_output_bytes=MAX_OUTPUT_BYTES,
    )
    if result.exit_code != 0 and not await sandbox.poll():
        await run_program(sandbox, ["true"], workdir="/", timeout_s=CLEAR_S, max_output_bytes=0)  # raises, and says by whose doing
        raise SandboxLostError(f"sandbox {sandbox.id} died while the verifier ran in it")
    return judge(verifier.reward, result)


def own_directories(task: TaskSpec, verifier: CommandVerifier) -> list[str]:
    """Directories of the verifier's files that nothing else of the task lies in, around or below: whatever is there was planted.

    An image that brings its own files for such a directory needs `fresh`, or another place for them.
    """
    others = [task.sandbox.workdir, *task.sandbox.files, *verifier.artifacts]
    found = {posixpath.dirname(path) for path in verifier.files}
    return sorted(path for path in found if not _is_systems(path) and not _is_used(path, others, task.sandbox.setup))


def _is_systems(path: str) -> bool:
    return path in _PLACES or posixpath.dirname(path) == "/home" or _keeps_going(path)


def _keeps_going(path: str) -> bool:
    return "/" + path.split("/")[1] in _PROGRAMS


def _is_used(path: str, others: Sequence[str], setup: Sequence[str]) -> bool:
    related = any(f"{path}/".startswith(f"{other}/") or other.startswith(f"{path}/") for other in others)
    return related or any(path in line for line in setup)


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct):
    function: _Function


class _Submitted(msgspec.Struct):
    answer: str


def answer_json(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """The verifier's stdin: `{"answer": ...}`, what the last reply gave to `submit`, else its text; null without a reply."""
    last: Mapping[str, Any] = next((message for message in reversed(messages) if message.get("role") == "assistant"), {})
    submitted = (_submitted(call) for call in last.get("tool_calls") or ())
    answer = next((answer for answer in submitted if answer is not None), last.get("content"))
    return json.dumps({"answer": answer}).encode()


def _submitted(call: object) -> str | None:
    """The answer of a `submit` call in the OpenAI form; None for other calls, and for messages of the task in another form."""
    try:
        function = msgspec.convert(call, _ToolCall).function
        return msgspec.json.decode(function.arguments, type=_Submitted).answer if function.name == "submit" else None
    except msgspec.MsgspecError:
        return None
