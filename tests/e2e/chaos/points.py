"""The crash points, as the code has them."""

from typing import get_args

from service.journal import AnyEntry


def points() -> dict[str, list[str]]:
    tags = [kind.__struct_config__.tag for kind in get_args(AnyEntry)]
    return {
        "worker": ["after take", "before finish", "after finish", *(f"{moment} {tag}" for tag in tags for moment in ("before", "after"))]
    }
