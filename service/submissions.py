"""What clients submit, checked as far as it can be known at submit time: every problem of every task, named by its field. Pure.

A task is laid over its job's defaults and validated as a whole, so that what is stored is complete and runs as it is.
"""

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from service.chat import ChatModel
from service.errors import FieldProblem, InvalidError, TaskFaultError
from service.problems import MAX_FIELDS, field_problems
from service.records import CommandVerifier, JobSpec, Limits, Sampling, SandboxFields, TaskSpec, UrlVerifier, merge_defaults
from service.settings import Settings
from service.wire import Wire

DEFAULTS: dict[str, type[Wire]] = {"sandbox": SandboxFields, "limits": Limits, "sampling": Sampling}
"""The parts of a job that are laid under its tasks."""

MAX_TASKS = 10_000
"""Tasks in one request; all of them are accepted in one step of the store."""


def check_defaults(spec: JobSpec, operator: Settings) -> None:
    """A job's defaults must be what a task could say.

    Raises:
        InvalidError: naming `sandbox.x`, `limits.x` or `sampling.x`.
    """
    problems = default_problems({part: getattr(spec, part) for part in DEFAULTS})
    if not problems:
        problems += sandbox_problems(SandboxFields.model_validate(spec.sandbox), "sandbox", operator)
    if problems:
        raise InvalidError("some of the job's defaults for tasks are wrong", fields=problems)


def default_problems(job: Mapping[str, object]) -> list[FieldProblem]:
    """What is wrong inside the defaults of a job as the client sent it."""
    problems: list[FieldProblem] = []
    for part, model in DEFAULTS.items():
        given = job.get(part, {})
        try:
            if isinstance(given, dict):  # anything else is wrong as a field of the job
                model.model_validate(given)
        except ValidationError as error:
            problems += field_problems(error, given, prefix=f"{part}.")
    return problems


def complete_tasks(job: JobSpec, tasks: Sequence[object]) -> list[TaskSpec]:
    """Every task with its job's defaults laid under.

    Raises:
        InvalidError: with the problems of all tasks, the first `MAX_FIELDS` of them.
    """
    complete: list[TaskSpec] = []
    problems: list[FieldProblem] = []
    for number, task in enumerate(tasks):
        if not isinstance(task, dict):
            problems.append(FieldProblem(field=f"tasks.{number}", problem="must be an object"))
            continue
        merged = merge_defaults(job, task)
        try:
            complete.append(TaskSpec.model_validate(merged))
        except ValidationError as error:
            problems += field_problems(error, merged, prefix=f"tasks.{number}.")
        if len(problems) >= MAX_FIELDS:
            break
    if problems:
        raise InvalidError("some tasks are wrong, so none was accepted", fields=problems[:MAX_FIELDS])
    return complete


def check_tasks(job: JobSpec, tasks: Sequence[TaskSpec], chat: ChatModel, operator: Settings) -> None:
    """What the fields alone do not show: the operator has and allows such a sandbox, the prompt fits, the verifier's files are out of the
    agent's reach.

    Blocking: it renders every prompt.

    Raises:
        InvalidError: with the problems of all tasks, the first `MAX_FIELDS` of them.
    """
    problems: list[FieldProblem] = []
    for number, task in enumerate(tasks):
        where = f"tasks.{number}"
        problems += sandbox_problems(task.sandbox, f"{where}.sandbox", operator)
        problems += _verifier_problems(task, where)
        problems += _prompt_problems(task, where, chat, job.model.context_tokens)
        if len(problems) >= MAX_FIELDS:
            break
    if problems:
        raise InvalidError("some tasks cannot run, so none was accepted", fields=problems[:MAX_FIELDS])


def sandbox_problems(sandbox: SandboxFields, where: str, operator: Settings) -> list[FieldProblem]:
    """Whether this deployment has the sandbox's backend at all, and lets it have its network."""
    problems = []
    if sandbox.backend == "process" and not operator.process_backend:
        cure = "is a development backend with weaker isolation; use docker, or the operator allows it with ROLLWAY_PROCESS_BACKEND=true"
        problems.append(FieldProblem(field=f"{where}.backend", problem=cure))
    if sandbox.backend == "modal":
        problems.append(FieldProblem(field=f"{where}.backend", problem="modal is not available in this deployment; use docker"))
    if sandbox.network == "open" and not operator.allow_network:
        cure = "'open' is not allowed in this deployment; use 'none', or the operator allows it with ROLLWAY_ALLOW_NETWORK=true"
        problems.append(FieldProblem(field=f"{where}.network", problem=cure))
    return problems


def _verifier_problems(task: TaskSpec, where: str) -> list[FieldProblem]:
    if not isinstance(task.verifier, CommandVerifier) or task.verifier.sandbox != "fresh":
        return []
    return [
        FieldProblem(
            field=f"{where}.verifier.files",
            problem=f"{path} lies inside the artifact {artifact}, where the agent can write beside it; put it elsewhere, such as /verify",
        )
        for path in task.verifier.files
        for artifact in task.verifier.artifacts
        if path == artifact or path.startswith(f"{artifact.rstrip('/')}/")
    ]


def _prompt_problems(task: TaskSpec, where: str, chat: ChatModel, context_tokens: int) -> list[FieldProblem]:
    messages = [message.model_dump(exclude_none=True) for message in task.messages]
    try:
        count = len(chat.prompt(messages, []))
    except TaskFaultError as error:
        return [FieldProblem(field=f"{where}.messages", problem=f"the chat template refuses them: {error}")]
    if count + 1 <= context_tokens:
        return []
    problem = f"the prompt has {count} tokens and the model's context {context_tokens}, so nothing could be sampled; shorten it"
    return [FieldProblem(field=f"{where}.messages", problem=problem)]


def sandboxes_of(tasks: Sequence[TaskSpec]) -> dict[str, SandboxFields]:
    """The sandboxes with distinct images, each under the field that names it first; tasks that need no sandbox are left out."""
    found: dict[tuple[str, str], tuple[str, SandboxFields]] = {}
    for number, task in enumerate(tasks):
        if task.tools or isinstance(task.verifier, CommandVerifier):
            found.setdefault((task.sandbox.backend, task.sandbox.image), (f"tasks.{number}.sandbox", task.sandbox))
    return dict(found.values())


def reward_urls(tasks: Sequence[TaskSpec]) -> dict[str, str]:
    """The distinct URLs of reward services, each with the field that names it first."""
    urls: dict[str, str] = {}
    for number, task in enumerate(tasks):
        if isinstance(task.verifier, UrlVerifier):
            urls.setdefault(task.verifier.url, f"tasks.{number}.verifier.url")
    return urls
