"""Settings of the planner's tests, in the terms of the published cases: slots, batch, rho, tail. A rollout takes 1,000 s on average."""

from typing import Any

from service.plan.lengths import Lognormal, sigma_of_tail
from service.plan.setting import Rule, Setting


def setting(
    *, concurrency: int, batch: int, rho: float, rule: Rule, sigma: float | None = None, tail: float = 1.0, group_size: int = 8, **more: Any
) -> Setting:
    """rho: of generators with every place taken, before filters."""
    return Setting(
        lengths=Lognormal(uncut_mean=1000, sigma=sigma_of_tail(tail, group_size) if sigma is None else sigma),
        concurrency=concurrency,
        tokens_per_s=1.0,
        train_s=batch * rho * 1000 / concurrency,
        rule=rule,
        group_size=group_size,
        groups_per_step=batch // group_size,
        **more,
    )
