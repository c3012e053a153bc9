"""What a demo's job looks like, for each kind of generator."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from service.demo.options import GROUPS, SGLANG_GROUPS, DemoOptions
from service.humaneval import Problem, humaneval_policy, humaneval_tasks, problems

BUDGET = 1

REGEX_SPECIAL = frozenset(r"\.^$*+?()[]{}|/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`policy` is the stand-in generator's; None with a real engine."""

    job: dict[str, Any]
    tasks: list[dict[str, Any]]
    policy: dict[str, Any] | None

    @property
    def groups_per_step(self) -> int:
        groups: int = self.job["groups_per_step"]
        return groups

    def on(self, generator_url: str) -> "Workload":
        """The same work on this generator."""
        return replace(self, job=self.job | {"generators": [{"url": generator_url, "max_concurrency": 32}]})


def workload(options: DemoOptions, tokenizer: Path) -> Workload:
    """HumanEval in groups: with the stand-in a whole small training run, with a 135M model on a CPU a few short rollouts."""
    return _sglang(options, tokenizer) if options.generator == "sglang" else _standin(options, tokenizer)


def _standin(options: DemoOptions, tokenizer: Path) -> Workload:
    groups = options.groups or GROUPS
    limits = {"turns": 10, "tokens": 8192, "turn_tokens": 1024, "wall_s": 300.0, "tool_s": 15.0}
    job = {
        "name": "demo",
        "model": {"tokenizer": str(tokenizer), "renderer": "qwen3", "context_tokens": 16_384},
        "group_size": options.group_size or 4,
        "groups_per_step": min(4, groups),
        "staleness_budget": BUDGET,
        "sandbox": {"backend": options.backend},
    }
    return Workload(job=job, tasks=_tasks(groups, limits), policy=humaneval_policy(groups, seed=options.seed))


def _sglang(options: DemoOptions, tokenizer: Path) -> Workload:
    groups = options.groups or SGLANG_GROUPS
    limits = {"turns": 4, "tokens": 1024, "turn_tokens": 256, "wall_s": 600.0, "tool_s": 15.0, "tool_output_bytes": 512}
    job = {
        "name": "demo",
        "model": {"tokenizer": str(tokenizer), "renderer": "chatml", "context_tokens": 2048},
        "group_size": options.group_size or 2,
        "groups_per_step": min(2, groups),
        "staleness_budget": BUDGET,
        "sandbox": {"backend": options.backend},
        "sampling": {"temperature": 1.0},
    }
    guides = [{"sampling": {"regex": guide(problem)}} for problem in problems(groups)]
    tasks = [task | guides[n % len(guides)] for n, task in enumerate(_tasks(groups, limits))]
    return Workload(job=job, tasks=tasks, policy=None)


def guide(problem: Problem) -> str:
    """What a 135M model may say in a turn: one well-formed call, the task's solution or a wrong one among others.

    It samples each token itself; the grammar only keeps the call one that can be run.
    """
    right = f"cat >> solution.py <<'X'\n{problem.canonical_solution.rstrip()}\nX"
    wrong = "echo '    return None' >> solution.py"
    commands = "|".join(literal(json.dumps(command)[1:-1]) for command in ("cat solution.py", "python3 solution.py", right, wrong))
    bash = literal('bash", "arguments": {"command": "') + f"({commands})" + literal('"')
    submit = literal('submit", "arguments": {')
    return literal('<tool_call>\n{"name": "') + f"({bash}|{submit})" + literal("}}\n</tool_call>")


def literal(text: str) -> str:
    """`text` as a regular expression of the engine's grammar compiler, which knows no escaped spaces or quotes."""
    return "".join(f"\\{char}" if char in REGEX_SPECIAL else char for char in text)


def _tasks(groups: int, limits: dict[str, Any]) -> list[dict[str, Any]]:
    """The first tasks of the data set, under the demo's own limits; more groups than tasks begin again from the first."""
    tasks = humaneval_tasks(groups)
    return [tasks[n % len(tasks)] | {"limits": limits} for n in range(groups)]
