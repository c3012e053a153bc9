"""The agent's disk watch: what a sandbox writes counts, what its image held does not, and past the limit its calls end."""

import asyncio
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandboxes.frames import Ended, How, Kind, Run
from tests.contract.agent_root import FileCalls, archive, failure, needs_agent

pytestmark = [*needs_agent, pytest.mark.timeout(60)]

MIB = 2**20
DISK_MIB, INODES = 8, 300


@pytest_asyncio.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileCalls]:
    """A root whose image holds more than the limits."""
    (tmp_path / "image").mkdir()
    (tmp_path / "image/big").write_bytes(os.urandom(2 * DISK_MIB * MIB))
    for number in range(2 * INODES):
        (tmp_path / f"image/{number}").touch()
    await asyncio.sleep(0.05)  # older than the agent by more than a tick of the clock of file systems
    made = FileCalls(tmp_path)
    await made.start()
    await made.channel.configure(user="", workdir="/", env={}, disk_mib=DISK_MIB, inodes=INODES)
    yield made
    await made.stop()


async def held_open(packed: bytes, *, s: float = 1.5) -> AsyncIterator[bytes]:
    """An archive whose end comes only after a while: the call lives until then."""
    yield packed[:-1024]
    await asyncio.sleep(s)
    yield packed[-1024:]


async def until_it_ends(files: FileCalls, packed: bytes) -> AsyncIterator[bytes]:
    """An archive whose end never comes."""
    yield packed[:-1024]
    while (await files.channel.ping()).alive:
        await asyncio.sleep(0.05)


UNPACK = Run(kind=Kind.UNPACK, timeout_ms=20_000)


async def until_used(files: FileCalls, mib: float) -> None:
    while (await files.channel.ping()).disk_bytes < mib * MIB:
        await asyncio.sleep(0.05)


async def test_what_is_below_the_limit_is_counted_and_let_be(files: FileCalls) -> None:
    packed = archive([("new/a", tarfile.REGTYPE, os.urandom(6 * MIB))])
    call = asyncio.create_task(files.channel.run(UNPACK, stdin=held_open(packed)))
    await until_used(files, 6)
    result = await call
    assert failure(result) is None
    assert not result.flags & Ended.DISK_FULL
    pong = await files.channel.ping()
    assert 6 * MIB <= pong.disk_bytes < 7 * MIB
    assert pong.inodes < 10


async def test_hard_links_count_once(files: FileCalls) -> None:
    links = [(f"new/{number}", tarfile.LNKTYPE, "new/a") for number in range(20)]
    packed = archive([("new/a", tarfile.REGTYPE, os.urandom(6 * MIB)), *links])
    result = await files.channel.run(UNPACK, stdin=held_open(packed))
    assert failure(result) is None


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(archive([("new/a", tarfile.REGTYPE, os.urandom(12 * MIB))]), id="bytes"),
        pytest.param(archive([(f"new/{number}", tarfile.REGTYPE, b"") for number in range(400)]), id="inodes"),
        pytest.param(archive([("d/" * 300, tarfile.DIRTYPE, "")]), id="depth"),
    ],
)
async def test_past_the_limit_calls_end(files: FileCalls, packed: bytes) -> None:
    result = await files.channel.run(UNPACK, stdin=until_it_ends(files, packed))
    assert (result.how, result.flags & Ended.DISK_FULL) == (How.SIGNALLED, Ended.DISK_FULL)
    await files.channel.ping()


async def test_what_makes_room_is_let_run(files: FileCalls) -> None:
    packed = archive([("new/a", tarfile.REGTYPE, os.urandom(12 * MIB))])
    result = await files.channel.run(UNPACK, stdin=until_it_ends(files, packed))
    assert result.flags & Ended.DISK_FULL
    small = archive([("new/b", tarfile.REGTYPE, b"")])
    run = Run(kind=Kind.UNPACK, argv=["/new"], timeout_ms=20_000)
    result = await files.channel.run(run, stdin=held_open(small))
    assert failure(result) is None
    assert (await files.channel.ping()).disk_bytes < MIB
