"""Real input: HumanEval as tasks, the harness that scores them, and a policy for the stand-in generator."""

from service.humaneval.policy import humaneval_policy
from service.humaneval.tasks import Problem, humaneval_tasks, problems, write_tasks

__all__ = ["Problem", "humaneval_policy", "humaneval_tasks", "problems", "write_tasks"]
