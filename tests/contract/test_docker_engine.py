"""The docker backend against an engine that is slow, busy or broken in ways a real one cannot be asked to be."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from sandboxes.base import SandboxError, SandboxLostError, SandboxSpec, SandboxSpecError, SandboxStartError
from sandboxes.docker import DockerBackend
from tests.sandbox_backends import bash, make, named, spec

DEPLOYMENT = "fake"


class FakeEngine:
    """Images and removals of the Engine API. `refusals` are the answers of the first pulls: (status, message)."""

    def __init__(
        self,
        *,
        refusals: list[tuple[int, str]] | None = None,
        remove_failures: int = 0,
        create_refusal: tuple[int, str] = (500, "the disk of the engine is gone"),
    ) -> None:
        self.refusals = refusals or []
        self.create_refusal = create_refusal
        self.remove_failures = remove_failures
        self.images: set[str] = set()
        self.registry_answers = asyncio.Event()
        self.registry_answers.set()
        self.pulls = 0
        self.pulling = 0
        self.most_pulling = 0
        self.removals = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/version", self._version)
        app.router.add_get("/{api}/images/{name}/json", self._image)
        app.router.add_post("/{api}/images/create", self._pull)
        app.router.add_post("/{api}/containers/create", self._create)
        app.router.add_get("/{api}/containers/json", self._list)
        app.router.add_get("/{api}/containers/{id}/json", self._missing)
        app.router.add_delete("/{api}/containers/{id}", self._remove)
        return app

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.41"})

    async def _image(self, request: web.Request) -> web.Response:
        if request.match_info["name"] in self.images:
            return web.json_response({"Config": {"Env": ["PATH=/opt/bin:/bin"]}})
        return web.json_response({"message": "No such image"}, status=404)

    async def _pull(self, request: web.Request) -> web.Response:
        self.pulls += 1
        self.pulling += 1
        self.most_pulling = max(self.most_pulling, self.pulling)
        await asyncio.sleep(0.1)
        await self.registry_answers.wait()
        self.pulling -= 1
        if self.refusals:
            status, message = self.refusals.pop(0)
            return web.json_response({"message": message}, status=status)
        self.images.add(f"{request.query['fromImage']}")
        return web.json_response({"status": "done"})

    async def _create(self, _: web.Request) -> web.Response:
        status, message = self.create_refusal
        return web.json_response({"message": message}, status=status)

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response([{"Id": "c1", "Names": ["/c1"], "Labels": {}, "Created": 0, "State": "running"}])

    async def _missing(self, _: web.Request) -> web.Response:
        return web.json_response({"message": "No such container"}, status=404)

    async def _remove(self, _: web.Request) -> web.Response:
        self.removals += 1
        if self.removals <= self.remove_failures:
            return web.json_response({"message": "driver is busy"}, status=500)
        return web.json_response({"message": "No such container"}, status=404)


@asynccontextmanager
async def backend_for(engine: FakeEngine, folder: Path, *, max_starting: int = 200) -> AsyncIterator[DockerBackend]:
    runner = web.AppRunner(engine.app())
    await runner.setup()
    path = folder / "engine.sock"
    await web.UnixSite(runner, str(path)).start()
    try:
        host = f"unix://{path}"
        async with DockerBackend(deployment_id=DEPLOYMENT, docker_host=host, max_starting=max_starting, busy_pause_s=0.05) as backend:
            yield backend
    finally:
        await runner.cleanup()


async def failures(backend: DockerBackend, image: str, starts: int) -> list[BaseException]:
    """What so many starts at once from `image` raise; the fake makes no container, so that each must fail."""
    creates = (backend.create(SandboxSpec(image=image), name=f"n{n}") for n in range(starts))
    return [result for result in await asyncio.gather(*creates, return_exceptions=True) if isinstance(result, BaseException)]


async def test_two_hundred_starts_make_one_pull(tmp_path: Path) -> None:
    engine = FakeEngine(refusals=[(429, "toomanyrequests: slow down")] * 2)
    async with backend_for(engine, tmp_path) as backend:
        raised = await failures(backend, "new:1", 200)
    assert (engine.pulls, engine.most_pulling) == (3, 1), "case-040"
    assert len(raised) == 200
    assert all("disk of the engine" in str(error) for error in raised), "past the pull, each failed at the fake's create"


async def test_a_slow_pull_holds_up_no_other_image(tmp_path: Path) -> None:
    """case-040"""
    engine = FakeEngine()
    engine.images.add("here:1")
    engine.registry_answers.clear()
    async with backend_for(engine, tmp_path, max_starting=2) as backend:
        waiting = asyncio.create_task(failures(backend, "new:1", 10))
        while not engine.pulling:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            assert len(await failures(backend, "here:1", 3)) == 3
        assert not waiting.done()
        engine.registry_answers.set()
        assert len(await waiting) == 10
    assert engine.pulls == 1


@pytest.mark.parametrize(
    ("refusal", "kind", "pulls"),
    [
        pytest.param((404, "pull access denied for new, repository does not exist"), SandboxSpecError, 1, id="unknown"),
        pytest.param((500, "manifest unknown"), SandboxSpecError, 1, id="unknown-tag"),
        pytest.param((500, "Get https://registry/v2/: dial tcp: no route to host"), SandboxStartError, 1, id="registry-away"),
        pytest.param((429, "toomanyrequests"), SandboxStartError, 3, id="case-040-registry-stays-busy"),
    ],
)
async def test_a_pull_that_fails(tmp_path: Path, refusal: tuple[int, str], kind: type[SandboxError], pulls: int) -> None:
    engine = FakeEngine(refusals=[refusal] * 10)
    async with backend_for(engine, tmp_path) as backend:
        (raised,) = await failures(backend, "new:1", 1)
    assert type(raised) is kind
    assert "docker pull new:1" in str(raised)
    assert engine.pulls == pulls


@pytest.mark.parametrize(
    ("refusal", "cure"),
    [
        pytest.param(
            (400, "Range of CPUs is from 0.01 to 2.00, as there are only 2 CPUs available"), "sandbox.cpus to at most 2.00", id="cpus"
        ),
        pytest.param((400, "Unknown runtime specified runsc"), "sandbox.runtime", id="runtime"),
        pytest.param((400, 'exec: "bash": executable file not found in $PATH: unknown'), "an image must hold bash", id="no-bash"),
        pytest.param((400, "exec: stat /bin/bash: no such file or directory: unknown"), "an image must hold bash", id="no-path"),
        pytest.param((404, "network nosuch not found"), "nosuch not found", id="network"),
    ],
)
async def test_a_refused_start_names_what_to_change(tmp_path: Path, refusal: tuple[int, str], cure: str) -> None:
    engine = FakeEngine(create_refusal=refusal)
    engine.images.add("here:1")
    async with backend_for(engine, tmp_path) as backend:
        (raised,) = await failures(backend, "here:1", 1)
    assert type(raised) is SandboxSpecError
    assert cure in str(raised)
    assert ("bash and tar" in str(raised)) == ("bash" in cure)


async def test_removal_is_tried_again(tmp_path: Path) -> None:
    engine = FakeEngine(remove_failures=2)
    async with backend_for(engine, tmp_path) as backend:
        assert await backend.sweep(keep=frozenset(), older_than_s=0) == 1
    assert engine.removals == 3, "case-035"


async def test_an_engine_that_is_away() -> None:
    async with DockerBackend(deployment_id=DEPLOYMENT, docker_host="unix:///nowhere/docker.sock") as backend:
        with pytest.raises(SandboxError, match="ROLLWAY_DOCKER_HOST"):
            await backend.ping()
        with pytest.raises(SandboxStartError):
            await backend.create(SandboxSpec(image="i"), name="n1")


async def test_a_silent_engine(tmp_path: Path) -> None:
    """case-029: an engine that takes requests and never answers."""
    held: list[asyncio.StreamWriter] = []
    path = tmp_path / "silent.sock"
    async with await asyncio.start_unix_server(lambda _, writer: held.append(writer), path=path):
        async with DockerBackend(deployment_id=DEPLOYMENT, docker_host=f"unix://{path}", answer_s=1.0) as backend:
            began = time.monotonic()
            with pytest.raises(SandboxError, match="within 1 s"):
                await backend.attach("x")
            assert time.monotonic() - began < 8
        for writer in held:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in held), return_exceptions=True)


@pytest.mark.docker
async def test_a_sandbox_whose_shell_is_gone_is_lost_by_its_command(tmp_path: Path) -> None:
    """The runtime's own failure text is no command's output."""
    async with make("docker", tmp_path) as backend:
        sandbox = await backend.create(spec(), name=named())
        try:
            await bash(sandbox, "rm -f /bin/bash /usr/bin/bash")
            with pytest.raises(SandboxLostError, match="bash") as caught:
                await bash(sandbox, "echo still here")
            assert caught.value.by_command
        finally:
            await sandbox.destroy()
