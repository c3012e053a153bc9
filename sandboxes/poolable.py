"""What a pool needs of a backend, and which sandboxes of it are alike."""

import dataclasses
from collections.abc import Hashable
from typing import Protocol

from sandboxes.base import Sandbox, SandboxBackend, SandboxSpec
from sandboxes.starting import StartLimits

_AT_CLAIM = frozenset({"files", "setup", "env", "labels", "start_s"})
"""What a claim applies, or what says nothing about the sandbox: every other field of the spec tells two kinds apart."""


class Poolable(Sandbox, Protocol):
    """A sandbox that says by itself that it lives."""

    async def ping(self) -> None:
        """Returns once its agent answers. Raises SandboxError."""
        ...


class PoolableBackend(SandboxBackend, Protocol):
    """A backend whose sandboxes can be started for nobody and given an owner later."""

    @property
    def limits(self) -> StartLimits: ...

    async def create(self, spec: SandboxSpec, *, name: str, fence: int = 0) -> Poolable: ...

    async def adopt(self, sandbox: Sandbox, spec: SandboxSpec, *, name: str, fence: int = 0) -> Sandbox:
        """Give `sandbox`, started from `bare(spec)`, its owner: rename it, take it under `fence`, apply environment, files and setup.

        The caller let go of `sandbox` by `detach`. A name that is taken is treated as in `create`; `start_seconds` of what is returned
        is what this took. When it fails or is cancelled, `sandbox.destroy` still removes it, under either name.

        Raises:
            SandboxSpecError: a setup command that fails: the message is the first error.
            SandboxError: anything else: the caller may start another one.
        """
        ...


def kind(spec: SandboxSpec) -> Hashable:
    """What two specs have in common when a warm sandbox of one serves the other."""
    return tuple(getattr(spec, each.name) for each in dataclasses.fields(spec) if each.name not in _AT_CLAIM)


def bare(spec: SandboxSpec, *, worker: str, max_age_s: float) -> SandboxSpec:
    """What a warm sandbox is started from. Its lifetime is longer by what it may have waited."""
    return SandboxSpec(
        **{each.name: getattr(spec, each.name) for each in dataclasses.fields(spec) if each.name not in (*_AT_CLAIM, "lifetime_s")},
        lifetime_s=spec.lifetime_s + max_age_s,
        labels={"pool": worker},
    )
