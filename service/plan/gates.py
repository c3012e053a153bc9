"""What the same budget means elsewhere: the admission and age rules of other trainers, as they are in their code, for comparison.

Units differ, so each function names its own. Common to all but prime-rl: what is out is at most (budget + 1) batches.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from service.plan.errors import PlanError
from service.plan.forms import gate_capacity
from service.plan.setting import Gate, Setting


def areal_capacity(*, max_concurrent: int, batch: int, max_staleness: int, version: int, accepted: int = 0, running: int = 0) -> int:
    """Rollouts that AReaL may submit now; negative when too many run."""
    return min(max_concurrent - running, (max_staleness + version + 1) * batch - (accepted + running))


def verl_required(*, mini_batch: int, require_batches: int) -> int:
    """Prompts of one of verl's local steps."""
    return mini_batch * require_batches


def verl_capacity(*, mini_batch: int, require_batches: int, trigger_sync_step: int, threshold: float) -> int:
    """Prompts that verl generates between two weight updates at most; its queue holds as many."""
    return math.floor(verl_required(mini_batch=mini_batch, require_batches=require_batches) * (threshold + 1) * trigger_sync_step)


def nemo_usable(*, made_at: int, step: int, max_age: int) -> bool:
    """Whether NeMo RL trains, at `step`, on what version `made_at` made."""
    return step - made_at <= max_age


def prime_rl_oldest(*, step: int, max_off_policy: int) -> int:
    """The oldest version that prime-rl trains on at `step` (counted from 1)."""
    return step - 1 - max_off_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """One system's way to say a budget. out: what may be out at once, None: age alone bounds. unit: of `out`."""

    system: str
    parameter: str
    out: int | None
    unit: str
    late: str


def _rollway(budget: int, setting: Setting) -> Convention:
    out = gate_capacity(budget, setting.groups_per_step, setting.steps_per_version)
    policy = setting.rule.stale_policy if isinstance(setting.rule, Gate) else "requeue"
    return Convention(system="rollway", parameter=f"staleness_budget={budget}", out=out, unit="groups", late=policy)


def _areal(budget: int, setting: Setting) -> Convention:
    batch = setting.batch * setting.steps_per_version
    out = areal_capacity(max_concurrent=10**9, batch=batch, max_staleness=budget, version=0)
    return Convention(
        system="areal", parameter=f"max_head_offpolicyness={budget}, consumer_batch_size={batch}", out=out, unit="rollouts", late="trained"
    )


def _verl(budget: int, setting: Setting) -> Convention:
    out = verl_capacity(
        mini_batch=setting.groups_per_step, require_batches=1, trigger_sync_step=setting.steps_per_version, threshold=budget
    )
    parameter = f"staleness_threshold={budget}, trigger_parameter_sync_step={setting.steps_per_version}"
    return Convention(system="verl", parameter=parameter, out=out, unit="prompts", late="queue full: oldest dropped")


def _nemo(budget: int, setting: Setting) -> Convention:
    out = gate_capacity(budget, setting.groups_per_step)
    return Convention(system="nemo", parameter=f"max_trajectory_age_steps={budget}", out=out, unit="groups", late="dropped")


def _prime_rl(budget: int, setting: Setting) -> Convention:
    oldest = prime_rl_oldest(step=1, max_off_policy=budget)
    late = f"cancelled, in flight too; step s trains on version s{oldest - 1:+d} and newer"
    return Convention(system="prime-rl", parameter=f"max_off_policy_steps={budget}", out=None, unit="groups", late=late)


_CONVENTIONS: dict[str, Callable[[int, Setting], Convention]] = {
    "rollway": _rollway,
    "areal": _areal,
    "verl": _verl,
    "nemo": _nemo,
    "prime-rl": _prime_rl,
}
SYSTEMS = tuple(_CONVENTIONS)


def conventions(setting: Setting, systems: tuple[str, ...] = SYSTEMS) -> list[Convention]:
    """The setting's budget in the words of each of `systems`.

    Raises:
        PlanError: there is no budget, or no such system.
    """
    if not isinstance(setting.rule, Gate):
        raise PlanError("gate", "compares budgets, and this setting has a queue instead; leave out --queue and --queue-max")
    for system in systems:
        if system not in _CONVENTIONS:
            raise PlanError("gate", f"{system!r} is none of {', '.join(SYSTEMS)}, all")
    return [_CONVENTIONS[system](setting.rule.budget, setting) for system in systems]
