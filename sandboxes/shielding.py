"""Work that must reach its end although its caller is cancelled: teardown that costs money, kills that others rely on."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; a cancellation that arrives meanwhile is raised after it has ended. `work` carries its own deadline."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    if cancelled is not None:
        task.exception()  # seen: the cancellation is what the caller is told
        raise cancelled
    return task.result()
