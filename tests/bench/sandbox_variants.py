"""The ways to reach a sandbox that are measured side by side: ours, the bare agent, docker-py's exec and aiodocker's."""

import asyncio
import io
import subprocess
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

import docker
from aiodocker import Docker
from aiodocker.containers import DockerContainer
from aiohttp import UnixConnector
from docker.models.containers import Container

from sandboxes.base import Sandbox, SandboxSpec
from sandboxes.docker import DockerBackend
from tests.bench.bare_client import BareClient

IMAGE = "rollway-sandbox:1"
OURS, BARE, DOCKER_PY, AIODOCKER = "ours", "bare agent", "docker-py", "aiodocker"
LABEL = "rollway.bench"
T = TypeVar("T")
CAP = 2 << 20
STARTS = 4
"""At once: twice the cores, past which nothing is gained (here: of 2)."""
SPEC = SandboxSpec(image=IMAGE, memory_mib=256, pids=64, disk_mib=256)
_SOCKET = "/var/run/docker.sock"
_ANSWER_S = 300
"""200 execs at once keep an engine busy for many seconds."""


class Box(Protocol):
    """One sandbox by one way. `get` answers how many bytes the file had."""

    async def run(self, argv: Sequence[str]) -> bytes: ...
    async def put(self, path: str, content: bytes) -> None: ...
    async def get(self, path: str) -> int: ...


class OurBox:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(self, argv: Sequence[str]) -> bytes:
        return (await self._sandbox.exec(argv, timeout_s=60, max_output_bytes=CAP)).stdout

    async def put(self, path: str, content: bytes) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(content), 1 << 20):
                yield content[start : start + (1 << 20)]

        await self._sandbox.write_file(path, pieces())

    async def get(self, path: str) -> int:
        return sum([len(piece) async for piece in self._sandbox.read_file(path)])


class BareBox:
    def __init__(self, client: BareClient) -> None:
        self.client = client

    async def run(self, argv: Sequence[str]) -> bytes:
        return (await self.client.run(argv))[1]

    async def put(self, path: str, content: bytes) -> None:
        await self.client.put(path, content)

    async def get(self, path: str) -> int:
        return len(await self.client.get(path))


class DockerPyBox:
    """Each call in a thread of its own, as whoever uses this client with asyncio does."""

    def __init__(self, container: Container, threads: ThreadPoolExecutor) -> None:
        self._container = container
        self._threads = threads

    async def run(self, argv: Sequence[str]) -> bytes:
        return await in_thread(self._threads, lambda: bytes(self._container.exec_run(list(argv), demux=True).output[0] or b""))

    async def put(self, path: str, content: bytes) -> None:
        await in_thread(self._threads, lambda: self._container.put_archive(str(PurePosixPath(path).parent), packed(path, content)))

    async def get(self, path: str) -> int:
        return await in_thread(self._threads, lambda: self._drain(path))

    def _drain(self, path: str) -> int:
        pieces, facts = self._container.get_archive(path)
        for _ in pieces:
            pass
        return int(facts["size"])


async def in_thread(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


class AiodockerBox:
    def __init__(self, container: DockerContainer) -> None:
        self._container = container

    async def run(self, argv: Sequence[str]) -> bytes:
        command = await self._container.exec(list(argv))
        printed = bytearray()
        async with command.start() as stream:
            while message := await stream.read_out():
                printed += message.data
        await command.inspect()  # the exit code
        return bytes(printed)

    async def put(self, path: str, content: bytes) -> None:
        await self._container.put_archive(str(PurePosixPath(path).parent), packed(path, content))

    async def get(self, path: str) -> int:
        archive = await self._container.get_archive(path)
        return archive.getmembers()[0].size


@lru_cache(maxsize=4)
def packed(path: str, content: bytes) -> bytes:
    """The tar that the engine's archive calls take; made once, so that it is nobody's cost."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo(PurePosixPath(path).name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


def build_bare_agent(folder: Path) -> Path:
    binary = folder / "bare_agent"
    command = ["musl-gcc", "-O2", "-static", "-s", "-o", str(binary), str(Path(__file__).with_name("bare_agent.c"))]
    subprocess.run(command, check=True)
    return binary


class Fleet:
    """Makes sandboxes of both kinds, ours and bare, and removes all of them on leaving, an interrupt included.

    The execs of docker-py and aiodocker run in the bare ones: whose container they enter makes no difference to them.
    """

    def __init__(self, bench_id: str, folder: Path) -> None:
        self.bench_id = bench_id
        self.backend = DockerBackend(deployment_id=bench_id, answer_s=_ANSWER_S)
        self.sync = docker.DockerClient(f"unix://{_SOCKET}", timeout=_ANSWER_S, max_pool_size=256)
        self._agent = build_bare_agent(folder)
        self.threads = ThreadPoolExecutor(max_workers=256)
        self._starting = asyncio.Semaphore(STARTS)
        self._count = 0
        self._pause = ""
        self.sandboxes: list[Sandbox] = []
        self._bare: list[tuple[str, BareClient]] = []

    async def __aenter__(self) -> "Fleet":
        self._connector = UnixConnector(_SOCKET, limit=0)
        self.engine = Docker("http://localhost", connector=self._connector)
        await self.backend.__aenter__()
        return self

    async def prepare(self) -> None:
        """The container whose network the bare ones share; without it none of them starts."""
        self._pause = await self._create_bare(["--pause"], "none")
        await self.engine.containers.container(self._pause).start()

    async def __aexit__(self, *error: object) -> None:
        for _, client in self._bare:
            client.close()
        await self.backend.sweep(keep=frozenset(), older_than_s=0)
        await self.backend.aclose()
        left = await self.engine.containers.list(all=True, filters={"label": [f"{LABEL}={self.bench_id}"]})
        await asyncio.gather(*(self.remove(container.id) for container in left))
        await self.engine.close()
        await self._connector.close()
        self.threads.shutdown()
        self.sync.close()

    async def grow(self, count: int) -> dict[str, list[Box]]:
        """At least `count` sandboxes of each kind; `count` boxes of each variant."""
        await asyncio.gather(*(self.one_of_ours() for _ in range(count - len(self.sandboxes))), *self._missing_bare(count))
        ids = [container_id for container_id, _ in self._bare[:count]]
        handles = await in_thread(self.threads, lambda: [self.sync.containers.get(container_id) for container_id in ids])
        return {
            OURS: [OurBox(sandbox) for sandbox in self.sandboxes[:count]],
            BARE: [BareBox(client) for _, client in self._bare[:count]],
            DOCKER_PY: [DockerPyBox(handle, self.threads) for handle in handles],
            AIODOCKER: [AiodockerBox(self.engine.containers.container(container_id)) for container_id in ids],
        }

    def _missing_bare(self, count: int) -> list[Awaitable[None]]:
        return [self._one_bare() for _ in range(count - len(self._bare))]

    @property
    def container_ids(self) -> list[str]:
        return [*(sandbox.id for sandbox in self.sandboxes), *(container_id for container_id, _ in self._bare)]

    async def one_of_ours(self) -> Sandbox:
        async with self._starting:
            sandbox = await self.backend.create(SPEC, name=self.name())
        self.sandboxes.append(sandbox)
        return sandbox

    async def _one_bare(self) -> None:
        async with self._starting:
            self._bare.append(await self.start_bare())

    async def start_bare(self) -> tuple[str, BareClient]:
        """The cheapest start there is: a pause container's network, attach, start; the caller waits for the first reply."""
        container_id = await self._create_bare([], f"container:{self._pause}")
        client = await BareClient.attach(container_id, _SOCKET)
        await self.engine.containers.container(container_id).start()
        return container_id, client

    async def _create_bare(self, arguments: list[str], network: str) -> str:
        config = self.bare_config() | {"Entrypoint": ["/bare"], "Cmd": arguments}
        config["HostConfig"]["NetworkMode"] = network
        return (await self.engine.containers.create(config, name=self.name())).id

    def bare_config(self) -> dict[str, Any]:
        return {
            "Image": IMAGE,
            "Labels": {LABEL: self.bench_id},
            "OpenStdin": True,
            "AttachStdin": True,
            "AttachStdout": True,
            "HostConfig": {
                "Binds": [f"{self._agent}:/bare:ro"],
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "Memory": SPEC.memory_mib << 20,
                "MemorySwap": SPEC.memory_mib << 20,
                "NanoCpus": int(SPEC.cpus * 1e9),
                "PidsLimit": SPEC.pids,
                "LogConfig": {"Type": "none"},
            },
        }

    def start_docker_py(self) -> Container:
        """Blocking: create and start as docker-py users do."""
        return self.sync.containers.run(
            IMAGE,
            ["sleep", "infinity"],
            detach=True,
            network_mode="none",
            labels={LABEL: self.bench_id},
            mem_limit=SPEC.memory_mib << 20,
            nano_cpus=int(SPEC.cpus * 1e9),
            pids_limit=SPEC.pids,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            log_config=docker.types.LogConfig(type="none"),
        )

    async def remove(self, container_id: str) -> None:
        async with self._starting:
            await self.engine.containers.container(container_id).delete(force=True)

    def name(self) -> str:
        self._count += 1
        return f"rw-{self.bench_id}-{self._count}-a1"
