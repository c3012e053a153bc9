"""Real input: HumanEval as tasks, the harness that scores them, and a policy for the stand-in generator."""

from service.humaneval.policy import humaneval_policy
from service.humaneval.tasks import humaneval_tasks, write_tasks

__all__ = ["humaneval_policy", "humaneval_tasks", "write_tasks"]
