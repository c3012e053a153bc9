"""What every sandbox backend promises of a sandbox's life: start, attach, loss, removal, sweep."""

import asyncio
import time
from pathlib import Path

import pytest

from sandboxes.base import Sandbox, SandboxBackend, SandboxLostError, SandboxSpecError, SandboxStartError
from tests.sandbox_backends import CAP, DEPLOYMENT, IMAGE, bash, count, make, named, spec

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]


async def test_attach_from_another_backend(kind: str, root: Path, live: Sandbox) -> None:
    await bash(live, "cd /tmp; y=2", session="shared")
    async with make(kind, root) as other:
        again = await other.attach(live.id)
        assert again.start_seconds == 0.0
        assert (await bash(again, "pwd; echo $y", session="shared")).stdout == b"/tmp\n2\n"
        with pytest.raises(SandboxLostError):
            await other.attach("nosuch" + live.id)


async def test_open_detaches_and_destroy_is_idempotent(backend: SandboxBackend) -> None:
    name = named()
    async with backend.open(spec(setup=["echo hi > made"], files={"/work/f": b"1"}, env={"V": "v"}), name=name) as sandbox:
        assert (await bash(sandbox, "cat made f; echo $V")).stdout == b"hi\n1v\n"
        assert 0 < sandbox.start_seconds < 30
    (info,) = [info for info in await backend.list() if info.name == name]
    assert (info.alive, info.labels) == (True, {"owner": "a"})
    await asyncio.gather(sandbox.destroy(), sandbox.destroy())
    await sandbox.destroy()
    assert not await sandbox.poll()
    with pytest.raises(SandboxLostError) as lost:
        await bash(sandbox, "true")
    assert not lost.value.by_command
    with pytest.raises(SandboxLostError):
        await backend.attach(sandbox.id)


async def test_destroyed_while_a_command_runs(backend: SandboxBackend) -> None:
    sandbox = await backend.create(spec(), name=named())
    call = asyncio.create_task(bash(sandbox, "sleep 30", timeout_s=40))
    await asyncio.sleep(0.5)
    await sandbox.destroy()
    with pytest.raises(SandboxLostError) as lost:
        await call
    assert not lost.value.by_command


async def test_lost_by_its_own_command(backend: SandboxBackend) -> None:
    """Nothing but a debugger's tricks reaches the first process; they are enough to tell whose fault the loss was."""
    sandbox = await backend.create(spec(), name=named())
    script = (
        "import re\nmaps = open('/proc/1/maps').read()\nmemory = open('/proc/1/mem', 'r+b', 0)\n"
        "for start, end, mode in re.findall(r'^([0-9a-f]+)-([0-9a-f]+) (r.x.) .*(?:libc|bash)', maps, re.M):\n"
        "    memory.seek(int(start, 16))\n    memory.write(b'\\x00' * (int(end, 16) - int(start, 16)))\n"
    )
    with pytest.raises(SandboxLostError) as lost:
        await sandbox.exec(["python3", "-c", script], timeout_s=20, max_output_bytes=CAP)
    assert lost.value.by_command
    await sandbox.destroy()


async def test_nothing_is_left_for_the_next_of_the_same_name(backend: SandboxBackend) -> None:
    name = named()
    first = await backend.create(spec(), name=name)
    await bash(first, "echo secret > /tmp/left; echo 'alias ls=true' >> ~/.bashrc; (sleep 900 &); touch /work/.hidden; mkdir -p ~/.cache/x")
    await first.destroy()
    second = await backend.create(spec(), name=name)
    assert (await bash(second, "ls -A /tmp /work; ls ~/.cache 2>/dev/null; true")).stdout == b"/tmp:\n\n/work:\n", "case-039"
    assert await count(second, "^sleep 900") == 0
    assert first.id != second.id
    await second.destroy()


async def test_a_lost_create_reply_is_found_by_name(backend: SandboxBackend) -> None:
    name = named()
    first = await backend.create(spec(), name=name)
    second = await backend.create(spec(), name=name)
    assert [info.id for info in await backend.list() if info.name == name] == [second.id], "case-036"
    assert not await first.poll()
    with pytest.raises(SandboxStartError, match="another owner"):
        await backend.create(spec(labels={"owner": "b"}), name=name)
    assert await second.poll()
    await second.destroy()


async def test_failed_setup_leaves_nothing(backend: SandboxBackend) -> None:
    name = named()
    with pytest.raises(SandboxSpecError, match="no such thing"):
        await backend.create(spec(setup=["true", "echo no such thing >&2; exit 1"]), name=name)
    assert name not in [info.name for info in await backend.list()], "case-037"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"image": "rollway-nosuch:9"}, id="image"),
        pytest.param({"network": "host"}, id="network"),
        pytest.param({"workdir": "relative"}, id="workdir"),
        pytest.param({"runtime": "nosuch"}, id="runtime"),
        pytest.param({"memory_mib": 1}, id="memory"),
        pytest.param({"files": {"relative": b""}}, id="files"),
    ],
)
async def test_bad_specs(backend: SandboxBackend, changes: dict[str, object]) -> None:
    name = named()
    with pytest.raises(SandboxStartError) as refused:
        await backend.create(spec(**changes), name=name)
    # without a registry to ask, an unknown image may yet exist somewhere
    assert isinstance(refused.value, SandboxSpecError) or "image" in changes
    assert name not in [info.name for info in await backend.list()]


async def test_start_budget(backend: SandboxBackend) -> None:
    name = named()
    began = time.monotonic()
    with pytest.raises(SandboxStartError, match="within 2 s"):
        await backend.create(spec(setup=["sleep 60"], start_s=2.0), name=name)
    assert time.monotonic() - began < 15
    assert name not in [info.name for info in await backend.list()]


async def test_read_only(backend: SandboxBackend) -> None:
    sandbox = await backend.create(spec(read_only=True, files={"/work/f": b"1"}), name=named())
    told = await bash(
        sandbox, "cat f; touch /x /usr/x 2>/dev/null; echo $?; touch /tmp/x /root/x /work/x; echo $?; cd /tmp", session="main"
    )
    assert told.stdout == b"11\n0\n"
    assert (await bash(sandbox, "pwd", session="main")).stdout == b"/tmp\n"
    await sandbox.destroy()


async def test_sweep(kind: str, root: Path, live: Sandbox) -> None:
    async with make(kind, root, deployment_id=f"{DEPLOYMENT}-sweep") as backend:
        kept = await backend.create(spec(), name="kept-" + named())
        swept = await backend.create(spec(), name="swept-" + named())
        names = {info.name for info in await backend.list()}
        assert len(names) == 2, "case-035"
        assert await backend.sweep(keep=frozenset(), older_than_s=3600) == 0
        assert await backend.sweep(keep=frozenset(name for name in names if name.startswith("kept")), older_than_s=0) == 1
        assert (await kept.poll(), await swept.poll(), await live.poll()) == (True, False, True)
        assert await backend.sweep(keep=frozenset(), older_than_s=0) == 1


async def test_images_and_ping(backend: SandboxBackend) -> None:
    await backend.ping()
    images = await backend.images()
    assert IMAGE in images
    assert "rollway-nosuch:9" not in images
