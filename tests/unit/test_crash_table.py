"""workers/CRASHES.md names tests: each is there."""

import re
from pathlib import Path

import pytest

from service.journal import AnyEntry
from service.store import LUA, SHARED
from tests.e2e.doomed import GATEWAYS, LOSERS, WORKERS

TESTS = Path(__file__).parent.parent
TABLE = (TESTS.parent / "workers" / "CRASHES.md").read_text()
ASIDE = {"window", "steer"}
"""They move no group and no rollout: one reads rates, the other decides on a cap, again where nobody did lately."""
OF_GENERATORS = {file.stem for file in LUA.glob("weights_*.lua")}
STEPS = {file.stem for file in LUA.glob("*.lua")} - {*SHARED, *ASIDE, *OF_GENERATORS, "append"}
"""What changes jobs, groups and rollouts, in one step each; appends by what is appended."""
SHOWN = re.findall(r"`((?:unit|contract|integration|e2e)/\w+\.py)?(?:::(\w+))?`", TABLE)


def named() -> list[tuple[str, str]]:
    """(file, test); a test without a file is in the file named before it."""
    found, file = [], ""
    for given, test in SHOWN:
        file = given or file
        if file and (given or test):
            found.append((file, test))
    return found


@pytest.mark.parametrize(("file", "test"), named())
def test_a_named_test_is_there(file: str, test: str) -> None:
    assert not test or f"def {test}(" in (TESTS / file).read_text()


def test_every_entry_of_a_journal_is_in_the_table() -> None:
    kinds = {kind.__name__ for kind in AnyEntry.__args__}
    assert {kind for kind in kinds if f"`{kind}`" not in TABLE} == set()


def test_every_step_of_the_store_is_in_the_table() -> None:
    assert {step for step in STEPS if f"`{step}`" not in TABLE} == set()


def test_a_process_is_killed_before_and_after_every_step_of_the_table() -> None:
    entries = {kind.__struct_config__.tag for kind in AnyEntry.__args__}
    assert sorted((*WORKERS, *LOSERS, *GATEWAYS)) == sorted(entries | STEPS)
