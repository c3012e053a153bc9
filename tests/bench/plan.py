"""How fast the planner simulates: 100,000 groups of 8 in each of its rules, and how far the closed forms are from them.

usage: python -m tests.bench.plan [--groups N]
"""

import argparse
import time

from rich.console import Console
from rich.table import Table

from service.plan.forms import closed_forms
from service.plan.setting import Gate, QueueDrop, QueueMax, Rule
from service.plan.simulator import simulate
from tests.plan_settings import setting

RULES: dict[str, Rule] = {
    "gate, budget 4, requeue": Gate(budget=4),
    "gate, budget 4, pace": Gate(budget=4, stale_policy="pace"),
    "queue of 2 batches": QueueDrop(batches=2),
    "staleness at most 4": QueueMax(max_staleness=4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=100_000)
    groups: int = parser.parse_args().groups
    table = Table(
        "rule", "CPU s", "rollouts/s", "staleness (form)", "waits (form)", title=f"{groups:,} groups of 8, 512 in flight, rho 0.9"
    )
    for name, rule in RULES.items():
        planned = setting(concurrency=512, batch=256, rho=0.9, sigma=0.5, rule=rule)
        form, started = closed_forms(planned), time.process_time()
        found = simulate(planned, groups=groups)
        seconds = time.process_time() - started
        staleness = "-" if form.staleness is None else f"{form.staleness:.2f}"
        table.add_row(
            name,
            f"{seconds:.1f}",
            f"{found.ends.begun * planned.members / seconds:,.0f}",
            f"{found.staleness.mean:.2f} ({staleness})",
            f"{found.wait_share:.1%} ({form.wait_fraction:.1%})",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
