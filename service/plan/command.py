"""`rollway plan`: options in, a plan out. Here is all the input and output of the planner."""

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:  # numpy and rich wait until a plan is made
    from service.plan.live import Live
    from service.plan.options import Options
    from service.plan.presets import Preset
    from service.plan.report import Plan

MAX_GROUPS = 2_000_000
"""About two minutes of simulation."""


def _opt(text: str, **more: Any) -> Any:
    return typer.Option(help=text, **more)


def plan(
    preset: Annotated[str | None, _opt("a published run: long-responses, tool-use, sandbox-scaling or partial-rollouts")] = None,
    job: Annotated[str | None, _opt("read a running job's figures: URL/ID, or its id on this machine")] = None,
    key: Annotated[str | None, _opt("API key for --job; none where the gateway has none", envvar="ROLLWAY_API_KEY")] = None,
    concurrency: Annotated[int | None, _opt("rollouts in flight (the job's max_in_flight_rollouts)")] = None,
    generators: Annotated[int | None, _opt("generators that carry them")] = None,
    generator_tokens_per_s: Annotated[float | None, _opt("the most that one generator samples in all")] = None,
    tokens_per_s: Annotated[float | None, _opt("what one rollout samples, sandboxes and tools apart")] = None,
    latency_s: Annotated[float | None, _opt("instead: mean seconds of a whole rollout")] = None,
    production: Annotated[float | None, _opt("instead: measured samples per second of all generators")] = None,
    train_s: Annotated[float | None, _opt("seconds of a trainer step, without waiting and weights")] = None,
    consumption: Annotated[float | None, _opt("instead: samples per second that the trainer could consume")] = None,
    update_s: Annotated[float | None, _opt("seconds for which a weight update holds everything up")] = None,
    group_size: Annotated[int | None, _opt("rollouts in a group [default: 8]")] = None,
    groups_per_step: Annotated[int | None, _opt("groups in a trainer step [default: 32]")] = None,
    steps_per_version: Annotated[int | None, _opt("steps between two weight updates [default: 1]")] = None,
    extra_members: Annotated[int | None, _opt("rollouts started beyond group_size; the last ones are aborted")] = None,
    mean_tokens: Annotated[float | None, _opt("mean length of a rollout [default: 4096]")] = None,
    sigma: Annotated[float | None, _opt("of the lognormal length [default: 0.5]")] = None,
    tail: Annotated[float | None, _opt("instead: E[longest of a group] / E[length]")] = None,
    max_tokens: Annotated[float | None, _opt("cut lengths here")] = None,
    lengths: Annotated[
        Path | None, _opt("instead: a file of measured lengths, numbers or a JSON array", exists=True, dir_okay=False)
    ] = None,
    sandbox_s: Annotated[float | None, _opt("mean seconds of a sandbox's start")] = None,
    sandbox_sigma: Annotated[float | None, _opt("of that as a lognormal; 0: always the same")] = None,
    tool_s: Annotated[float | None, _opt("mean seconds of all tool calls of a rollout")] = None,
    tool_sigma: Annotated[float | None, _opt("of that as a lognormal; 0: always the same")] = None,
    verify_s: Annotated[float | None, _opt("mean seconds of the verifier")] = None,
    max_starting: Annotated[int | None, _opt("sandboxes that may start at once")] = None,
    max_sandboxes: Annotated[int | None, _opt("sandboxes that may live at once")] = None,
    sandbox_cpus: Annotated[float | None, _opt("vCPU of a sandbox [default: 1]")] = None,
    sandbox_memory_mib: Annotated[int | None, _opt("MiB of a sandbox [default: 512]")] = None,
    acceptance: Annotated[float | None, _opt("share of groups that pass the filters [default: 1]")] = None,
    staleness_budget: Annotated[int | None, _opt("of Rollway's gate, in policy versions [default: 1]")] = None,
    stale_policy: Annotated[str | None, _opt("requeue, drop or pace [default: requeue]")] = None,
    max_requeues: Annotated[int | None, _opt("times a stale group runs again [default: 2]")] = None,
    queue: Annotated[float | None, _opt("instead of the gate: a queue of so many batches that evicts its oldest group")] = None,
    queue_max: Annotated[int | None, _opt("instead of the gate: discard whatever is staler than this")] = None,
    compare: Annotated[list[str] | None, _opt("a table: name=value,value; several make every combination", metavar="NAME=V,V")] = None,
    gate: Annotated[list[str] | None, _opt("the same budget elsewhere: areal, verl, nemo, prime-rl or all", metavar="SYSTEM")] = None,
    plot: Annotated[Path | None, _opt("staleness and wait against generators and budget, as a PNG", metavar="FILE.png")] = None,
    json: Annotated[bool, typer.Option("--json", help="the plan as one JSON object")] = False,
    groups: Annotated[int, _opt("groups to simulate", min=1000, max=MAX_GROUPS)] = 20_000,
    seed: Annotated[int, _opt("of the simulation", min=0)] = 0,
) -> None:
    """What staleness and waiting a setting costs, what it needs, and which knob helps most.

    Needs --concurrency, a generator's speed (--tokens-per-s, --latency-s or --production) and the trainer's (--train-s or --consumption);
    or --preset or --job, over which every other option is laid.
    """
    said = {name: value for name, value in locals().items() if value is not None}  # first of all: the parameters, nothing else
    from service.plan.errors import PlanError

    try:
        made = _make(said)
    except PlanError as error:
        typer.echo(f"rollway plan: {error}", err=True)
        raise typer.Exit(2) from None
    if json:
        typer.echo(json_module.dumps(made.as_json()))
        return
    import sys

    from rich.console import Console

    from service.plan.report import show

    show(made, Console(width=None if sys.stdout.isatty() else 150))


def _make(said: dict[str, Any]) -> "Plan":
    """Raises PlanError."""
    from service.plan.advice import SIZING_GROUPS, bottleneck, knobs, sizes
    from service.plan.forms import closed_forms
    from service.plan.gates import SYSTEMS, conventions
    from service.plan.options import variants
    from service.plan.report import Plan, Row
    from service.plan.simulator import simulate

    preset, live, options = _options(said)
    setting, groups, seed = options.setting(), said["groups"], said["seed"]
    systems = tuple(said.get("gate", ()))
    elsewhere = conventions(setting, SYSTEMS if "all" in systems else ("rollway", *systems)) if systems else []
    compared = said.get("compare") or (list(preset.compare) if preset else [])
    others = {name: other.setting() for name, other in variants(options, compared).items()} if compared else {}
    if "plot" in said:
        _check_plot(said["plot"])
    searched = min(SIZING_GROUPS, groups)
    forms, simulated = closed_forms(setting), simulate(setting, groups=groups, seed=seed)
    made = Plan(
        setting=setting,
        forms=forms,
        simulated=simulated,
        bottleneck=bottleneck(setting, forms, simulated),
        sizes=sizes(setting, forms, simulated, groups=searched, seed=seed),
        knobs=knobs(setting, simulated, groups=searched, seed=seed),
        compared=[
            Row(name=name, forms=closed_forms(other), simulated=simulate(other, groups=groups, seed=seed)) for name, other in others.items()
        ],
        elsewhere=elsewhere,
        measured=_measured(live),
        about=_about(preset, live),
    )
    if "plot" in said:
        from service.plan.plot import PLOTTED_GROUPS, draw, lines

        draw(lines(setting, groups=min(PLOTTED_GROUPS, groups), seed=seed), said["plot"], now=setting.generators)
    return made


def _options(said: dict[str, Any]) -> tuple["Preset | None", "Live | None", "Options"]:
    from dataclasses import fields

    from service.plan.errors import PlanError
    from service.plan.options import Options
    from service.plan.presets import PRESETS

    given = {field.name: said[field.name] for field in fields(Options) if field.name in said}
    if "lengths" in given:
        given["lengths"] = _read_lengths(given["lengths"])
    if "preset" in said and "job" in said:
        raise PlanError("job", "and --preset are two settings; leave one of them out")
    if "job" in said:
        live = _read_job(said["job"], said.get("key"))
        return None, live, live.options.overlaid(given)
    if "preset" in said:
        if said["preset"] not in PRESETS:
            raise PlanError("preset", f"{said['preset']!r} is none of {', '.join(PRESETS)}")
        preset = PRESETS[said["preset"]]
        return preset, None, preset.options.overlaid(given)
    return None, None, Options(**given)


def _about(preset: "Preset | None", live: "Live | None") -> list[str]:
    if preset is not None:
        return [preset.about, f"published: {preset.published}", f"assumed: {preset.assumed}"]
    return [f"the job says: {live.bottleneck}"] if live is not None and live.bottleneck else []


def _measured(live: "Live | None") -> dict[str, float]:
    if live is None:
        return {}
    found = {"trainer waits": live.wait_fraction, "staleness, mean": live.staleness}
    return {name: value for name, value in found.items() if value is not None}


def _read_lengths(path: Path) -> Any:
    import numpy as np

    from service.plan.errors import PlanError

    try:
        text = path.read_text()
        values = json_module.loads(text) if text.lstrip().startswith("[") else text.split()
        return np.array(values, dtype=np.float64).ravel()
    except (OSError, ValueError, TypeError) as error:
        raise PlanError("lengths", f"{path} is no list of numbers ({error}); give one number a line, or a JSON array") from None


def _read_job(job: str, key: str | None) -> "Live":
    import httpx

    from service.plan.errors import PlanError
    from service.plan.live import job_urls, read_live

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answers = []
    for url in job_urls(job):
        try:
            answer = httpx.get(url, headers=headers, timeout=30.0)
            answer.raise_for_status()
            answers.append(answer.json())
        except httpx.HTTPStatusError as error:
            cure = {401: "; give its key with --key", 404: "; is the id right, and the key of its tenant?"}
            status = error.response.status_code
            raise PlanError("job", f"{url} answered {status}{cure.get(status, '')}") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise PlanError("job", f"{url} cannot be read ({error}); is the gateway running there?") from None
    return read_live(*answers)


def _check_plot(path: Path) -> None:
    """Before minutes of simulation, not after."""
    from importlib.util import find_spec

    from service.plan.errors import PlanError

    if find_spec("matplotlib") is None:
        raise PlanError("plot", "needs matplotlib: pip install 'rollway[plot]', or pip install matplotlib")
    if not path.parent.is_dir():
        raise PlanError("plot", f"{path.parent} is no directory; name a file in one that is there")
