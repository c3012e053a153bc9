"""What every sandbox backend promises of calls with an id, and of who may make calls at all."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandboxes.base import Sandbox, SandboxBackend, SandboxError, SandboxFencedError, SandboxLostError
from tests.sandbox_backends import bash, count, make, named, spec

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module")
async def own(backend: SandboxBackend) -> AsyncIterator[Sandbox]:
    sandbox = await backend.create(spec(), name=named(), fence=5)
    yield sandbox
    for info in await backend.list():
        if info.id == sandbox.id:
            await (await backend.attach(info.id, fence=1000)).destroy()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(kind: str, root: Path, backend: SandboxBackend) -> AsyncIterator[SandboxBackend]:
    """What another process of the deployment has."""
    async with make(kind, root) as made:
        yield made


async def test_a_call_runs_once(live: Sandbox) -> None:
    script = "echo $$ $RANDOM; echo x >> /tmp/once; exit 3"
    first = await bash(live, script, call_id="once")
    assert first.exit_code == 3
    assert await bash(live, script, call_id="once") == first
    assert (await bash(live, "wc -l < /tmp/once")).stdout == b"1\n"


async def test_asked_twice_at_once_it_runs_once(live: Sandbox) -> None:
    results = await asyncio.gather(*(bash(live, "echo x >> /tmp/twice; sleep 0.3; echo $$", call_id="twice") for _ in range(3)))
    assert len({result.stdout for result in results}) == 1
    assert (await bash(live, "wc -l < /tmp/twice")).stdout == b"1\n"


async def test_a_session_call_runs_once(live: Sandbox) -> None:
    await bash(live, "n=0", session="calls")
    for _ in range(3):
        assert (await bash(live, "n=$((n+1)); echo $n", session="calls", call_id="session-once")).stdout == b"1\n"


async def test_what_is_forgotten_runs_anew_under_a_new_id(live: Sandbox) -> None:
    await bash(live, "echo x >> /tmp/forgotten", call_id="forget-1")
    live.forget()
    await bash(live, "echo x >> /tmp/forgotten", call_id="forget-2")
    assert (await bash(live, "wc -l < /tmp/forgotten")).stdout == b"2\n"


async def test_many_results_are_kept_and_forgotten(live: Sandbox) -> None:
    """More than the agent keeps at once, as long as they are forgotten on the way."""
    for start in range(0, 1500, 100):
        results = await asyncio.gather(*(bash(live, f"echo {n}", call_id=f"kept-{n}", shell="sh") for n in range(start, start + 20)))
        assert [result.stdout for result in results] == [f"{n}\n".encode() for n in range(start, start + 20)]
        live.forget()


async def test_a_result_is_fetched_from_another_process(own: Sandbox, other: SandboxBackend) -> None:
    script = "echo x >> /tmp/count; echo begun >&2; sleep 0.8; cat /tmp/count"
    call = asyncio.create_task(bash(own, script, call_id="fetched"))
    while await count(own, "^sleep 0.8") == 0:
        await asyncio.sleep(0.02)
    again = await other.attach(own.id, fence=5, boot_id=own.boot_id)
    waited = await bash(again, script, call_id="fetched")
    assert (waited.stdout, waited.stderr) == (b"x\n", b"begun\n")
    assert await bash(again, script, call_id="fetched") == waited
    with pytest.raises(SandboxFencedError):
        await call


async def test_a_result_outlives_who_asked(own: Sandbox, other: SandboxBackend) -> None:
    first = await bash(own, "echo x >> /tmp/count; echo $$", call_id="kept")
    again = await other.attach(own.id, fence=6, boot_id=own.boot_id)
    assert await bash(again, "echo x >> /tmp/count; echo $$", call_id="kept") == first
    assert (await bash(again, "wc -l < /tmp/count")).stdout == b"1\n"


async def test_another_boot_is_refused(own: Sandbox, other: SandboxBackend) -> None:
    assert len(own.boot_id) >= 16
    with pytest.raises(SandboxLostError):
        await other.attach(own.id, fence=5, boot_id="0" * len(own.boot_id))


async def test_a_lower_fence_is_refused_and_changes_nothing(own: Sandbox, other: SandboxBackend) -> None:
    with pytest.raises(SandboxFencedError):
        await other.attach(own.id, fence=4)
    assert (await bash(own, "echo still ours")).stdout == b"still ours\n"


async def test_a_higher_fence_ends_the_holder(own: Sandbox, other: SandboxBackend) -> None:
    later = await other.attach(own.id, fence=6)
    with pytest.raises(SandboxFencedError):
        await bash(own, "touch /tmp/ran")
    with pytest.raises(SandboxFencedError):
        await own.put({"/tmp/ran": b""})
    with pytest.raises(SandboxFencedError):
        await own.kill_all()
    assert (await bash(later, "ls /tmp/ran")).exit_code == 2
    with pytest.raises(SandboxFencedError):
        await other.attach(own.id, fence=5)
    assert (await bash(later, "echo mine")).stdout == b"mine\n"


async def test_sessions_and_daemons_outlive_their_holder(own: Sandbox, other: SandboxBackend) -> None:
    await bash(own, "cd /tmp; y=2; sleep 911 >/dev/null 2>&1 &", session="shared")
    again = await other.attach(own.id, fence=5)
    assert again.start_seconds == 0.0
    assert (await bash(again, "pwd; echo $y; jobs -r | wc -l", session="shared")).stdout == b"/tmp\n2\n1\n"
    assert await count(again, "^sleep 911") == 1


async def test_cancelled_calls_are_dead_and_others_go_on(live: Sandbox) -> None:
    calls = [asyncio.create_task(bash(live, f"sleep 901.{n}; echo {n}", timeout_s=30)) for n in range(10)]
    staying = asyncio.create_task(bash(live, "sleep 1; echo stayed", call_id="stayed"))
    while await count(live, "^sleep 901") < 10:
        await asyncio.sleep(0.02)
    for call in calls:
        call.cancel()
    assert all(isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*calls, return_exceptions=True))
    assert await count(live, "^sleep 901") == 0
    assert (await staying).stdout == b"stayed\n"


async def test_a_cancelled_call_with_an_id_goes_on(live: Sandbox) -> None:
    script = "echo x >> /tmp/cancelled; sleep 0.891; wc -l < /tmp/cancelled"
    call = asyncio.create_task(bash(live, script, call_id="cancelled"))
    while await count(live, "^sleep 0.891") < 1:
        await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await count(live, "^sleep 0.891") == 1
    assert (await bash(live, script, call_id="cancelled")).stdout == b"1\n"


async def test_kill_all_ends_calls_sessions_and_daemons(live: Sandbox) -> None:
    await bash(live, "setsid sleep 951 >/dev/null 2>&1 & sleep 952 >/dev/null 2>&1 &", session="main")
    call = asyncio.create_task(bash(live, "echo begun; sleep 953", timeout_s=30, call_id="killed"))
    while await count(live, "^sleep 95") < 3:
        await asyncio.sleep(0.02)
    await live.kill_all()
    assert await count(live, "^sleep 95") == 0
    killed = await call
    assert (killed.exit_code, killed.stdout, killed.timed_out) == (137, b"begun\n", False)
    assert await bash(live, "echo begun; sleep 953", call_id="killed") == killed
    assert await live.poll()


async def test_detached_it_goes_on(own: Sandbox, other: SandboxBackend) -> None:
    call = asyncio.create_task(bash(own, "sleep 0.5; echo went on", call_id="on"))
    await asyncio.sleep(0.2)
    await own.detach()
    await own.detach()
    with pytest.raises(SandboxError):
        await call
    with pytest.raises(SandboxError):
        await bash(own, "true")
    again = await other.attach(own.id, fence=5, boot_id=own.boot_id)
    assert (await bash(again, "sleep 0.5; echo went on", call_id="on")).stdout == b"went on\n"
