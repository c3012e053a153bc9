"""Named places at which a test has this process killed, as a power cut would: `ROLLWAY_TEST_CRASH_POINT="before observed"`. A place is
`before` or `after` a step that the store is told of: an entry of the journal by its tag, `lease` or `finish`. Without the variable nothing
is looked at.
"""

import os
import signal

import msgspec

VARIABLE = "ROLLWAY_TEST_CRASH_POINT"

_point = os.environ.get(VARIABLE)


def reached(moment: str, *steps: str | msgspec.Struct) -> None:
    """Does not return where one of these is the place."""
    if _point is None:
        return
    for step in steps:
        name = step if isinstance(step, str) else step.__struct_config__.tag
        if f"{moment} {name}" == _point:
            os.kill(os.getpid(), signal.SIGKILL)
