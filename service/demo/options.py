"""What a demo is asked to do."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

GROUPS = 24
"""Groups with the stand-in generator: a good number of tasks, and well under three minutes on two cores."""
SGLANG_GROUPS = 3
"""A 135M model on a CPU makes about 60 tokens a second."""


def _backend() -> str:
    return os.environ.get("ROLLWAY_DEMO_BACKEND", "docker")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """`groups`, `group_size`, `tokenizer`, `generator_url`: None means the default of the generator that is used.

    With `generator="sglang"` the URL and the model's directory come from ROLLWAY_DEMO_SGLANG_URL and ROLLWAY_DEMO_SGLANG_MODEL
    where they are not given. `keep` leaves the run's directory (logs, records, store) behind; it also stays when a check fails.
    """

    backend: str = field(default_factory=_backend)
    generator: Literal["standin", "sglang"] = "standin"
    generator_url: str | None = None
    tokenizer: Path | None = None
    groups: int | None = None
    group_size: int | None = None
    workers: int = 1
    json: bool = False
    seed: int = 0
    keep: bool = False
