"""The docker backend on a real engine whose answers get lost on the way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandboxes.base import SandboxError, SandboxLostError, SandboxStartError
from sandboxes.docker import DockerBackend
from tests.sandbox_backends import DEPLOYMENT, IMAGE, bash, docker_host, has_engine, make, named, spec

pytestmark = [pytest.mark.docker, pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}"), pytest.mark.timeout(60)]

ENGINE = (docker_host() or "unix:///var/run/docker.sock").removeprefix("unix://")


class LossyRoad:
    """Between a client and the engine. `lose`: requests with this in their first line are done, and their answers never arrive.

    silent: no answer arrives at all.
    """

    def __init__(self) -> None:
        self.lose: bytes | None = None
        self.lost = 0
        self.silent = False
        self._connections: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.create_task(self.connect(reader, writer)))

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_unix_connection(ENGINE)
        lost = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, engine_writer, lost))
                group.create_task(self._answers(engine_reader, writer, lost))
        except* OSError:
            pass
        finally:
            for each in (writer, engine_writer):
                each.transport.abort()
            await asyncio.gather(writer.wait_closed(), engine_writer.wait_closed(), return_exceptions=True)

    async def _requests(self, reader: asyncio.StreamReader, engine: asyncio.StreamWriter, lost: asyncio.Event) -> None:
        while data := await reader.read(65_536):
            if self.lose is not None and self.lose in data.partition(b"\r\n")[0]:
                lost.set()
            engine.write(data)
            await engine.drain()
        if engine.can_write_eof():
            engine.write_eof()

    async def _answers(self, engine: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: asyncio.Event) -> None:
        while data := await engine.read(65_536):
            if lost.is_set():
                self.lost += 1
                break
            if not self.silent:
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def lossy(folder: Path, *, answer_s: float = 10.0) -> AsyncIterator[tuple[LossyRoad, DockerBackend]]:
    road = LossyRoad()
    path = folder / "lossy.sock"
    async with await asyncio.start_unix_server(road.accept, path=path):
        try:
            async with DockerBackend(deployment_id=DEPLOYMENT, docker_host=f"unix://{path}", answer_s=answer_s) as backend:
                yield road, backend
        finally:
            await road.aclose()


async def test_case_036_a_create_whose_answer_is_lost_leaves_no_second_container(tmp_path: Path) -> None:
    name = named()
    async with make("docker", tmp_path) as backend, lossy(tmp_path) as (road, unlucky):
        road.lose = b"/containers/create"
        with pytest.raises(SandboxStartError):
            await unlucky.create(spec(), name=name)
        assert road.lost == 1
        assert name not in [info.name for info in await backend.list()], "what was made in vain is removed by its name"
        road.lose = None
        sandbox = await unlucky.create(spec(), name=name)
        assert [info.id for info in await backend.list() if info.name == name] == [sandbox.id]
        await sandbox.destroy()


async def test_case_065_a_lost_answer_to_a_command_is_no_observation(tmp_path: Path) -> None:
    """The command may have run: the caller starts the attempt again in a clean sandbox."""
    async with lossy(tmp_path) as (road, backend):
        sandbox = await backend.create(spec(), name=named())
        road.lose = b"/start"
        with pytest.raises(SandboxError) as caught:
            await bash(sandbox, "echo x >> /work/log")
        assert road.lost >= 1
        assert not isinstance(caught.value, SandboxLostError)
        road.lose = None
        assert await sandbox.poll()
        await sandbox.destroy()


async def test_case_029_an_engine_that_falls_silent_during_a_command(tmp_path: Path) -> None:
    async with make("docker", tmp_path) as well, lossy(tmp_path, answer_s=1.0) as (road, backend):
        sandbox = await backend.create(spec(), name=named())
        call = asyncio.create_task(bash(sandbox, "sleep 30", timeout_s=3))
        await asyncio.sleep(0.5)
        road.silent = True
        async with asyncio.timeout(8):
            with pytest.raises(SandboxError):
                await call
        await (await well.attach(sandbox.id)).destroy()
