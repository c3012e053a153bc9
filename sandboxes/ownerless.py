"""Which sandboxes a sweep removes. Pure."""

from collections.abc import Iterable

from sandboxes.base import SandboxInfo


def ownerless(
    found: Iterable[SandboxInfo], *, keep: frozenset[str], older_than_s: float, keep_prefixes: tuple[str, ...], only: frozenset[str] | None
) -> list[SandboxInfo]:
    """Those that nobody owns, as `SandboxBackend.sweep` says it."""
    return [
        info
        for info in found
        if info.age_s >= older_than_s
        and info.name not in keep
        and not info.name.startswith(keep_prefixes)
        and (only is None or info.name in only)
    ]
