"""An engine that is away for a while: what ran goes on and is told once, what is asked for meanwhile waits."""

import asyncio
from pathlib import Path

import pytest

from sandboxes.base import SandboxError
from sandboxes.channel_attachment import Patience
from tests.contract.test_docker_faults import LossyRoad, lossy, only
from tests.sandbox_backends import IMAGE, bash, has_engine, make, named, spec

pytestmark = [pytest.mark.docker, pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}"), pytest.mark.timeout(60)]

AWAY_S = 4.0
"""Longer than all tries of a start, and of a call's connection, one after the other."""


async def away(road: LossyRoad, socket: Path) -> None:
    """Nobody listens there, and nobody is connected, for AWAY_S."""
    hidden = socket.with_suffix(".hidden")
    socket.rename(hidden)
    await road.aclose()
    await asyncio.sleep(AWAY_S)
    hidden.rename(socket)


async def test_a_call_outlives_an_engine_that_goes_away(tmp_path: Path) -> None:
    async with lossy(tmp_path) as (road, backend):
        sandbox = await backend.create(spec(), name=named())
        call = asyncio.create_task(bash(sandbox, "echo x >> /work/log; sleep 1; wc -l < /work/log"))
        await asyncio.sleep(0.3)
        await away(road, tmp_path / "lossy.sock")
        assert (await call).stdout == b"1\n"
        assert (await bash(sandbox, "cat /work/log")).stdout == b"x\n"
        await sandbox.destroy()


async def test_what_is_asked_for_meanwhile_waits(tmp_path: Path) -> None:
    async with lossy(tmp_path) as (road, backend):
        old, name = await backend.create(spec(), name=named()), named()
        await old.detach()
        outage = asyncio.create_task(away(road, tmp_path / "lossy.sock"))
        await asyncio.sleep(0.2)
        new, again = await asyncio.gather(backend.create(spec(), name=name), backend.attach(old.id, boot_id=old.boot_id))
        await outage
        assert await only(backend, name) == [new.id]
        assert (await bash(again, "echo there")).stdout == b"there\n"
        await asyncio.gather(new.destroy(), again.destroy())


async def test_an_engine_that_stays_away_is_told(tmp_path: Path) -> None:
    async with make("docker", tmp_path), lossy(tmp_path, patience=Patience(reconnect_s=1.0)) as (_, backend):
        (tmp_path / "lossy.sock").unlink()
        for asked in (backend.create(spec(), name=named()), backend.attach("gone")):
            with pytest.raises(SandboxError, match="cannot be reached"):
                await asked
