"""One container as a `Line`: the way to its agent, its health, its removal, its snapshot."""

import asyncio
from collections.abc import Callable
from typing import Any

from sandboxes.docker_attach import AttachStream, attach
from sandboxes.docker_engine import Engine, EngineError
from sandboxes.docker_snapshots import Snapshots
from sandboxes.line import Connection, Health

_REMOVE_TRIES = 6
_REMOVE_PAUSE_S = 0.5
_FROM_OUTSIDE = frozenset({0, 137, 143, 255})
"""Exit codes of a first process that was stopped from outside; its own commands cannot signal it."""


class DockerLine:
    """A `Line` over one container."""

    def __init__(self, engine: Engine, container_id: str, *, deployment_id: str) -> None:
        self._engine = engine
        self._snapshots = Snapshots(engine, deployment_id=deployment_id)
        self._stream: AttachStream | None = None
        self._fresh = False
        self.id = container_id

    async def start(self) -> None:
        """Start what is created only, attached before, so that the agent's last words are known where it does not come to live.

        Raises:
            EngineError: the engine refused.
        """
        self._stream, self._fresh = await attach(self._engine, self.id), True
        await self._engine.call(f"start {self.id[:12]}", "POST", f"containers/{self.id}/start")

    async def connect(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> Connection:
        if self._stream is None or not self._fresh:
            self._stream = await self._attached_again()
        self._fresh = False
        self._stream.hand_over(received, lost)
        return self._stream

    async def _attached_again(self) -> AttachStream:
        """Attach, and then ask: the engine attaches to what is dead as well, and nothing ever comes. What dies later ends the stream."""
        stream, alive = await attach(self._engine, self.id), False
        try:
            health = await self.health()
            alive = health.alive
        finally:
            if not alive:
                stream.close()
        if not alive:
            raise EngineError(f"{self.id[:12]} is not running: {health.detail}", status=409)
        return stream

    def close(self) -> None:
        """Let go of the connection of the moment."""
        if self._stream is not None:
            self._stream.close()

    @property
    def last_words(self) -> str:
        """What the agent wrote to stderr on the connection of the moment."""
        return self._stream.said if self._stream is not None else ""

    async def exit_code(self) -> int | None:
        """Of its first process; None while it runs, or where the container is gone."""
        state = await self._state()
        return None if state is None or state["Running"] else int(state["ExitCode"])

    async def health(self) -> Health:
        state = await self._state()
        if state is None:
            return Health(present=False, alive=False, detail="no such container")
        alive = state["Running"]  # paused too
        by_itself = not alive and (state["OOMKilled"] or state["ExitCode"] not in _FROM_OUTSIDE)
        detail = f"{state['Status']}, exit code {state['ExitCode']}"
        return Health(present=True, alive=alive, paused=state["Paused"], by_itself=by_itself, detail=detail)

    async def _state(self) -> dict[str, Any] | None:
        """As the engine tells it; None where the container is gone."""
        try:
            found = await self._engine.call(f"inspect {self.id[:12]}", "GET", f"containers/{self.id}/json")
        except EngineError as error:
            if error.status != 404:
                raise
            return None
        return dict(found["State"])

    async def remove(self) -> None:
        """Force it away. 404 is the aim; 409 says that somebody else is at it; 5xx are tried again."""
        for attempt in range(1, _REMOVE_TRIES + 1):
            try:
                await self._engine.call(f"remove {self.id[:12]}", "DELETE", f"containers/{self.id}", params={"force": "true", "v": "true"})
            except EngineError as error:
                if error.status == 404:
                    return
                if attempt == _REMOVE_TRIES:
                    raise
                await asyncio.sleep(_REMOVE_PAUSE_S * attempt)
            else:
                return

    async def rename(self, name: str) -> None:
        await self._engine.call(f"rename {self.id[:12]} to {name}", "POST", f"containers/{self.id}/rename", params={"name": name})

    async def snapshot(self, ttl_s: float) -> str:
        return await self._snapshots.take(self.id, ttl_s=ttl_s)
