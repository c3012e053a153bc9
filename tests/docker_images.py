"""Images made for one test: from a few files, or from the tests' image with something changed."""

import io
import struct
import tarfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from sandboxes.docker_engine import Engine
from tests.sandbox_backends import IMAGE, docker_host


@asynccontextmanager
async def own_engine() -> AsyncIterator[Engine]:
    engine = Engine(docker_host(), answer_s=30)
    try:
        yield engine
    finally:
        await engine.aclose()


@asynccontextmanager
async def image_of(files: Mapping[str, bytes], *, changes: Sequence[str] = ()) -> AsyncIterator[str]:
    """An image that holds these files and nothing else."""
    name = f"rollway-test-{uuid.uuid4().hex[:8]}"
    params = {"fromSrc": "-", "repo": name, "tag": "1", **({"changes": "\n".join(changes)} if changes else {})}
    async with own_engine() as engine:
        async with engine.asked("import") as docker:
            headers = {"Content-Type": "application/x-tar"}
            async with docker._query("images/create", "POST", params=params, data=_packed(files), headers=headers) as response:
                assert '"error"' not in await response.text()
        try:
            yield f"{name}:1"
        finally:
            await engine.call("remove", "DELETE", f"images/{name}:1", params={"force": "1"})


@asynccontextmanager
async def changed_image(*changes: str) -> AsyncIterator[str]:
    """The tests' image with instructions of a Dockerfile applied."""
    name = f"rollway-test-{uuid.uuid4().hex[:8]}"
    async with own_engine() as engine:
        made = await engine.call("create", "POST", "containers/create", body={"Image": IMAGE, "Cmd": ["true"]})
        try:
            params = {"container": made["Id"], "repo": name, "tag": "1", "changes": "\n".join(changes)}
            await engine.call("commit", "POST", "commit", params=params, body={})
        finally:
            await engine.call("remove", "DELETE", f"containers/{made['Id']}", params={"force": "1"})
        try:
            yield f"{name}:1"
        finally:
            await engine.call("remove", "DELETE", f"images/{name}:1", params={"force": "1"})


def tiny_program(text: bytes, code: int) -> bytes:
    """A whole x86_64 program of a few bytes that prints `text` and exits with `code`: it needs no libc and no loader."""
    base, head = 0x400000, 64 + 56
    message = base + head + 34
    instructions = b"\xbf" + struct.pack("<I", 1) + b"\xbe" + struct.pack("<I", message) + b"\xba" + struct.pack("<I", len(text))
    instructions += b"\xb8" + struct.pack("<I", 1) + b"\x0f\x05"
    instructions += b"\xbf" + struct.pack("<I", code) + b"\xb8" + struct.pack("<I", 60) + b"\x0f\x05"
    assert len(instructions) == 34
    body = instructions + text
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = ident + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, base + head, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, head + len(body), head + len(body), 0x1000)
    return header + segment + body


def _packed(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.mode, entry.size = 0o755, len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
