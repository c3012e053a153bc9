"""What every sandbox backend promises of limits: they hold, are seen, and the sandbox goes on."""

import asyncio

import pytest
import pytest_asyncio

from sandboxes.base import INODES_PER_MIB, Sandbox, SandboxBackend
from tests.sandbox_backends import bash, count, named, spec

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

_DISK_MIB = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def limited(backend: SandboxBackend) -> Sandbox:
    return await backend.create(spec(disk_mib=_DISK_MIB), name=named())


async def test_memory_kill_is_visible(limited: Sandbox) -> None:
    result = await bash(limited, "head -c 300m /dev/zero | tail > /dev/null; echo rc=$?", timeout_s=30)
    assert b"rc=137" in result.stdout, "case-038"
    assert result.oom_killed
    assert not (await bash(limited, "echo after")).oom_killed


async def test_memory_kill_in_a_session_is_visible(limited: Sandbox) -> None:
    await bash(limited, "x=kept", session="m")
    assert (await bash(limited, "head -c 300m /dev/zero | tail > /dev/null", session="m", timeout_s=30)).oom_killed
    assert (await bash(limited, "echo $x", session="m")).stdout == b"kept\n"


async def test_pids(limited: Sandbox) -> None:
    result = await bash(limited, "for i in $(seq 200); do sleep 921 & done 2>/dev/null; echo made; sleep 30", timeout_s=2)
    assert result.timed_out
    assert await count(limited, "^sleep 921") == 0
    assert (await bash(limited, "echo fine")).stdout == b"fine\n"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("i=0; while :; do head -c 1000000 /dev/zero > /tmp/full.$i || exit 9; i=$((i+1)); sleep 0.01; done", id="many-files"),
        pytest.param("head -c 1000000000 /dev/zero > /work/huge || exit 9", id="one-file"),
        pytest.param(
            'python3 -c \'import os, time\nfor i in range(10**6):\n  open(f"/tmp/e{i}", "w").close()\n  i % 50 or time.sleep(0.001)\'',
            id="inodes",
        ),
    ],
)
async def test_a_full_disk_ends_the_command_and_not_the_sandbox(limited: Sandbox, script: str) -> None:
    """By a quota, which the command is told of, or by the agent, which kills it and says so."""
    result = await bash(limited, script, timeout_s=40)
    assert result.exit_code != 0
    assert not result.timed_out
    assert result.disk_full or result.exit_code in (1, 9, 128 + 25)
    used = await bash(limited, "du -smx /tmp /work | awk '{n+=$1} END {print n}'; find /tmp /work -xdev | wc -l")
    megabytes, inodes = (int(each) for each in used.stdout.split())
    assert megabytes < 50 * _DISK_MIB
    assert inodes < 20 * _DISK_MIB * INODES_PER_MIB
    assert (
        await bash(limited, "find /tmp /work -mindepth 1 -delete; echo x > /work/small && cat /work/small", timeout_s=30)
    ).stdout == b"x\n"


async def test_the_disk_watch_spares_who_stays_below(limited: Sandbox) -> None:
    result = await bash(limited, f"head -c {_DISK_MIB * 2**19} /dev/zero > /work/half; sleep 1.5; rm /work/half; echo fine")
    assert (result.stdout, result.disk_full) == (b"fine\n", False)


async def test_neighbours_are_unharmed(backend: SandboxBackend, limited: Sandbox) -> None:
    other = await backend.create(spec(), name=named())
    bomb = asyncio.create_task(bash(limited, "f() { f | f & }; f 2>/dev/null; sleep 30", timeout_s=2))
    for _ in range(5):
        assert (await bash(other, "echo fine", timeout_s=5)).stdout == b"fine\n"
        await asyncio.sleep(0.2)
    assert (await bomb).timed_out
    await other.destroy()
