"""Images: at most one pull in flight for each, whoever waits for it."""

import asyncio
import logging

from sandboxes.base import SandboxSpecError, SandboxStartError
from sandboxes.docker_config import ImageFacts
from sandboxes.docker_engine import Engine, EngineError

logger = logging.getLogger(__name__)

PULL_S = 1800.0
"""Budget of one pull; who waits for it has a budget of its own."""
_PULL_TRIES = 3
_UNKNOWN = ("not found", "manifest unknown", "pull access denied", "does not exist", "invalid reference format", "repository name must")


class Images:
    """The engine's images. `busy_pause_s` is waited after a 429, longer each time: the engine does not hand Retry-After on."""

    def __init__(self, engine: Engine, *, busy_pause_s: float = 3.0) -> None:
        self._busy_pause_s = busy_pause_s
        self._engine = engine
        self._pulls: dict[str, asyncio.Task[None]] = {}

    async def facts(self, image: str) -> ImageFacts | None:
        """What the image brings; None where the engine does not have it."""
        try:
            found = await self._engine.call(f"inspect image {image}", "GET", f"images/{image}/json")
        except EngineError as error:
            if error.status in (400, 404):
                return None
            raise
        config = found["Config"] or {}
        env = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
        volumes = tuple(config.get("Volumes") or ())
        return ImageFacts(env=env, user=config.get("User") or "", labels=config.get("Labels") or {}, volumes=volumes)

    async def references(self) -> frozenset[str]:
        """Tags and digests of every image that the engine has."""
        async with self._engine.asked("list images") as docker:
            found = await docker.images.list()
        return frozenset(name for each in found for key in ("RepoTags", "RepoDigests") for name in each.get(key) or ())

    async def ensure(self, image: str) -> ImageFacts:
        """What the image brings, after a pull where the engine does not have it.

        Raises:
            SandboxSpecError: no registry knows it.
            SandboxStartError: the registry did not give it.
        """
        found = await self.facts(image)
        if found is not None:
            return found
        if image not in self._pulls:
            task = asyncio.create_task(self._pull(image))
            self._pulls[image] = task
            task.add_done_callback(lambda _: self._pulls.pop(image, None))
        await asyncio.shield(self._pulls[image])
        found = await self.facts(image)
        if found is None:
            raise SandboxStartError(f"image {image!r} was pulled and is gone again: pin it on the engine's machine")
        return found

    async def aclose(self) -> None:
        pulls = list(self._pulls.values())
        for task in pulls:
            task.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)

    async def _pull(self, image: str) -> None:
        for attempt in range(1, _PULL_TRIES + 1):
            try:
                logger.info("pulling %s", image)
                async with self._engine.asked(f"pull {image}", within_s=PULL_S) as docker:
                    await docker.images.pull(image)
                return
            except EngineError as error:
                if error.status == 404 or any(words in str(error).lower() for words in _UNKNOWN):
                    raise SandboxSpecError(_unknown(image, error)) from error
                busy = error.status == 429 or "toomanyrequests" in str(error).lower()
                if attempt == _PULL_TRIES or not busy:
                    raise SandboxStartError(_unknown(image, error)) from error
                await asyncio.sleep(self._busy_pause_s * attempt)


def _unknown(image: str, error: EngineError) -> str:
    cure = "make it with deploy/sandbox-image" if image.startswith("rollway-sandbox:") else f"`docker pull {image}` on the engine's machine"
    return f"image {image!r} is not on the engine and could not be pulled ({error}); cure: {cure}"
