"""What a person sees of a demo: a live table while it runs, a summary at the end."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from service.demo.report import SHOWN_PROBLEMS, Report, Spread
from service.demo.trainer import Progress

COUNTS = ("backlog", "running", "ready", "leased", "acked", "charged", "capacity", "in_flight_rollouts")


def live_table(job: Mapping[str, Any], progress: Progress, elapsed_s: float) -> Table:
    """The job as of now, the trainer beside it."""
    table = Table(title=f"rollway demo, {elapsed_s:.0f} s", title_justify="left")
    for column in (*COUNTS, "version", "rewards"):
        table.add_column(column.replace("_", " "), justify="right")
    counts = job.get("counts", {})
    rewards = [trajectory["reward"] or 0.0 for trajectory in progress.trajectories]
    mean = f"{sum(rewards) / len(rewards):.2f}" if rewards else "-"
    table.add_row(*(str(counts.get(name, "-")) for name in COUNTS), str(progress.version), mean)
    return table


def live_line(job: Mapping[str, Any], progress: Progress, elapsed_s: float) -> str:
    """The same as one line, for logs."""
    counts = job.get("counts", {})
    shown = ", ".join(f"{counts.get(name, '-')} {name}" for name in ("backlog", "running", "ready", "acked"))
    return f"{elapsed_s:4.0f} s  version {progress.version}  groups: {shown}"


def print_report(report: Report, console: Console) -> None:
    table = Table(title="passed" if report.passed else "FAILED", title_justify="left", show_header=False)
    for name, value in _rows(report).items():
        table.add_row(name, value)
    console.print(table)
    for problem in report.problems[:SHOWN_PROBLEMS]:
        console.print(f"[red]problem:[/red] {problem}")
    if len(report.problems) > SHOWN_PROBLEMS:
        console.print(f"... and {len(report.problems) - SHOWN_PROBLEMS} more")


def _rows(report: Report) -> dict[str, str]:
    return {
        "generator, sandboxes": f"{report.generator}, {report.backend}",
        "groups": f"{report.groups_submitted}: {_counted(report.groups)}",
        "rollouts ended by": _counted(report.stop_reasons),
        "rewards": f"mean {report.reward_mean:.2f}, {report.groups_with_variance:.0%} of groups vary",
        "samples": f"{report.samples} in {report.seconds:.1f} s: {report.samples_per_s:.2f}/s",
        "sampled tokens": f"{report.tokens}: {report.tokens_per_s:.0f}/s",
        "tokens compared": f"{report.tokens_compared} with the generator's record" if report.tokens_compared else "none: no record",
        "trainer steps": str(report.steps),
        "staleness": f"mean {report.staleness.mean:.2f}, p95 {report.staleness.p95:.0f}, max {report.staleness.max:.0f}, "
        f"budget {report.staleness_budget}",
        "turns": f"mean {report.turns.mean:.1f}, p95 {report.turns.p95:.0f}; {report.tool_calls} tool calls",
        "sandbox start": _seconds(report.sandbox_start_s),
        "tool call": _seconds(report.tool_call_s),
        "verifier": _seconds(report.verify_s),
        "sandboxes left": str(report.sandboxes_left),
    }


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _seconds(spread: Spread) -> str:
    return f"p50 {spread.p50 * 1000:.0f} ms, p95 {spread.p95 * 1000:.0f} ms"
