"""`rollway plan`: what it says, what it refuses, and how it reads a job."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from service.cli import main
from service.plan.errors import PlanError
from service.plan.live import NEEDED, job_urls, read_live
from service.plan.options import Options, variants
from service.plan.presets import PRESETS
from service.records import JobSpec
from service.routes.throughput import ThroughputAnswer

GIVEN = ["--concurrency", "128", "--tokens-per-s", "40", "--consumption", "1.5", "--groups-per-step", "16", "--groups", "1000"]


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["plan", *arguments])


def planned(*arguments: str) -> dict[str, Any]:
    found = plan(*arguments, "--json")
    assert found.exit_code == 0, found.output
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def test_a_plan_for_people() -> None:
    found = plan(*GIVEN, "--staleness-budget", "4", "--sandbox-s", "2", "--tool-s", "10", "--sandbox-cpus", "2")
    assert found.exit_code == 0, found.output
    for part in (
        "closed form",
        "simulation",
        "is the bottleneck",
        "What helps most:",
        "Generators:",
        "Budget:",
        "256 vCPU",
        "p50 / p95 / max",
    ):
        assert part in found.stdout


def test_a_plan_for_programs() -> None:
    found = planned(*GIVEN, "--staleness-budget", "4", "--gate", "areal")
    assert found["setting"]["concurrency"] == 128
    assert found["simulated"]["staleness"]["max"] <= 4
    assert found["forms"]["rho"] == pytest.approx(found["forms"]["accepted"] / found["forms"]["consumption"])
    assert found["sizes"]["capacity_groups"] == 5 * 16
    assert [row["system"] for row in found["elsewhere"]] == ["rollway", "areal"]
    assert found["knobs"][0]["samples_gain"] >= found["knobs"][-1]["samples_gain"]
    assert planned(*GIVEN, "--staleness-budget", "4", "--gate", "areal") == found


def test_the_generators_it_asks_for_are_enough() -> None:
    arguments = [*GIVEN, "--staleness-budget", "6", "--generators", "4", "--sigma", "0.3"]
    needed = planned(*arguments)["sizes"]["generators"]
    more = [*GIVEN, "--staleness-budget", "6", "--generators", str(needed), "--sigma", "0.3", "--concurrency", str(32 * needed)]
    assert needed > 4
    assert planned(*more)["simulated"]["wait_share"] < 0.07


def test_measured_rates_say_the_same_as_given_ones() -> None:
    by_rate = planned(*GIVEN)
    rate = 128 / (4096 / 40)
    others = ["--concurrency", "128", "--production", str(rate), "--train-s", str(128 / 1.5), "--groups-per-step", "16", "--groups", "1000"]
    found = planned(*others)
    assert found["simulated"]["wait_share"] == pytest.approx(by_rate["simulated"]["wait_share"])
    assert found["forms"]["rho"] == pytest.approx(by_rate["forms"]["rho"])


@pytest.mark.parametrize("text", ["100 200\n300\n", "[100, 200, 300]"])
def test_lengths_from_a_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "lengths").write_text(text)
    found = planned(*GIVEN, "--lengths", str(tmp_path / "lengths"))
    assert found["setting"]["mean_tokens"] == 200
    assert found["forms"]["tail"] == pytest.approx((1 * 1 + 2 * (2**8 - 1) + 3 * (3**8 - 2**8)) / 3**8 / 2, rel=1e-3)


def test_comparing_makes_a_row_of_every_combination() -> None:
    found = planned(*GIVEN, "--compare", "staleness_budget=0,1,2", "--compare", "group-size=4,8")["compared"]
    assert [row["name"] for row in found][:2] == ["staleness_budget=0, group_size=4", "staleness_budget=0, group_size=8"]
    assert len(found) == 6
    waits = [row["simulated"]["wait_share"] for row in found if row["name"].endswith("group_size=8")]
    assert waits == sorted(waits, reverse=True)
    table = plan(*GIVEN, "--compare", "staleness_budget=0,1")
    assert "staleness_budget=1" in table.stdout


def test_what_is_compared_leaves_the_rest_as_it_is() -> None:
    base = Options(concurrency=64, generators=2, production=1.0, train_s=100.0)
    rows = {name: options.setting() for name, options in variants(base, ["generators=2,4"]).items()}
    assert [row.concurrency for row in rows.values()] == [64, 128]
    assert len({row.tokens_per_s for row in rows.values()}) == 1
    wider = variants(base, ["groups_per_step=64"])["groups_per_step=64"].setting()
    assert wider.train_s == pytest.approx(200.0)
    assert str(variants(base, ["queue=2"])["queue=2"].setting().rule) == "QueueDrop(batches=2.0)"


@pytest.mark.parametrize("preset", ["sandbox-scaling", "partial-rollouts"])  # the others are large: the simulator's tests run them
def test_a_preset_is_a_plan(preset: str) -> None:
    found = plan("--preset", preset, "--groups", "1000")
    assert found.exit_code == 0, found.output
    assert "published:" in found.stdout
    assert "assumed:" in found.stdout
    assert PRESETS[preset].compare[0].partition("=")[0] in found.stdout


def test_options_are_laid_over_a_preset() -> None:
    found = planned("--preset", "partial-rollouts", "--groups", "1000", "--tokens-per-s", "30", "--queue", "2", "--compare", "queue=1")
    assert found["setting"]["tokens_per_s"] == 30
    assert found["setting"]["rule"].startswith("queue of 2 batches")
    assert found["setting"]["steps_per_version"] == 5
    assert len(found["compared"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "--concurrency: is missing", id="nothing"),
        pytest.param(["--concurrency", "64"], "--consumption: is missing", id="no-trainer"),
        pytest.param(["--concurrency", "64", "--consumption", "1"], "--tokens-per-s: is missing", id="no-generator"),
        pytest.param([*GIVEN, "--latency-s", "5"], "--latency-s: and --tokens-per-s say the same", id="speed-twice"),
        pytest.param([*GIVEN, "--train-s", "5"], "say the same; leave one of them out", id="trainer-twice"),
        pytest.param([*GIVEN, "--concurrency", "7"], "--concurrency: 7 is below the 8 rollouts of one group", id="deadlock"),
        pytest.param([*GIVEN, "--max-sandboxes", "7"], "--max-sandboxes: 7 is below the 8 rollouts of one group", id="sandbox-deadlock"),
        pytest.param([*GIVEN, "--staleness-budget", "-1"], "--staleness-budget: -1 is outside 0..", id="budget"),
        pytest.param([*GIVEN, "--stale-policy", "keep"], "--stale-policy: 'keep' is none of requeue, drop, pace", id="policy"),
        pytest.param([*GIVEN, "--max-requeues", "-1"], "--max-requeues: -1 is below zero", id="requeues"),
        pytest.param([*GIVEN, "--sigma", "-0.1"], "--sigma: -0.1 is outside", id="sigma"),
        pytest.param([*GIVEN, "--sigma", "nan"], "--sigma: nan is outside", id="sigma-nan"),
        pytest.param([*GIVEN, "--tail", "0.5"], "--tail: 0.5 cannot be", id="tail"),
        pytest.param([*GIVEN, "--tail", "2", "--sigma", "1"], "--tail: and --sigma say the same", id="tail-twice"),
        pytest.param([*GIVEN, "--mean-tokens", "0"], "--mean-tokens: 0 is no length", id="mean"),
        pytest.param([*GIVEN, "--max-tokens", "0"], "--max-tokens: 0 cuts every rollout", id="cap"),
        pytest.param([*GIVEN, "--acceptance", "0"], "--acceptance: 0 is outside", id="acceptance"),
        pytest.param([*GIVEN, "--tool-s", "-1"], "--tool-s: -1 is below zero", id="negative-time"),
        pytest.param([*GIVEN, "--group-size", "0"], "--group-size: 0 is", id="group-size"),
        pytest.param([*GIVEN, "--groups-per-step", "0"], "--groups-per-step: 0 is", id="groups-per-step"),
        pytest.param([*GIVEN, "--generators", "0"], "--generators: 0 is outside", id="generators"),
        pytest.param([*GIVEN, "--consumption", "0"], "--consumption: 0 is not a positive number", id="rate"),
        pytest.param([*GIVEN, "--queue", "0.5"], "--queue: 0.5 batches never hold", id="queue"),
        pytest.param([*GIVEN, "--queue-max", "-1"], "--queue-max: -1 is below zero", id="queue-max"),
        pytest.param([*GIVEN, "--queue", "2", "--staleness-budget", "1"], "are different rules", id="two-rules"),
        pytest.param([*GIVEN, "--queue", "2", "--gate", "all"], "--gate: compares budgets", id="no-budget"),
        pytest.param([*GIVEN, "--gate", "slurm"], "--gate: 'slurm' is none of", id="gate"),
        pytest.param([*GIVEN, "--compare", "budget=1"], "--compare: 'budget=1' is not name=value,value", id="compare-name"),
        pytest.param([*GIVEN, "--compare", "staleness_budget=a"], "has a value that is no int", id="compare-value"),
        pytest.param([*GIVEN, "--compare", "staleness_budget=-2"], "--staleness-budget: -2 is outside", id="compare-bad"),
        pytest.param([*GIVEN, "--compare", "seed=" + "1," * 70 + "1"], "--compare:", id="compare-unknown"),
        pytest.param([*GIVEN, "--compare", "concurrency=" + "64," * 70 + "64"], "makes more than 64 settings", id="compare-many"),
        pytest.param(["--preset", "nothing"], "--preset: 'nothing' is none of", id="preset"),
        pytest.param(["--preset", "tool-use", "--job", "x"], "--job: and --preset are two settings", id="two-sources"),
        pytest.param(["--job", "http://127.0.0.1:1/job-1"], "is the gateway running there?", id="nobody-there"),
        pytest.param(["--job", "ftp://x/y"], "--job: 'ftp://x/y' is not URL/ID", id="job-url"),
        pytest.param([*GIVEN, "--plot", "/no/such/directory/plan.png"], "--plot: /no/such/directory is no directory", id="plot"),
    ],
)
def test_bad_input_names_the_option_and_the_cure(arguments: list[str], message: str) -> None:
    found = plan(*arguments)
    assert found.exit_code == 2
    assert message in found.stderr
    assert found.stderr.startswith("rollway plan: --")
    assert found.stdout == ""


@pytest.mark.parametrize("text", ["", "1 two 3", "[1, [2, 3]]", "-1 2", "nan", '[{"a": 1}]'])
def test_a_file_that_holds_no_lengths(tmp_path: Path, text: str) -> None:
    (tmp_path / "lengths").write_text(text)
    found = plan(*GIVEN, "--lengths", str(tmp_path / "lengths"))
    assert found.exit_code == 2
    assert "--lengths" in found.stderr


def test_rates_that_are_exactly_equal() -> None:
    found = plan(
        "--concurrency", "128", "--production", "1", "--consumption", "1", "--queue", "3", "--groups", "1000", "--groups-per-step", "16"
    )
    assert found.exit_code == 0, found.output
    assert "Rates are exactly equal" in found.stdout


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    found = plan(*GIVEN, "--plot", str(tmp_path / "plan.png"))
    assert found.exit_code == 0, found.output
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------------------------------ live jobs

JOB = {
    "job_id": "j1",
    "spec": {
        "generators": ["http://127.0.0.1:30000", "http://127.0.0.1:30001"],
        "group_size": 8,
        "groups_per_step": 16,
        "steps_per_version": 1,
        "staleness_budget": 4,
        "max_requeues": 2,
        "stale_policy": "requeue",
        "max_in_flight_rollouts": 256,
        "queue_groups": 64,
        "zero_variance": "drop",
        "sandbox": {"cpus": 2.0},
    },
}
THROUGHPUT: dict[str, Any] = {
    "window_s": 600.0,
    "generated_samples_per_s": 1.28,
    "accepted_samples_per_s": 1.15,
    "consumed_samples_per_s": 1.15,
    "consumption_samples_per_s": 1.6,
    "rho": 0.72,
    "wait_fraction": 0.28,
    "in_flight_rollouts": 129,
    "queue_groups": 3.0,
    "capacity_groups": 80,
    "staleness": {"mean": 2.1, "p50": 2, "p95": 4, "max": 4, "pre_queue_mean": 1.4, "in_queue_mean": 0.7},
    "time_s": {"queue": 1.0, "sandbox": 2.0, "generate": 80.0, "tool": 15.0, "verify": 3.0},
    "acceptance": 0.9,
    "zero_variance_share": 0.1,
    "tail_multiplier": 1.6,
    "mean_latency_s": 101.0,
    "gated_share": 0.0,
    "limited_by": "generator",
    "bottleneck": "generation: 72 % of what the trainer could take",
}


@contextmanager
def gateway(answers: dict[str, Any]) -> Iterator[tuple[str, list[str | None]]]:
    """A gateway that answers GET by path, and the keys it was shown."""
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization"))
            answer = answers.get(self.path)
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", keys
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_plan_of_a_running_job() -> None:
    with gateway({"/v1/jobs/j1": JOB, "/v1/jobs/j1/throughput": THROUGHPUT}) as (url, keys):
        found = planned("--job", f"{url}/j1", "--key", "k", "--groups", "1000")
        missing = plan("--job", f"{url}/v1/jobs/j2", "--key", "k")
    assert keys == ["Bearer k"] * 3
    assert found["forms"]["accepted"] == pytest.approx(1.15, rel=0.05)
    assert found["simulated"]["wait_share"] == pytest.approx(0.28, abs=0.05)
    assert found["measured"] == {"trainer waits": 0.28, "staleness, mean": 2.1}
    assert found["sizes"]["vcpus"] == 256
    assert "the job says: generation" in found["about"][0]
    assert missing.exit_code == 2
    assert "answered 404; is the id right" in missing.stderr


def test_figures_that_a_job_does_not_have_yet_are_named() -> None:
    young = THROUGHPUT | {"consumption_samples_per_s": None, "zero_variance_share": None}
    with pytest.raises(PlanError, match=r"has no consumption_samples_per_s, zero_variance_share yet; wait until"):
        read_live(JOB, young)
    with pytest.raises(PlanError, match="stands still"):
        read_live(JOB, THROUGHPUT | {"generated_samples_per_s": 0.0})
    with pytest.raises(PlanError, match="leaves no time to generate"):
        read_live(JOB, THROUGHPUT | {"time_s": {"queue": 50.0, "tool": 60.0}})


def test_a_job_without_some_of_the_times_is_planned_by_its_latency() -> None:
    bare = THROUGHPUT | {"time_s": {"sandbox": None}, "mean_latency_s": None, "staleness": None, "wait_fraction": None, "bottleneck": None}
    live = read_live(JOB, bare)
    assert live.options.setting().times.mean_s == pytest.approx(129 / 1.28)
    assert live.staleness is None


def test_what_may_be_in_flight_is_the_bound_of_who_holds_it_back() -> None:
    held_by_workers = read_live(JOB, THROUGHPUT).options.concurrency
    held_by_the_gate = read_live(JOB, THROUGHPUT | {"gated_share": 0.8}).options.concurrency
    seen_by_what_is_out = read_live(JOB, THROUGHPUT | {"gated_share": None, "queue_groups": 60}).options.concurrency
    assert (held_by_workers, held_by_the_gate, seen_by_what_is_out) == (128, 256, 256)


def test_the_tail_of_a_job_is_that_of_its_working_time() -> None:
    setting = read_live(JOB, THROUGHPUT).options.setting()
    assert setting.times.tail == pytest.approx(THROUGHPUT["tail_multiplier"], abs=0.01)
    assert read_live(JOB, THROUGHPUT | {"tail_multiplier": 50.0}).options.sigma == pytest.approx(3.0)


def test_what_staleness_turned_away_is_simulated_and_not_filtered() -> None:
    assert read_live(JOB, THROUGHPUT | {"acceptance": 0.4}).options.acceptance == pytest.approx(0.9)
    keeping = JOB | {"spec": JOB["spec"] | {"zero_variance": "keep"}}  # type: ignore[operator]
    assert read_live(keeping, THROUGHPUT | {"acceptance": 0.4, "zero_variance_share": None}).options.acceptance == 1.0


def test_the_report_that_is_read_is_the_one_that_the_service_gives() -> None:
    assert THROUGHPUT.keys() <= ThroughputAnswer.model_fields.keys()
    assert {*NEEDED, "time_s", "mean_latency_s", "capacity_groups", "queue_groups", "gated_share"} <= ThroughputAnswer.model_fields.keys()
    assert {"generators", "group_size", "max_in_flight_rollouts", "queue_groups", "zero_variance"} <= JobSpec.model_fields.keys()


@pytest.mark.parametrize(
    ("job", "url"),
    [
        ("j1", "http://127.0.0.1:8000/v1/jobs/j1"),
        ("https://gate.example/j1", "https://gate.example/v1/jobs/j1"),
        ("https://gate.example/base/v1/jobs/j1/", "https://gate.example/base/v1/jobs/j1"),
    ],
)
def test_where_a_job_is(job: str, url: str) -> None:
    assert job_urls(job) == (url, f"{url}/throughput")
