"""What every sandbox backend promises of a sandbox's life: start, attach, loss, removal, sweep."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from sandboxes.base import (
    Sandbox,
    SandboxBackend,
    SandboxError,
    SandboxFencedError,
    SandboxLostError,
    SandboxSpecError,
    SandboxStartError,
)
from tests.sandbox_backends import CAP, DEPLOYMENT, HAVE_SNAPSHOTS, IMAGE, bash, count, make, named, spec

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]


async def test_attach_to_what_is_not_there(backend: SandboxBackend, live: Sandbox) -> None:
    with pytest.raises(SandboxLostError):
        await backend.attach("nosuch" + live.id)
    assert (await bash(live, "echo fine")).stdout == b"fine\n"


async def test_open_detaches_and_destroy_is_idempotent(backend: SandboxBackend) -> None:
    name = named()
    async with backend.open(spec(setup=["echo hi > made"], files={"/work/f": b"1"}, env={"V": "v"}), name=name) as sandbox:
        assert (await bash(sandbox, "cat made f; echo $V")).stdout == b"hi\n1v\n"
        assert 0 < sandbox.start_seconds < 30
    (info,) = [info for info in await backend.list() if info.name == name]
    assert (info.alive, info.labels) == (True, {"owner": "a"})
    with pytest.raises(SandboxError):
        await bash(sandbox, "true")
    await asyncio.gather(sandbox.destroy(), sandbox.destroy())
    await sandbox.destroy()
    assert not await sandbox.poll()
    with pytest.raises(SandboxLostError):
        await backend.attach(sandbox.id)


async def test_removed_by_another_it_is_lost(backend: SandboxBackend) -> None:
    sandbox = await backend.create(spec(), name=named())
    await backend.sweep(
        keep=frozenset(), older_than_s=0, only=frozenset(info.name for info in await backend.list() if info.id == sandbox.id)
    )
    assert not await sandbox.poll()
    with pytest.raises(SandboxLostError) as lost:
        await bash(sandbox, "true")
    assert not lost.value.by_command
    await sandbox.destroy()


async def test_destroyed_while_a_command_runs(backend: SandboxBackend) -> None:
    sandbox = await backend.create(spec(), name=named())
    call = asyncio.create_task(bash(sandbox, "sleep 30", timeout_s=40))
    await asyncio.sleep(0.5)
    await sandbox.destroy()
    with pytest.raises(SandboxLostError) as lost:
        await call
    assert not lost.value.by_command
    with pytest.raises(SandboxLostError):
        await bash(sandbox, "true")


async def test_nothing_in_it_reaches_the_first_process(backend: SandboxBackend) -> None:
    """Not even what a debugger does."""
    sandbox = await backend.create(spec(), name=named())
    script = (
        "import os, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.ptrace(16, 1, 0, 0))\n"
        "for path in ('/proc/1/mem', '/proc/1/maps', '/proc/1/fd/0', '/proc/1/root/etc'):\n"
        "    try: os.listdir(path) if path.endswith('etc') else open(path, 'r+b', 0); print('OPEN', path)\n"
        "    except OSError as error: pass\n"
    )
    result = await sandbox.exec(["python3", "-c", script], timeout_s=20, max_output_bytes=CAP)
    assert result.stdout == b"-1\n"
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
        warm = await backend.create(spec(), name="warm-" + named())
        swept = await backend.create(spec(), name="swept-" + named())
        names = {info.name for info in await backend.list()}
        assert len(names) == 3, "case-035"
        assert await backend.sweep(keep=frozenset(), older_than_s=3600) == 0
        keep = frozenset(name for name in names if name.startswith("kept"))
        assert await backend.sweep(keep=keep, older_than_s=0, keep_prefixes=("warm-",), only=frozenset({"nosuch"})) == 0
        assert await backend.sweep(keep=keep, older_than_s=0, keep_prefixes=("warm-",)) == 1
        assert [await each.poll() for each in (kept, warm, swept, live)] == [True, True, False, True]
        assert await backend.sweep(keep=frozenset(), older_than_s=0) == 2


async def test_a_create_that_is_cancelled_leaves_nothing(backend: SandboxBackend, root: Path) -> None:
    chance = random.Random(7)
    before = {info.id for info in await backend.list()}
    for _ in range(10):
        making = asyncio.create_task(backend.create(spec(setup=["sleep 0.1"]), name=named()))
        await asyncio.sleep(chance.uniform(0, 0.4))
        making.cancel()
        made = (await asyncio.gather(making, return_exceptions=True))[0]
        if isinstance(made, BaseException):
            assert isinstance(made, asyncio.CancelledError)
        else:
            await made.destroy()
    assert {info.id for info in await backend.list()} == before
    running = [path.read_bytes().decode(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert sum("process_root.sh" in each and str(root) in each for each in running) <= len(before), "only unshare waits for each"


async def test_a_bare_sandbox_gets_an_owner(kind: str, root: Path, backend: SandboxBackend) -> None:
    async with make(kind, root) as pool:
        bare = await pool.create(spec(labels={"pool": "w"}), name=named())
        name = named()
        lost_reply = await pool.create(spec(), name=name)
        owned = await pool.adopt(bare, spec(files={"/work/f": b"1"}, setup=["echo $V > made"], env={"V": "v"}), name=name, fence=3)
        assert owned.id == bare.id
        assert owned.start_seconds > 0
        assert (await bash(owned, "cat f made; echo $V")).stdout == b"1v\nv\n"
        assert [info.id for info in await pool.list() if info.name == name] == [bare.id]
        assert not await lost_reply.poll()
        with pytest.raises(SandboxFencedError):
            await backend.attach(owned.id, fence=2)
        await owned.destroy()
        with pytest.raises(SandboxError):
            await pool.adopt(bare, spec(), name=named())


async def test_it_knows_how_many_processes_live_in_it(backend: SandboxBackend) -> None:
    sandbox = await backend.create(spec(), name=named())
    assert await sandbox.processes() == 0
    await bash(sandbox, "sleep 0.1 & wait; (exit 3)")
    assert await sandbox.processes() == 0
    await bash(sandbox, "sleep 900 >/dev/null 2>&1 & setsid sleep 901 >/dev/null 2>&1 &")
    assert await sandbox.processes() == 2
    await bash(sandbox, "x=1", session="main")
    assert await sandbox.processes() == 3
    await sandbox.kill_all()
    assert await sandbox.processes() == 0
    await sandbox.destroy()


# Snapshots


async def test_snapshot_and_restore(kind: str, backend: SandboxBackend) -> None:
    first = await backend.create(spec(files={"/work/f": b"1"}), name=named())
    if kind not in HAVE_SNAPSHOTS:
        with pytest.raises(SandboxError, match="no snapshots"):
            await first.snapshot(ttl_s=60)
        with pytest.raises(SandboxError, match="no snapshots"):
            await backend.restore("nosuch", spec(), name=named())
        await first.destroy()
        return
    await bash(first, "echo 2 > g; chmod 700 g; sleep 900 >/dev/null 2>&1 &")
    kept = await first.snapshot(ttl_s=60)
    await bash(first, "echo later > g; echo alive")
    again = await backend.restore(kept, spec(files={"/work/f": b"not again"}, setup=["exit 1"]), name=named())
    assert (await bash(again, "cat f g; stat -c %a g; echo x >> g")).stdout == b"12\n700\n"
    assert await count(again, "^sleep 900") == 0
    assert again.boot_id != first.boot_id
    await first.destroy()
    twice = await backend.restore(kept, spec(), name=named())
    assert (await bash(twice, "cat g")).stdout == b"2\n"
    await again.destroy()
    await twice.destroy()
    await backend.forget_snapshot(kept)
    await backend.forget_snapshot(kept)
    with pytest.raises(SandboxLostError):
        await backend.restore(kept, spec(), name=named())


async def test_a_snapshot_past_its_time_is_swept(kind: str, root: Path) -> None:
    if kind not in HAVE_SNAPSHOTS:
        pytest.skip("it has no snapshots")
    async with make(kind, root, deployment_id=f"{DEPLOYMENT}-snap") as backend:
        sandbox = await backend.create(spec(), name=named())
        short, long = await sandbox.snapshot(ttl_s=0), await sandbox.snapshot(ttl_s=600)
        assert await backend.sweep(keep=frozenset(), older_than_s=0) == 1
        with pytest.raises(SandboxLostError):
            await backend.restore(short, spec(), name=named())
        await (await backend.restore(long, spec(), name=named())).destroy()
        await backend.forget_snapshot(long)


async def test_a_fenced_holder_removes_nothing(backend: SandboxBackend) -> None:
    sandbox = await backend.create(spec(), name=named(), fence=1)
    later = await backend.attach(sandbox.id, fence=2)
    with pytest.raises(SandboxFencedError):
        await sandbox.destroy()
    with pytest.raises(SandboxFencedError):
        await sandbox.destroy()
    assert (await bash(later, "echo mine")).stdout == b"mine\n"
    await later.destroy()


async def test_images_and_ping(backend: SandboxBackend) -> None:
    await backend.ping()
    images = await backend.images()
    assert IMAGE in images
    assert "rollway-nosuch:9" not in images
