"""`rollway demo`: real processes, real tasks, a small trainer, and at the end a check of everything that was delivered."""

import asyncio
import logging
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
from rich.console import Console
from rich.live import Live

from service.demo.checks import Truth, check_ends, check_group
from service.demo.options import DemoOptions
from service.demo.processes import Child, ChildError, free_port, output_of, rollway_argv, running
from service.demo.report import Findings, build_report
from service.demo.table import live_line, live_table, print_report
from service.demo.trainer import Progress, StalledError, train
from service.demo.workload import BUDGET, Workload, workload
from service.settings import Settings
from service.tokenizers import make_qwen3
from service.trainer.gateway import Gateway, GatewayError, open_gateway

logger = logging.getLogger(__name__)

START_S = 90.0
"""For the first answer of a child, on a machine that is busy with other things."""
TOKENS_PER_S = 500
"""Pace of one request at the stand-in, so that rollouts last and weights change under them."""
REFRESH_S = 0.5
LINE_S = 5.0
"""Between lines where there is no terminal to draw a table on."""
PASSED, FAILED, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one demo runs: its directory, its environment, the tenant's key."""

    folder: Path
    env: Mapping[str, str]
    key: str

    @property
    def record(self) -> Path:
        """What the stand-in generator sampled, one JSON object a line."""
        return self.folder / "record.jsonl"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def run_demo(options: DemoOptions) -> int:
    """Run the demo to its end: 0 when everything held, 1 when it did not, 130 after Ctrl-C. Leaves no process and no sandbox."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    errors = Console(stderr=True)
    try:
        return asyncio.run(_interruptible(options))
    except (ChildError, GatewayError, StalledError, httpx.HTTPError, ValueError) as error:
        errors.print(f"[red]demo failed:[/red] {error}", highlight=False)
        return FAILED
    except asyncio.CancelledError:
        errors.print("interrupted; everything was stopped")
        return INTERRUPTED


async def _interruptible(options: DemoOptions) -> int:
    """The first Ctrl-C or SIGTERM cancels the demo; more of them change nothing, since every step of the way out has its own end."""
    demo = asyncio.create_task(_demo(options))
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait((demo, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not demo.done():
        demo.cancel()
    stopped.cancel()
    return await demo


async def _demo(options: DemoOptions) -> int:
    console = Console(stderr=options.json)
    settings = Settings()
    tokenizer = await asyncio.to_thread(_tokenizer, options, settings)
    work = workload(options, tokenizer)
    place = _place(options, settings, tokenizer)
    progress = Progress()
    async with _no_sandboxes_after(place):
        states = await _run(options, work, place, tokenizer, progress, console)
        findings = await _check(states, progress, place, has_record=work.policy is not None)
    report = build_report(progress, findings, generator=options.generator, backend=options.backend, budget=BUDGET)
    if options.json:
        sys.stdout.write(orjson.dumps(report.as_json()).decode() + "\n")
    else:
        print_report(report, console)
    if report.passed and not options.keep:
        await asyncio.to_thread(shutil.rmtree, place.folder)
    else:
        console.print(f"logs and records: {place.folder}")
    return PASSED if report.passed else FAILED


# -------------------------------------------------------------------------------------------------------------------------- set-up


def _tokenizer(options: DemoOptions, settings: Settings) -> Path:
    if options.tokenizer is not None:
        return options.tokenizer.resolve()
    if options.generator == "sglang":
        return Path(_given("ROLLWAY_DEMO_SGLANG_MODEL", "--tokenizer")).resolve()
    return make_qwen3(settings.data_dir / "tokenizers" / "qwen3").resolve()


def _given(variable: str, option: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ValueError(f"a real engine needs {option} or {variable}; deploy/demo --generator sglang sets it")
    return value


def _place(options: DemoOptions, settings: Settings, tokenizer: Path) -> Place:
    name = f"demo-{secrets.token_hex(4)}"
    folder = (settings.data_dir / "demo" / name).resolve()
    folder.mkdir(parents=True)
    key = secrets.token_hex(16)
    env = {
        **os.environ,
        "ROLLWAY_DATA_DIR": str(folder / "data"),
        "ROLLWAY_DEPLOYMENT_ID": name,
        "ROLLWAY_API_KEYS": f"demo:{key}",
        "ROLLWAY_TOKENIZER_ROOTS": str(tokenizer.parent),
        "ROLLWAY_PROCESS_BACKEND": "1" if options.backend == "process" else "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Place(folder=folder, env=env, key=key)


# ----------------------------------------------------------------------------------------------------------------------------- run


async def _run(options: DemoOptions, work: Workload, place: Place, tokenizer: Path, progress: Progress, console: Console) -> dict[str, str]:
    """Start the parts, train until the job is drained, and stop them again: how each submitted group ended."""
    async with AsyncExitStack() as parts:
        generator_url = await _generator(options, work, place, tokenizer, parts)
        port = free_port()
        argv = rollway_argv("serve", "--host", "127.0.0.1", "--port", str(port), "--workers", str(options.workers))
        served = await parts.enter_async_context(running("gateway", argv, env=place.env, log=place.log("gateway")))
        await served.ready(f"http://127.0.0.1:{port}/readyz", timeout_s=START_S, key=place.key)
        gateway = await parts.enter_async_context(open_gateway(f"http://127.0.0.1:{port}", place.key))
        job, _ = await gateway.create_job(work.on(generator_url).job)
        job_id = job["job_id"]
        submitted = await gateway.submit(job_id, work.tasks)
        async with _shown(gateway, job_id, progress, served, console):
            await train(gateway, job_id, groups_per_step=work.groups_per_step, generator_url=generator_url, progress=progress)
        ends = {group["group_id"]: str(group["state"]) for group in await gateway.groups(job_id)}
        return {group_id: ends.get(group_id, "lost") for group_id in submitted}


async def _generator(options: DemoOptions, work: Workload, place: Place, tokenizer: Path, parts: AsyncExitStack) -> str:
    """The URL of the generator; the stand-in is started unless a URL was given."""
    if options.generator_url is not None:
        return options.generator_url
    if work.policy is None:
        return _given("ROLLWAY_DEMO_SGLANG_URL", "--generator-url")
    policy = place.folder / "policy.json"
    policy.write_bytes(orjson.dumps(work.policy))
    port = free_port()
    argv = rollway_argv(
        *("generator", "--tokenizer", str(tokenizer), "--renderer", "qwen3", "--policy", str(policy), "--host", "127.0.0.1"),
        *("--port", str(port), "--seed", str(options.seed), "--record", str(place.record), "--tokens-per-s", str(TOKENS_PER_S)),
    )
    child = await parts.enter_async_context(running("generator", argv, env=place.env, log=place.log("generator")))
    await child.ready(f"http://127.0.0.1:{port}/ready", timeout_s=START_S)
    return f"http://127.0.0.1:{port}"


@asynccontextmanager
async def _shown(gateway: Gateway, job_id: str, progress: Progress, served: Child, console: Console) -> AsyncIterator[None]:
    """Show the live table while the body runs; the body ends with ChildError when the gateway does."""
    started = time.monotonic()

    async def refresh(live: Live) -> None:
        while True:
            served.check()
            job = await gateway.job(job_id)
            if console.is_terminal:
                live.update(live_table(job, progress, time.monotonic() - started), refresh=True)
            else:
                console.print(live_line(job, progress, time.monotonic() - started), highlight=False)
            await asyncio.sleep(REFRESH_S if console.is_terminal else LINE_S)

    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            async with asyncio.TaskGroup() as showing:
                refreshing = showing.create_task(refresh(live))
                yield
                refreshing.cancel()
    except BaseExceptionGroup as group:  # of one: what the body or the refreshing raised
        raise group.exceptions[0] from None


# --------------------------------------------------------------------------------------------------------------------------- check


async def _check(states: Mapping[str, str], progress: Progress, place: Place, *, has_record: bool) -> Findings:
    """Everything that must hold, after the parts have left."""
    left = await _removed(place)
    records = await asyncio.to_thread(_records, place.record) if has_record and place.record.exists() else None
    truth = Truth(records) if records is not None else None
    problems = check_ends(states, [delivered.group["group_id"] for delivered in progress.delivered], states)
    for delivered in progress.delivered:
        problems += await asyncio.to_thread(
            check_group, delivered.group, policy_version=delivered.policy_version, budget=BUDGET, truth=truth
        )
    problems += [f"a sandbox was left: {box}" for box in left]
    return Findings(
        states=states,
        tokens_compared=truth.taken if truth else 0,
        sandboxes_left=len(left),
        problems=problems,
    )


def _records(path: Path) -> Sequence[Mapping[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


async def _removed(place: Place) -> Sequence[str]:
    """The sandboxes of this demo that were still there, as the workers' own inventory lists them."""
    argv = [sys.executable, "-m", "workers.inventory", "cleanup", "--all", "--keep-shared", "--yes", "--json"]
    return (await output_of(argv, env=place.env, log=place.log("inventory"))).splitlines()


@asynccontextmanager
async def _no_sandboxes_after(place: Place) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await _removed(place)
