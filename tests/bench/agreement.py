"""The planner beside the real service: the same settings, simulated by `service.plan` and driven through gateway, workers and Valkey.

usage: python -m tests.bench.agreement [--minutes N] [--time-scale N] [--cases PART] [--requeue GROUPS] [--json FILE]

All cases run at once, each a job with a stand-in generator and a simulated trainer of its own, in accelerated time: at 36 times, a rollout
of 15 minutes samples its 120 tokens in 25 seconds. Rollouts have one turn, no tools and no verifier. Balanced: what the rollouts in flight
make (Little's law) is what the trainer takes; the generators are half as fast as that, or one and a half times.

`--requeue` then trains so many groups of short rollouts with long tails under `stale_policy: requeue`, and looks at the versions of every
sampled token that is delivered.
"""

import argparse
import asyncio
import json
import os
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from service.plan.lengths import Lognormal
from service.plan.setting import Gate, Setting, StalePolicy
from service.plan.simulator import simulate
from service.standin.server import load_model
from service.tokenizers import make_qwen3
from service.trainer.figures import Summary
from service.trainer.gateway import open_gateway
from service.trainer.loop import Progress, Trainer
from service.trainer.options import Pace, TrainerOptions
from tests.e2e.stack import KEYS
from tests.paced_service import deliver, generator, job_spec, service_running

MEAN_TOKENS, ROLLOUT_S = 120, 900.0
TOKENS_PER_S = MEAN_TOKENS / ROLLOUT_S
WARM_UP = 0.3
MIN_STEPS = 7
PLANNED_GROUPS = 20_000

LOADS = {"generation-bound": 0.5, "balanced": 1.0, "trainer-bound": 1.5}

WAIT_BOUND, STALENESS_BOUND = 0.15, 0.4
BALANCED_WAIT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """load: how long a step computes, in what it takes to make its batch. batches: in flight. source: of a published case."""

    load: float
    budget: int
    sigma: float
    group_size: int = 4
    groups_per_step: int = 16
    batches: int = 1
    stale_policy: StalePolicy = "requeue"
    source: str = ""

    @property
    def name(self) -> str:
        if self.source:
            return f"{self.source}, budget {self.budget}, sigma {self.sigma:g}"
        named = next((name for name, load in LOADS.items() if load == self.load), f"load {self.load:g}")
        return f"{named}, budget {self.budget}, sigma {self.sigma:g}"

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    @property
    def concurrency(self) -> int:
        return self.group_size * self.groups_per_step * self.batches

    @property
    def train_s(self) -> float:
        return ROLLOUT_S * self.load / self.batches

    @property
    def setting(self) -> Setting:
        return Setting(
            lengths=Lognormal(uncut_mean=MEAN_TOKENS, sigma=self.sigma),
            concurrency=self.concurrency,
            tokens_per_s=TOKENS_PER_S,
            train_s=self.train_s,
            rule=Gate(budget=self.budget, stale_policy=self.stale_policy),
            group_size=self.group_size,
            groups_per_step=self.groups_per_step,
        )


CASES = [
    Case(load=load, budget=budget, sigma=sigma)
    for sigma in (0.3, 0.8)
    for budget in (0, 1, 4)
    for load in (LOADS.values() if budget else [LOADS["balanced"]])  # on-policy, all three differ by the trainer's own time only
]

REFERENCE_CASES = [
    Case(source="published: 1.95 of 2.75 samples/s", load=1.95 / 2.75, budget=16, sigma=0.5),
    *(
        Case(
            source="published: a gate alone",
            load=0.7,
            budget=budget,
            sigma=0.6,
            group_size=8,
            groups_per_step=4,
            batches=2,
            stale_policy="pace",
        )
        for budget in (1, 2, 4)
    ),
]
"""A trainer that was measured to wait 30 %; and a gate that binds and discards nothing: its mean staleness is the budget, come what may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Wait fractions and mean staleness; what was discarded as a share of all groups that came to an end."""

    case: str
    steps: int
    planned_wait: float
    measured_wait: float
    planned_staleness: float
    measured_staleness: float
    measured_max: int
    planned_discarded: float
    measured_discarded: float

    @property
    def agrees(self) -> bool:
        waits = abs(self.planned_wait - self.measured_wait) <= max(WAIT_BOUND * self.planned_wait, BALANCED_WAIT)
        return waits and abs(self.planned_staleness - self.measured_staleness) <= STALENESS_BOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the cases run. time_scale: simulated seconds in a real one."""

    url: str
    tokenizer: Path
    model: dict[str, Any]
    time_scale: float
    minutes: float

    def steps(self, case: Case) -> int:
        """That the planner expects in the real minutes."""
        planned = simulate(case.setting, groups=2000)
        return max(MIN_STEPS, int(self.minutes * 60 * self.time_scale * planned.steps / planned.seconds))


async def measure(case: Case, place: Place) -> Summary:
    """The case driven through the service."""
    steps = place.steps(case)
    async with AsyncExitStack() as parts:
        tokens_per_s = TOKENS_PER_S * place.time_scale
        generating = generator(place.model, mean_tokens=MEAN_TOKENS, sigma=case.sigma, tokens_per_s=tokens_per_s, seed=case.seed)
        generator_url = await parts.enter_async_context(generating)
        gateway = await parts.enter_async_context(open_gateway(place.url, KEYS["alpha"]))
        spec = job_spec(
            f"case-{case.seed}",
            place.tokenizer,
            generator_url,
            group_size=case.group_size,
            groups_per_step=case.groups_per_step,
            staleness_budget=case.budget,
            stale_policy=case.stale_policy,
            max_in_flight_rollouts=case.concurrency,
        )
        job, _ = await gateway.create_job(spec)
        options = TrainerOptions(
            url=place.url,
            job=job["job_id"],
            steps=steps,
            warm_up=int(steps * WARM_UP),
            pace=Pace(step_s=case.train_s, time_scale=place.time_scale),
            lease_s=300.0,
        )
        trainer = Trainer(gateway, job, options, Progress())
        await trainer.run()
        summary = await trainer.summary()
        await gateway.delete_job(job["job_id"])
        return summary


def row(case: Case, summary: Summary) -> Row:
    planned = simulate(case.setting, groups=PLANNED_GROUPS)
    assert summary.staleness is not None
    trained = (summary.steps + summary.warm_up) * case.groups_per_step
    discarded = sum(count for reason, count in summary.discarded.items() if reason == "requeued" or reason.startswith("dropped"))
    return Row(
        case=case.name,
        steps=summary.steps,
        planned_wait=planned.wait_share,
        measured_wait=summary.wait_fraction,
        planned_staleness=planned.staleness.mean,
        measured_staleness=summary.staleness.mean,
        measured_max=summary.staleness.max,
        planned_discarded=planned.discarded_share,
        measured_discarded=discarded / (trained + discarded),
    )


async def compare(cases: Sequence[Case], place: Place, console: Console) -> list[Row]:
    async def one(case: Case) -> Row:
        found = row(case, await measure(case, place))
        console.print(f"{case.name}: wait {found.measured_wait:.3f}, staleness {found.measured_staleness:.2f}", highlight=False)
        return found

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(case)) for case in cases]
    return [task.result() for task in running]


def table(rows: Sequence[Row]) -> Table:
    found = Table(title="planner / service", title_justify="left")
    for column in ("setting", "steps", "wait", "staleness", "max", "discarded", "agrees"):
        found.add_column(column, justify="left" if column == "setting" else "right")
    for one in rows:
        found.add_row(
            one.case,
            str(one.steps),
            f"{one.planned_wait:.1%} / {one.measured_wait:.1%}",
            f"{one.planned_staleness:.2f} / {one.measured_staleness:.2f}",
            str(one.measured_max),
            f"{one.planned_discarded:.1%} / {one.measured_discarded:.1%}",
            "yes" if one.agrees else "NO",
        )
    return found


async def bench(arguments: argparse.Namespace, console: Console) -> int:
    with tempfile.TemporaryDirectory(prefix="agreement-") as name:
        tokenizer = make_qwen3(Path(name) / "tokenizers" / "qwen3")
        model = load_model(tokenizer, "qwen3")
        async with service_running(Path(name) / "service", tokenizer) as url:
            cases = [case for case in (*CASES, *REFERENCE_CASES) if arguments.cases in case.name]
            place = Place(url=url, tokenizer=tokenizer, model=model, time_scale=arguments.time_scale, minutes=arguments.minutes)
            rows = await compare(cases, place, console) if cases else []
            delivered = await deliver(url, tokenizer, model, groups=arguments.requeue, step=32) if arguments.requeue else None
    if rows:
        console.print(table(rows))
    if delivered:
        console.print(f"requeue: {delivered}", highlight=False)
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps(
                {"rows": [asdict(one) for one in rows], "requeue": asdict(delivered) if delivered else None, "cores": os.cpu_count()}
            )
        )
    failed = [one for one in rows if not one.agrees] or (delivered and delivered.above)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=16.0, help="how long the cases run at least, in real time (default 16)")
    parser.add_argument(
        "--time-scale", type=float, default=36.0, help="simulated seconds in a real one (default 36); less on a slow machine"
    )
    parser.add_argument("--cases", default="", help="only those whose name holds this text; 'none' for none")
    parser.add_argument("--requeue", type=int, default=0, metavar="GROUPS", help="then deliver so many groups under requeue")
    parser.add_argument("--json", metavar="FILE")
    return asyncio.run(bench(parser.parse_args(), Console(width=140)))


if __name__ == "__main__":
    raise SystemExit(main())
