"""Staleness and waiting against generators, a line for each budget, as a PNG. Needs matplotlib, which is an extra."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from service.plan.errors import PlanError
from service.plan.setting import Gate, Setting
from service.plan.simulator import simulate

BUDGETS = (0, 1, 2, 4, 8)
FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Of the setting's generators; its rollouts in flight change with them, whole generators or not."""
PLOTTED_GROUPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One budget: by generators, mean and 95th percentile of staleness, and the share of time that the trainer waits."""

    budget: int
    generators: Sequence[float]
    mean: Sequence[float]
    p95: Sequence[float]
    wait: Sequence[float]


def lines(setting: Setting, *, groups: int = PLOTTED_GROUPS, seed: int = 0) -> list[Line]:
    """The setting under the gate with each budget and with fewer and more generators, simulated."""
    own = [setting.rule.budget] if isinstance(setting.rule, Gate) else []
    found = []
    for budget in sorted({*BUDGETS, *own}):
        settings = {factor: setting.with_budget(budget).scaled(factor) for factor in FACTORS}
        runs = {factor: simulate(other, groups=groups, seed=seed) for factor, other in settings.items()}
        found.append(
            Line(
                budget=budget,
                generators=[setting.generators * factor for factor in runs],
                mean=[run.staleness.mean for run in runs.values()],
                p95=[run.staleness.p95 for run in runs.values()],
                wait=[run.wait_share for run in runs.values()],
            )
        )
    return found


def draw(found: Sequence[Line], path: Path, *, now: int) -> None:
    """Write the picture; `now`: the generators that there are.

    Raises:
        PlanError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("plot", "needs matplotlib: pip install 'rollway[plot]', or pip install matplotlib") from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    ages, waits = figure.subplots(1, 2)
    for line in found:
        label = f"budget {line.budget}"
        (drawn,) = ages.plot(line.generators, line.mean, marker="o", label=label)
        ages.plot(line.generators, line.p95, linestyle=":", color=drawn.get_color())
        waits.plot(line.generators, [100 * share for share in line.wait], marker="o", label=label)
    ages.set(title="staleness at the trainer: mean, and p95 dotted", ylabel="policy versions")
    waits.set(title="the trainer waits", ylabel="% of its time", ylim=(0, 100))
    for axes in (ages, waits):
        axes.set_xlabel("generators")
        axes.axvline(now, color="grey", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise PlanError("plot", f"cannot write {path}: {error.strerror or error}; name a file in a directory that is there") from None
