"""`python -m workers.inventory [--destroy]`: this deployment's sandboxes, one JSON object a line; with `--destroy`, their end."""

import asyncio
import sys
from contextlib import AsyncExitStack

import orjson

from service.settings import Settings
from service.store import open_store
from workers.__main__ import open_backends


async def inventory(settings: Settings, *, destroy: bool) -> list[dict[str, object]]:
    """Every sandbox of this deployment, from every backend that answers here. Without ROLLWAY_DEPLOYMENT_ID the store is asked for it."""
    found: list[dict[str, object]] = []
    async with AsyncExitStack() as stack:
        deployment_id = settings.deployment_id or await (await stack.enter_async_context(open_store(settings))).deployment_id()
        for backend in (await open_backends(settings, deployment_id, stack)).values():
            boxes = await backend.list()
            found += [{"backend": backend.name, "name": box.name, "age_s": box.age_s, "alive": box.alive} for box in boxes]
            if destroy:
                await backend.sweep(keep=frozenset(), older_than_s=0.0)
    return found


def main() -> None:
    for box in asyncio.run(inventory(Settings(), destroy="--destroy" in sys.argv[1:])):
        sys.stdout.write(orjson.dumps(box).decode() + "\n")


if __name__ == "__main__":
    main()
