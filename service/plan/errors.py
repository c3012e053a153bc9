"""What a plan refuses."""

from service.errors import RollwayError


class PlanError(RollwayError):
    """An option that cannot be planned with: names it, and the cure."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"--{option}: {problem}")
        self.option = option
