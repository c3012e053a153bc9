"""The docker backend against an engine that is slow, busy or broken in ways a real one cannot be asked to be."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from sandboxes.base import SandboxError, SandboxSpec, SandboxSpecError, SandboxStartError
from sandboxes.channel_attachment import Patience
from sandboxes.docker import DockerBackend
from sandboxes.starting import StartLimits

DEPLOYMENT = "fake"


class FakeEngine:
    """Images, creates and removals of the Engine API; no container ever starts.

    `refusals` are the answers of the first pulls, `create_refusal` the answer to every create of a sandbox: (status, message). `quota`:
    whether its storage has quotas. `capable`: whether it lets a container have SYS_ADMIN.
    """

    def __init__(
        self,
        *,
        refusals: list[tuple[int, str]] | None = None,
        remove_failures: int = 0,
        create_refusal: tuple[int, str] = (500, "the disk of the engine is gone"),
        quota: bool = False,
        capable: bool = True,
        machine: str = "amd64",
    ) -> None:
        self.quota = quota
        self.capable = capable
        self.machine = machine
        self.created: list[dict[str, Any]] = []
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
        app.router.add_get("/{api}/version", self._version)
        app.router.add_get("/{api}/images/json", self._no_images)
        app.router.add_post("/{api}/containers/{id}/start", self._start)
        app.router.add_get("/{api}/images/{name}/json", self._image)
        app.router.add_post("/{api}/images/create", self._pull)
        app.router.add_post("/{api}/containers/create", self._create)
        app.router.add_get("/{api}/containers/json", self._list)
        app.router.add_get("/{api}/containers/{id}/json", self._missing)
        app.router.add_delete("/{api}/containers/{id}", self._remove)
        return app

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.41", "Arch": self.machine})

    async def _no_images(self, _: web.Request) -> web.Response:
        return web.json_response([])

    async def _start(self, _: web.Request) -> web.Response:
        return web.Response(status=204)

    async def _image(self, request: web.Request) -> web.Response:
        if request.match_info["name"] in self.images:
            return web.json_response({"Id": "sha256:1", "Config": {"Env": ["PATH=/opt/bin:/bin"]}})
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

    async def _create(self, request: web.Request) -> web.Response:
        config = await request.json()
        if "StorageOpt" in config["HostConfig"] and not self.quota:
            return web.json_response({"message": "--storage-opt is supported only for overlay over xfs with 'pquota'"}, status=500)
        if request.query["name"].startswith("rollway-probe-"):
            return web.json_response({"Id": "probe"}, status=201)
        self.created.append(config)
        if "SYS_ADMIN" in config["HostConfig"]["CapAdd"] and not self.capable:
            return web.json_response({"message": "authorization denied: capability SYS_ADMIN is not allowed"}, status=403)
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
        limits = StartLimits(max_starting=max_starting, starts_per_s=10_000, burst=1000)
        async with DockerBackend(deployment_id=DEPLOYMENT, docker_host=host, limits=limits, busy_pause_s=0.05) as backend:
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
    ],
)
async def test_a_refused_start_names_what_to_change(tmp_path: Path, refusal: tuple[int, str], cure: str) -> None:
    engine = FakeEngine(create_refusal=refusal)
    engine.images.add("here:1")
    async with backend_for(engine, tmp_path) as backend:
        (raised,) = await failures(backend, "here:1", 1)
    assert type(raised) is SandboxSpecError
    assert cure in str(raised)


async def test_quotas_are_used_where_the_storage_has_them(tmp_path: Path) -> None:
    sizes = []
    for quota in (False, True):
        engine = FakeEngine(quota=quota)
        engine.images.add("here:1")
        async with backend_for(engine, tmp_path) as backend:
            await failures(backend, "here:1", 1)
            assert (await backend.disk_limits()).startswith("quota: " if quota else "watch: ")
        sizes.append(engine.created[0]["HostConfig"].get("StorageOpt"))
    assert sizes == [None, {"size": "1024m"}]


async def test_an_engine_that_grants_no_capability_gives_the_network_itself(tmp_path: Path) -> None:
    engine = FakeEngine(capable=False)
    engine.images.add("here:1")
    async with backend_for(engine, tmp_path) as backend:
        await failures(backend, "here:1", 1)
    first, second = engine.created[0], engine.created[1]
    assert first["HostConfig"]["NetworkMode"].startswith("container:rollway-pause-")
    assert first["Cmd"] == ["--own-network"]
    assert (second["HostConfig"]["NetworkMode"], second["Cmd"], second["Hostname"]) == ("none", [], "sandbox")
    assert not {"SYS_ADMIN", "NET_ADMIN"} & set(second["HostConfig"]["CapAdd"])


async def test_a_processor_without_an_agent(tmp_path: Path) -> None:
    engine = FakeEngine(machine="s390x")
    engine.images.add("here:1")
    async with backend_for(engine, tmp_path) as backend:
        (raised,) = await failures(backend, "here:1", 1)
    assert "s390x" in str(raised)
    assert "aarch64, x86_64" in str(raised)


async def test_removal_is_tried_again(tmp_path: Path) -> None:
    engine = FakeEngine(remove_failures=2)
    async with backend_for(engine, tmp_path) as backend:
        assert await backend.sweep(keep=frozenset(), older_than_s=0) == 1
    assert engine.removals == 3, "case-035"


async def test_an_engine_that_is_away() -> None:
    patience = Patience(reconnect_s=0.5)
    async with DockerBackend(deployment_id=DEPLOYMENT, docker_host="unix:///nowhere/docker.sock", patience=patience) as backend:
        with pytest.raises(SandboxError, match="ROLLWAY_DOCKER_HOST"):
            await backend.ping()
        with pytest.raises(SandboxStartError):
            await backend.create(SandboxSpec(image="i"), name="n1")


async def test_a_silent_engine(tmp_path: Path) -> None:
    """case-029: an engine that takes requests and never answers."""
    held: list[asyncio.StreamWriter] = []
    path = tmp_path / "silent.sock"
    async with await asyncio.start_unix_server(lambda _, writer: held.append(writer), path=path):
        patience = Patience(reconnect_s=2.0)
        async with DockerBackend(deployment_id=DEPLOYMENT, docker_host=f"unix://{path}", answer_s=1.0, patience=patience) as backend:
            began = time.monotonic()
            with pytest.raises(SandboxError, match="within 1 s"):
                await backend.attach("x")
            assert time.monotonic() - began < 8
        for writer in held:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in held), return_exceptions=True)
