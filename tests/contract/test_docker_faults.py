"""The docker backend on a real engine, on a road that loses answers, cuts streams in the middle of a frame, or falls silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandboxes.base import SandboxError
from sandboxes.channel_attachment import Patience
from sandboxes.docker import DockerBackend
from tests.sandbox_backends import DEPLOYMENT, IMAGE, bash, docker_host, has_engine, make, named, spec

pytestmark = [pytest.mark.docker, pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}"), pytest.mark.timeout(60)]

ENGINE = (docker_host() or "unix:///var/run/docker.sock").removeprefix("unix://")


class LossyRoad:
    """Between a client and the engine. `lose`: requests with this in their first line are done, and their answers never arrive.

    exchange: in what is asked for, the second stands in place of the first, which is as long. cut_after: attach streams end after so
    many bytes from the engine; the number is used up by the first that does.
    """

    def __init__(self) -> None:
        self.lose: bytes | None = None
        self.lost = 0
        self.exchange: tuple[bytes, bytes] | None = None
        self.cut_after: int | None = None
        self.cuts = 0
        self.attached = 0
        self._silent: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def fall_silent(self) -> None:
        """Whatever is connected now gives nothing any more."""
        self._silent |= self._connections

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.connect(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_unix_connection(ENGINE)
        me = asyncio.current_task()
        assert me is not None
        first = await reader.read(65_536)
        lost = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(first, reader, engine_writer, lost))
                group.create_task(self._answers(engine_reader, writer, lost, attach=b"/attach?" in first, connection=me))
        except* OSError:
            pass
        finally:
            for each in (writer, engine_writer):
                each.transport.abort()
            await asyncio.gather(writer.wait_closed(), engine_writer.wait_closed(), return_exceptions=True)

    async def _requests(self, data: bytes, reader: asyncio.StreamReader, engine: asyncio.StreamWriter, lost: asyncio.Event) -> None:
        while data:
            if self.lose is not None and self.lose in data.partition(b"\r\n")[0]:
                lost.set()
            engine.write(data.replace(*self.exchange) if self.exchange else data)
            await engine.drain()
            data = await reader.read(65_536)
        if engine.can_write_eof():
            engine.write_eof()

    async def _answers(
        self,
        engine: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lost: asyncio.Event,
        *,
        attach: bool,
        connection: "asyncio.Task[None]",
    ) -> None:
        self.attached += attach
        while data := await engine.read(4096):
            if lost.is_set():
                self.lost += 1
                break
            if attach and self.cut_after is not None:
                self.cut_after -= len(data)
                if self.cut_after < 0:
                    writer.write(data[: self.cut_after])
                    await writer.drain()
                    self.cut_after, self.cuts = None, self.cuts + 1
                    break
            if connection not in self._silent:
                writer.write(data)
                await writer.drain()
        writer.transport.abort() if attach else writer.close()


@asynccontextmanager
async def lossy(folder: Path, *, answer_s: float = 10.0, patience: Patience = Patience()) -> AsyncIterator[tuple[LossyRoad, DockerBackend]]:
    road = LossyRoad()
    path = folder / "lossy.sock"
    async with await asyncio.start_unix_server(road.accept, path=path):
        try:
            host = f"unix://{path}"
            async with DockerBackend(deployment_id=DEPLOYMENT, docker_host=host, answer_s=answer_s, patience=patience) as backend:
                yield road, backend
        finally:
            await road.aclose()


async def only(backend: DockerBackend, name: str) -> list[str]:
    return [info.id for info in await backend.list() if info.name == name]


@pytest.mark.parametrize("request_line", [b"/containers/create", b"/start"])
async def test_case_036_a_lost_answer_to_a_start_leaves_no_second_container(tmp_path: Path, request_line: bytes) -> None:
    name = named()
    async with make("docker", tmp_path) as backend, lossy(tmp_path) as (road, unlucky):
        assert isinstance(backend, DockerBackend)
        await unlucky.disk_limits()
        road.lose = request_line
        with pytest.raises(SandboxError):
            await unlucky.create(spec(), name=name)
        assert road.lost >= 1
        assert await only(backend, name) == [], "what was made in vain is removed by its name"
        road.lose = None
        sandbox = await unlucky.create(spec(), name=name)
        assert await only(backend, name) == [sandbox.id]
        road.lose = b"DELETE "
        destroying = asyncio.create_task(sandbox.destroy())
        await asyncio.sleep(0.5)
        road.lose = None
        await destroying
        assert await only(backend, name) == []


async def test_a_lost_answer_to_a_rename(tmp_path: Path) -> None:
    async with make("docker", tmp_path) as backend, lossy(tmp_path) as (road, unlucky):
        assert isinstance(backend, DockerBackend)
        pooled, name = await unlucky.create(spec(), name=f"pool-{named()}"), named()
        await pooled.detach()
        road.lose = b"/rename"
        with pytest.raises(SandboxError):
            await unlucky.adopt(pooled, spec(), name=name)
        road.lose = None
        await pooled.destroy()
        assert await only(backend, name) == []


@pytest.mark.parametrize("cut_after", [10, 500, 70_000, 300_000], ids=lambda size: f"cut-{size}")
async def test_case_065_a_stream_that_is_cut_gives_the_same_result(tmp_path: Path, cut_after: int) -> None:
    """The command runs once, whatever becomes of the connection, and its output is whole."""
    async with lossy(tmp_path) as (road, backend):
        sandbox = await backend.create(spec(), name=named())
        attached, road.cut_after = road.attached, cut_after
        script = "echo x >> /work/log; sleep 0.3; head -c 400000 /dev/zero | tr '\\0' y"
        result = await bash(sandbox, script, cap=1_000_000)
        assert (road.cuts, road.attached) == (1, attached + 1)
        assert result.stdout == b"y" * 400_000
        assert (await bash(sandbox, "cat /work/log")).stdout == b"x\n"
        await sandbox.destroy()


async def test_files_over_a_stream_that_is_cut(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000
    async with lossy(tmp_path) as (road, backend):
        sandbox = await backend.create(spec(), name=named())
        road.cut_after = 200
        await sandbox.put({"/work/in": content})
        road.cut_after = 500_000
        assert content in await sandbox.get(["/work/in"], max_bytes=2_000_000)
        await sandbox.destroy()


async def test_case_029_a_road_that_falls_silent_during_a_command(tmp_path: Path) -> None:
    async with lossy(tmp_path, answer_s=2.0, patience=Patience(tick_s=0.5)) as (road, backend):
        sandbox = await backend.create(spec(), name=named())
        call = asyncio.create_task(bash(sandbox, "echo x >> /work/log; sleep 1; cat /work/log"))
        await asyncio.sleep(0.3)
        road.fall_silent()
        assert (await call).stdout == b"x\n"
        await sandbox.destroy()


async def test_an_engine_that_is_gone_for_good(tmp_path: Path) -> None:
    async with make("docker", tmp_path) as well, lossy(tmp_path, answer_s=1.0, patience=Patience(reconnect_s=2.0)) as (road, backend):
        sandbox = await backend.create(spec(), name=named())
        call = asyncio.create_task(bash(sandbox, "sleep 30"))
        await asyncio.sleep(0.3)
        road.lose, road.cut_after = b"HTTP", 0
        await (await well.attach(sandbox.id)).destroy()
        with pytest.raises(SandboxError):
            await call


async def test_an_agent_that_may_not_have_its_own_network_gets_the_engines(tmp_path: Path) -> None:
    """As on an engine whose policy takes the capability away without a word: the agent does not serve half-closed."""
    async with lossy(tmp_path) as (road, backend):
        road.exchange = (b'"SYS_ADMIN"', b'"NET_ADMIN"')
        sandbox = await backend.create(spec(), name=named())
        assert backend.limits.counts.retried == 1
        found = await bash(sandbox, "cut -d: -f1 /proc/net/dev | tail -n +3; cat /proc/sys/kernel/hostname; grep CapEff /proc/self/status")
        assert found.stdout.split() == [b"lo", b"sandbox", b"CapEff:", b"0" * 16]
        await sandbox.destroy()
