"""`python -m workers.inventory`: this deployment's sandboxes; what `rollway sandbox` runs.

`ls [--json]` lists them with their owners. `cleanup [--yes] [--json]` removes what no live rollout or worker owns; with `--all`
everything of this deployment, snapshots too, and what sandboxes share on the engine where nothing uses it (unless `--keep-shared`). It
prints what it removed; its status is 1 when something stayed.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import orjson
from rich.console import Console
from rich.table import Table

from sandboxes.base import SandboxBackend, SandboxError
from sandboxes.docker import DockerBackend
from service.errors import RollwayError
from service.jobs import Jobs
from service.leases import Leases
from service.settings import Settings
from service.store import open_store
from workers.backends import open_backends
from workers.owners import Owner, live_owners

OLDER_THAN_S = 10.0
"""A cleanup leaves what is younger: its worker may be about to say that it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One sandbox. `state`: `live` (a live rollout or worker owns it), `orphan`, or `unknown` where the store was not asked."""

    backend: str
    name: str
    kind: str
    owner: str
    age_s: float
    alive: bool
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The backends that answer here, and what is in them."""

    deployment_id: str
    backends: dict[str, SandboxBackend]
    boxes: list[Box]


async def look(settings: Settings, stack: AsyncExitStack, *, ask_store: bool) -> Inventory:
    """Every sandbox of this deployment. Owners are asked after the list: what is claimed in between is not called ownerless.

    Raises:
        RollwayError: the store is away; without ROLLWAY_DEPLOYMENT_ID it is needed in any case.
        SandboxError: no backend answers here, or one does not any more.
    """
    store = await stack.enter_async_context(open_store(settings)) if ask_store or not settings.deployment_id else None
    deployment_id = settings.deployment_id or (await store.deployment_id() if store else "")
    backends = (await open_backends(settings, deployment_id, stack)).offered
    if not backends:
        raise SandboxError("no sandbox backend answers here, so what there is cannot be told")
    found = [(backend.name, info) for backend in backends.values() for info in await backend.list()]
    owners = None
    if store is not None:
        jobs, leases = Jobs(store, retain_s=settings.retain_s), Leases(store, lease_s=settings.lease_s, max_attempts=settings.max_attempts)
        owners = await live_owners(store, jobs, leases, deployment_id=deployment_id)
    boxes = []
    for backend, info in sorted(found, key=lambda each: each[1].name):
        owner = owners.of(info.name) if owners else Owner(kind="unknown", name="", live=False)
        state = "unknown" if owners is None else "live" if owner.live else "orphan"
        boxes.append(
            Box(backend=backend, name=info.name, kind=owner.kind, owner=owner.name, age_s=info.age_s, alive=info.alive, state=state)
        )
    return Inventory(deployment_id=deployment_id, backends=backends, boxes=boxes)


async def remove(inventory: Inventory, doomed: Sequence[Box]) -> list[Box]:
    """Remove these; those that are gone. Raises SandboxError."""
    names = frozenset(box.name for box in doomed)
    gone: list[Box] = []
    for backend in inventory.backends.values():
        await backend.sweep(keep=frozenset(), older_than_s=0.0, only=names)
        left = {info.name for info in await backend.list()}
        gone += [box for box in doomed if box.backend == backend.name and box.name not in left]
    return gone


async def remove_rest(inventory: Inventory, *, keep_shared: bool) -> None:
    """The deployment's snapshots, and what all sandboxes share on an engine; what is in use stays. Raises SandboxError."""
    for backend in inventory.backends.values():
        if isinstance(backend, DockerBackend):
            await backend.remove_snapshots()
            if not keep_shared:
                await backend.remove_shared()


def show(boxes: Sequence[Box], *, as_json: bool, none: str = "") -> None:
    """On stdout: one JSON object a line, or a table. `none`: what is said to a person where there are no boxes."""
    if as_json:
        sys.stdout.write("".join(orjson.dumps(asdict(box)).decode() + "\n" for box in boxes))
        return
    if not boxes:
        sys.stdout.write(f"{none}\n")
        return
    table = Table("backend", "name", "owner", "age", "alive", "state")
    for box in boxes:
        owner = f"{box.kind} {box.owner}".strip()
        table.add_row(box.backend, box.name, owner, f"{box.age_s:.0f} s", "yes" if box.alive else "no", box.state)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def confirmed(count: int) -> bool:
    """Whether the person at the terminal says yes; nobody there is a no."""
    if not sys.stdin.isatty():
        sys.stderr.write("nothing was removed: nobody can be asked here; pass --yes\n")
        return False
    return input(f"Remove these {count} sandboxes? [y/N] ").strip().lower() in ("y", "yes")


async def ls(settings: Settings, options: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        inventory = await look(settings, stack, ask_store=True)
        show(inventory.boxes, as_json=options.json, none=f"no sandboxes of deployment {inventory.deployment_id}")
    return 0


async def cleanup(settings: Settings, options: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        inventory = await look(settings, stack, ask_store=not options.all)
        doomed = [box for box in inventory.boxes if options.all or (box.state == "orphan" and box.age_s >= options.older_than)]
        if doomed and not options.yes:
            show(doomed, as_json=False)
            if not await asyncio.to_thread(confirmed, len(doomed)):
                return 1
        gone = await remove(inventory, doomed)
        if options.all:
            await remove_rest(inventory, keep_shared=options.keep_shared)
        show(gone, as_json=options.json, none=f"nothing of deployment {inventory.deployment_id} was removed")
    return 0 if len(gone) == len(doomed) else 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="rollway sandbox", description="this deployment's sandboxes")
    commands = made.add_subparsers(required=True)
    listing = commands.add_parser("ls", help="list them, with their owners")
    listing.set_defaults(run=ls)
    cleaning = commands.add_parser("cleanup", help="remove what no live rollout or worker owns")
    cleaning.set_defaults(run=cleanup)
    cleaning.add_argument("--older-than", type=float, default=OLDER_THAN_S, metavar="SECONDS", help="without --all: leave younger ones")
    cleaning.add_argument("--all", action="store_true", help="everything of this deployment, and what they share on the engine")
    cleaning.add_argument("--keep-shared", action="store_true", help="with --all: leave what they share")
    cleaning.add_argument("--yes", action="store_true", help="do not ask")
    for command in (listing, cleaning):
        command.add_argument("--json", action="store_true", help="one JSON object a line")
    return made


def main() -> None:
    options = parser().parse_args()
    try:
        sys.exit(asyncio.run(options.run(Settings(), options)))
    except (RollwayError, SandboxError) as error:
        sys.exit(f"rollway sandbox: {error}")


if __name__ == "__main__":
    main()
