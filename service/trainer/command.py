"""`rollway trainer --simulate`: the run around the steps, and what a person sees of it."""

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service.trainer.figures import Staleness, Summary, summarise
from service.trainer.gateway import Gateway, GatewayError, open_gateway
from service.trainer.loop import Progress, Trainer
from service.trainer.options import TrainerError, TrainerOptions

logger = logging.getLogger(__name__)

LINE_S = 10.0
"""Between lines on the way."""
CLEAN_UP_S = 20.0
DONE, FAILED, INTERRUPTED = 0, 1, 130


def run_trainer(options: TrainerOptions) -> int:
    """Train to the end: 0; 1 when something could not be done; 130 after Ctrl-C or SIGTERM, with the figures of what was done."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    errors = Console(stderr=True)
    try:
        summary = asyncio.run(_run(options, errors))
    except (GatewayError, TrainerError) as error:
        errors.print(f"[red]rollway trainer:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        return FAILED
    if options.json:
        sys.stdout.write(orjson.dumps(summary.as_json(), option=orjson.OPT_NON_STR_KEYS).decode() + "\n")
    else:
        Console().print(table_of(summary))
    return INTERRUPTED if summary.interrupted else DONE


async def _run(options: TrainerOptions, console: Console) -> Summary:
    progress = Progress()
    async with open_gateway(options.url, options.key) as gateway, _job(gateway, options) as job:
        trainer = Trainer(gateway, job, options, progress)
        training = asyncio.create_task(trainer.run())
        showing = asyncio.create_task(_show(progress, options, console))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, training.cancel)
        try:
            await asyncio.wait({training})
        finally:
            showing.cancel()
            training.cancel()
            await asyncio.gather(showing, training, return_exceptions=True)
        if not training.cancelled():
            training.result()
        return await trainer.summary(interrupted=training.cancelled())


@asynccontextmanager
async def _job(gateway: Gateway, options: TrainerOptions) -> AsyncIterator[Mapping[str, Any]]:
    """The job that is trained. One that did not exist before is deleted again, unless it is to be kept."""
    if options.job is not None:
        yield await gateway.job(options.job)
        return
    assert options.spec is not None
    try:
        spec = orjson.loads(options.spec.read_bytes())
    except (OSError, ValueError) as error:
        raise TrainerError(f"--spec {options.spec}: {error}") from error
    if not isinstance(spec, dict):
        raise TrainerError(f"--spec {options.spec}: must be the body of POST /v1/jobs, a JSON object")
    job, created = await gateway.create_job(spec)
    try:
        yield job
    finally:
        if created and not options.keep:
            await _delete(gateway, job["job_id"])


async def _delete(gateway: Gateway, job_id: str) -> None:
    try:
        async with asyncio.timeout(CLEAN_UP_S):
            await gateway.delete_job(job_id)
    except (GatewayError, TimeoutError) as error:
        logger.warning("job %s is left behind: %r", job_id, error)


async def _show(progress: Progress, options: TrainerOptions, console: Console) -> None:
    while True:
        await asyncio.sleep(LINE_S)
        seen = summarise(progress.steps, warm_up=options.warm_up, version=progress.version, discarded={})
        staleness = f"{seen.staleness.mean:.2f}" if seen.staleness else "-"
        line = f"step {len(progress.steps)}  version {progress.version}  wait {seen.wait_fraction:.0%}  staleness {staleness}"
        console.print(line, highlight=False)


def table_of(summary: Summary) -> Table:
    """The figures for people."""
    title = "simulated trainer" + (" (interrupted)" if summary.interrupted else "")
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in _rows(summary).items():
        table.add_row(name, value)
    return table


def _rows(summary: Summary) -> dict[str, str]:
    warm_up = f", after {summary.warm_up} of warm-up" if summary.warm_up else ""
    rows = {
        "steps": f"{summary.steps} in {summary.seconds:.1f} s{warm_up}: {summary.steps_per_s:.3g}/s; version {summary.version}",
        "samples": f"{summary.samples_per_s:.3g}/s, {summary.tokens_per_s:.4g} sampled tokens/s",
        "trainer": f"waits {summary.wait_fraction:.1%}, publishes {summary.publish_fraction:.1%}; {summary.train_s:.3g} s a step",
        "staleness": _staleness(summary.staleness),
        "discarded": ", ".join(f"{count} {reason}" for reason, count in summary.discarded.items()) or "nothing",
    }
    if summary.lost_batches:
        rows["lost"] = f"{summary.lost_batches} batches, whose lease ended while they were trained on"
    return rows


def _staleness(staleness: Staleness | None) -> str:
    if staleness is None:
        return "-"
    groups = sum(staleness.counts.values())
    shares = ", ".join(f"{value}: {count / groups:.0%}" for value, count in staleness.counts.items())
    return f"mean {staleness.mean:.2f}, p95 {staleness.p95:.1f}, max {staleness.max}  ({shares})"
