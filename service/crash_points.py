"""Named places at which a test has this process killed, as a power cut would: `ROLLWAY_TEST_CRASH_POINT="before observed"`. A place is
`before` or `after` a step that the store is told of: an entry of a journal by its tag, or one of `service/lua` by its name. Without the
variable nothing is looked at. `workers/CRASHES.md` says what each step leaves.
"""

import os
import signal
from functools import cache

import msgspec

VARIABLE = "ROLLWAY_TEST_CRASH_POINT"


@cache
def _point() -> str | None:
    return os.environ.get(VARIABLE)


def reached(moment: str, *steps: str | msgspec.Struct) -> None:
    """Does not return where one of these is the place."""
    if (point := _point()) is None:
        return
    for step in steps:
        name = step if isinstance(step, str) else step.__struct_config__.tag
        if f"{moment} {name}" == point:
            os.kill(os.getpid(), signal.SIGKILL)
