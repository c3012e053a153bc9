"""The stand-in at a given speed: turns of drawn length that go on where they were cut, and slots that are given out in order."""

import asyncio
import json
import math
from array import array
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from typer.testing import CliRunner

from service.cli import main
from service.errors import InvalidError
from service.standin import drawn_lengths, load_policy
from service.standin.engine import Engine, Running
from service.standin.sampler import Sampler
from tests.standin_stack import chatml, tiny_model

MANY = 2000
"""Draws: enough for a mean within 5 %."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_model(tmp_path_factory.mktemp("standin") / "tiny")


def prompt(model: Any, text: str, begun: list[int] | None = None) -> "array[int]":
    return array("i", chatml(model[0], [{"role": "user", "content": text}]) + (begun or []))


def lengths(model: Any, *, seed: int, tasks: int, mean: float = 300, sigma: float = 0.5) -> list[int]:
    speaker = Sampler(*model, drawn_lengths(mean, sigma), seed=seed)
    return [len(speaker.plan(prompt(model, f"task {n}"), {}, max_tokens=100_000).ids) for n in range(tasks)]


def test_lengths_have_the_given_mean_and_spread(model: Any) -> None:
    found = lengths(model, seed=1, tasks=MANY)
    assert fmean(found) == pytest.approx(300, rel=0.05)
    assert pstdev(math.log(length) for length in found) == pytest.approx(0.5, rel=0.1)


def test_a_seed_repeats_them_whatever_order_they_come_in(model: Any) -> None:
    speaker = Sampler(*model, drawn_lengths(300, 0.8), seed=3)
    backwards = [len(speaker.plan(prompt(model, f"task {n}"), {}, max_tokens=100_000).ids) for n in reversed(range(20))]
    assert lengths(model, seed=3, tasks=20, sigma=0.8) == backwards[::-1]
    assert lengths(model, seed=4, tasks=20, sigma=0.8) != backwards[::-1]


def test_without_a_sigma_all_are_alike(model: Any) -> None:
    assert set(lengths(model, seed=1, tasks=20, mean=64, sigma=0)) == {64}


def test_a_turn_that_was_cut_goes_on_to_its_own_length(model: Any) -> None:
    whole, same, other = (Sampler(*model, drawn_lengths(150, 0.2), seed=seed) for seed in (1, 1, 2))
    for task in map(str, range(10)):
        ids = whole.plan(prompt(model, task), {}, max_tokens=100_000).ids
        for cut in (20, 50, len(ids) - 1):  # past where it says its length
            begun = prompt(model, task, ids[:cut])
            assert ids[:cut] + same.plan(begun, {}, max_tokens=100_000).ids == ids
            assert cut + len(other.plan(begun, {}, max_tokens=100_000).ids) == len(ids)


@pytest.mark.parametrize("length", [{"mean": 0}, {"mean": 10, "sigma": -1}, {"sigma": 1}, {"mean": 10, "median": 9}])
def test_a_wrong_length_is_refused(tmp_path: Path, length: dict[str, float]) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"default": [[{"length": length}]]}))
    with pytest.raises(InvalidError, match=r"policy\.json"):
        load_policy(path)


async def test_slots_are_given_out_in_order() -> None:
    engine = Engine(label="1", tokens_per_s=5_000.0, max_running=2)
    ended: list[str] = []

    async def run(rid: str) -> Running:
        running = await engine.run(rid, 50)
        ended.append(rid)
        return running

    tasks = [asyncio.create_task(run(f"r{n}")) for n in range(6)]
    await asyncio.sleep(0)
    assert (list(engine.running), list(engine.waiting)) == (["r0", "r1"], ["r2", "r3", "r4", "r5"])
    assert all(running.over for running in await asyncio.gather(*tasks))
    assert ended == [f"r{n}" for n in range(6)]
    assert not engine.running
    assert not engine.waiting


async def test_who_waits_for_a_slot_can_be_aborted_and_comes_back_empty() -> None:
    engine = Engine(label="1", tokens_per_s=10.0, max_running=1)
    first, second = asyncio.create_task(engine.run("first", 1000)), asyncio.create_task(engine.run("second", 1000))
    await asyncio.sleep(0)
    engine.abort("second")
    running = await second
    assert (running.tokens, running.over) == (0, False)
    engine.abort("first")
    assert not (await first).over


async def test_a_pause_keeps_the_line() -> None:
    engine = Engine(label="1", tokens_per_s=5_000.0, max_running=1)
    tasks = [asyncio.create_task(engine.run(f"r{n}", 50)) for n in range(3)]
    await asyncio.sleep(0)
    await engine.pause("in_place")
    await asyncio.sleep(0.05)
    assert (list(engine.running), list(engine.waiting)) == (["r0"], ["r1", "r2"])
    engine.resume()
    assert all(running.over for running in await asyncio.gather(*tasks))


@pytest.mark.parametrize("options", [pytest.param((), id="neither"), pytest.param(("--policy", __file__, "--mean-tokens", "9"), id="both")])
def test_the_command_wants_either_a_policy_or_a_length(tmp_path: Path, options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["generator", "--tokenizer", str(tmp_path), *options])
    assert (result.exit_code, "--policy" in result.output, "--mean-tokens" in result.output) == (2, True, True)
