"""A tool call in, an observation out.

A command that fails, hangs, is killed for memory or prints nonsense is an observation; a sandbox that cannot do its work raises
SandboxError, which must never reach the model.
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from sandboxes.base import ExecResult, Sandbox, SandboxSpec
from service.journal import Call, Observed
from service.records import BuiltinTool, CustomTool, TaskSpec
from workers.commands import Steps
from workers.edit_file import Edit, EditRefusedError, edit_file
from workers.observations import call_error_text, command_text

MAX_COMMAND_BYTES = 120_000
"""One argument of a program ends at 128 KiB on Linux; larger content goes through edit_file."""

UNKNOWN = "unknown"
"""Stands for the name of a tool that does not exist: names the model invents reach no label and no list."""


def _function(name: str, description: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_BUILTINS: Mapping[str, dict[str, Any]] = {
    "bash": _function(
        "bash",
        "Run a bash command and see its output. Directory, variables and background jobs last between calls. stdin is empty.",
        {"command": {"type": "string", "description": "The command; may have several lines."}},
        ["command"],
    ),
    "edit_file": _function(
        "edit_file",
        "Write a file. With old_text, replace that passage, which must occur exactly once; without, the whole file becomes new_text.",
        {
            "path": {"type": "string", "description": "Path of the file; relative ones start in the working directory."},
            "new_text": {"type": "string", "description": "The new passage or the whole new content."},
            "old_text": {"type": "string", "description": "The exact passage to replace, whitespace included."},
        },
        ["path", "new_text"],
    ),
    "submit": _function(
        "submit",
        "End the task when the work is done. Nothing can be changed afterwards.",
        {"answer": {"type": "string", "description": "The answer, if the task asks for one."}},
        [],
    ),
}


_BASH_PER_CALL = _function(
    "bash",
    "Run a bash command and see its output. Each call is a new shell in the working directory: files and background processes last "
    "between calls, directory and variables do not. stdin is empty.",
    {"command": {"type": "string", "description": "The command; may have several lines."}},
    ["command"],
)


def tool_specs(task: TaskSpec) -> list[dict[str, Any]]:
    """The task's tools in the OpenAI form, in the task's order; the built-in ones by name."""
    return [_tool_spec(task, tool) for tool in task.tools]


def _tool_spec(task: TaskSpec, tool: BuiltinTool | CustomTool) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        return {"type": "function", "function": tool.function.model_dump()}
    return _BASH_PER_CALL if tool == "bash" and task.sandbox.shell == "per_call" else _BUILTINS[tool]


def tool_names(task: TaskSpec) -> list[str]:
    return [tool if isinstance(tool, str) else tool.function.name for tool in task.tools]


def sandbox_spec(task: TaskSpec, *, labels: Mapping[str, str], start_s: float) -> SandboxSpec:
    """What the task's sandbox is made from. `start_s`: budget in wall time to the first command."""
    fields = task.sandbox
    return SandboxSpec(
        image=fields.image,
        files={path: text.encode() for path, text in fields.files.items()},
        setup=tuple(fields.setup),
        workdir=fields.workdir,
        network=fields.network,
        user=fields.user,
        capabilities=fields.capabilities,
        cpus=fields.cpus,
        memory_mib=fields.memory_mib,
        pids=fields.pids,
        disk_mib=fields.disk_mib,
        env=dict(fields.env),
        read_only=fields.read_only,
        runtime=fields.runtime,
        labels=dict(labels),
        start_s=start_s,
    )


def error_observation(task: TaskSpec, call: Call) -> Observed:
    """The answer to a call that could not be understood (`call.error`); nothing was run."""
    names = tool_names(task)
    text = call_error_text(call.error or "not_a_call", name=call.name, tools=names)
    return Observed(at=time.time(), call_id=call.id, name=call.name if call.name in names else UNKNOWN, text=text, failed=True)


async def run_call(sandbox: Sandbox, task: TaskSpec, call: Call, *, call_id: str | None = None, timeout_s: float | None = None) -> Observed:
    """Run one understood call. `timeout_s`: what it may take, the task's `limits.tool_s` if not given.

    With `call_id`, its name in the sandbox, the call takes effect once: asked again after a crash, what ran is not run again, and
    `seconds` and text are the same.

    Raises:
        SandboxError: the sandbox could not do its work; there is no observation.
    """
    tool = dict(zip(tool_names(task), task.tools, strict=True)).get(call.name)
    if call.error is not None or tool is None:
        return error_observation(task, call if call.error else msgspec.structs.replace(call, error="unknown_tool"))
    steps = Steps(sandbox, call_id, timeout_s or task.limits.tool_s)
    try:
        answer = await _answer(steps, task, tool, call.arguments or "{}")
    except msgspec.MsgspecError as error:
        return error_observation(task, msgspec.structs.replace(call, error=f"missing_argument: {error}"))
    return Observed(
        at=time.time(),
        call_id=call.id,
        name=call.name,
        text=answer.text,
        seconds=steps.seconds,
        failed=answer.failed,
        submitted=tool == "submit",
    )


class _Answer(NamedTuple):
    text: str
    failed: bool


class _Bash(msgspec.Struct, frozen=True):
    command: str


async def _answer(steps: Steps, task: TaskSpec, tool: BuiltinTool | CustomTool, arguments: str) -> _Answer:
    match tool:
        case CustomTool():
            return await _custom(steps, task, tool, arguments)
        case "bash":
            return await _bash(steps, task, msgspec.json.decode(arguments, type=_Bash).command)
        case "edit_file":
            return await _edit(steps, task, msgspec.json.decode(arguments, type=Edit))
        case "submit":
            return _Answer("submitted", failed=False)


async def _bash(steps: Steps, task: TaskSpec, command: str) -> _Answer:
    if "\x00" in command:
        return _Answer("Error: not run, the command holds a NUL character.", failed=True)
    if len(command.encode()) > MAX_COMMAND_BYTES:
        return _Answer(f"Error: not run, the command is longer than {MAX_COMMAND_BYTES} bytes; write long text to a file.", failed=True)
    most = task.limits.tool_output_bytes
    if task.sandbox.shell == "per_call":
        result = await steps.program("shell", ["bash", "-c", command], workdir=task.sandbox.workdir, max_output_bytes=most)
        return _shown(result, task, timeout_s=steps.timeout_s)
    result = await steps.shell(command, max_output_bytes=most)
    return _shown(result, task, timeout_s=steps.timeout_s, after_timeout="the next command gets a new shell")


async def _custom(steps: Steps, task: TaskSpec, tool: CustomTool, arguments: str) -> _Answer:
    result = await steps.program(
        "run",
        tool.run.argv,
        workdir=task.sandbox.workdir,
        stdin=arguments.encode(),
        max_output_bytes=task.limits.tool_output_bytes,
    )
    return _shown(result, task, timeout_s=steps.timeout_s)


async def _edit(steps: Steps, task: TaskSpec, edit: Edit) -> _Answer:
    try:
        return _Answer(await edit_file(steps, edit, workdir=task.sandbox.workdir), failed=False)
    except EditRefusedError as error:
        return _Answer(f"Error: {error}.", failed=True)


def _shown(result: ExecResult, task: TaskSpec, *, timeout_s: float, after_timeout: str = "") -> _Answer:
    text = command_text(result, timeout_s=timeout_s, max_bytes=task.limits.tool_output_bytes, after_timeout=after_timeout)
    return _Answer(text, failed=result.exit_code != 0 or result.oom_killed or result.disk_full)
