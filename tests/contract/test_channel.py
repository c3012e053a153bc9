"""A channel and a real agent, through everything that can happen to the stream between them."""

import asyncio
import hashlib
import os
import platform
import random
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandboxes import agent_binary
from sandboxes.agent_sandbox import AgentSandbox
from sandboxes.base import SandboxContentError, SandboxError, SandboxFencedError, SandboxLostError, SandboxTooLargeError
from sandboxes.channel import Channel
from sandboxes.channel_attachment import Patience
from sandboxes.frames import DATA_WINDOW_BYTES, STDIN_WINDOW_BYTES, Run
from tests.contract.agent_line import AgentLine

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None or not agent_binary.path(platform.machine()).exists(),
        reason="needs root, unshare and an agent for this machine",
    ),
]

PATIENCE = Patience(connect_s=1.0, reconnect_s=2.0, tick_s=0.2, slack_s=2.0, kill_s=3.0)


@pytest_asyncio.fixture
async def line() -> AsyncIterator[AgentLine]:
    made = AgentLine()
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def box(line: AgentLine, tmp_path: Path) -> AsyncIterator[AgentSandbox]:
    made = await attached(line)
    await made.configure(user=None, workdir=str(tmp_path), env={})
    yield made
    await made.detach()


async def attached(line: AgentLine, *, fence: int = 1, boot_id: str | None = None) -> AgentSandbox:
    channel = Channel(line, fence=fence, boot_id=boot_id, patience=PATIENCE)
    await channel.open()
    return AgentSandbox(line, channel)


async def sh(box: AgentSandbox, script: str, *, call_id: str | None = None, stdin: bytes | None = None) -> str:
    result = await box.exec(["sh", "-c", script], timeout_s=20, max_output_bytes=10_000, call_id=call_id, stdin=stdin)
    return (result.stdout + result.stderr).decode()


async def test_many_calls_at_once(box: AgentSandbox) -> None:
    said = await asyncio.gather(*(sh(box, f"sleep 0.$((RANDOM % 3)); echo {number}") for number in range(40)))
    assert said == [f"{number}\n" for number in range(40)]


CUTS = [0, 1, 4, 31, 32, 33, 47, 60, 90, 120, 150, 151, 200]


@pytest.mark.parametrize("cut", CUTS)
async def test_case_021_a_request_cut_anywhere_runs_once(line: AgentLine, box: AgentSandbox, cut: int) -> None:
    line.cut_written = cut
    assert await sh(box, "echo x >> runs; cat", stdin=b"all of it") == "all of it"
    line.cut_written = None
    assert await sh(box, "wc -l < runs") == "1\n"


@pytest.mark.parametrize("cut", CUTS)
async def test_case_021_an_answer_cut_anywhere_is_had_again(line: AgentLine, box: AgentSandbox, cut: int) -> None:
    line.cut_received = cut
    assert await sh(box, "echo x >> runs; echo done") == "done\n"
    line.cut_received = None
    assert await sh(box, "wc -l < runs") == "1\n"


async def test_a_stream_cut_again_and_again(line: AgentLine, box: AgentSandbox) -> None:
    rng = random.Random(5)
    for number in range(12):
        line.cut_written, line.cut_received = rng.choice([None, rng.randrange(140_000)]), rng.choice([None, rng.randrange(300)])
        assert await sh(box, f"echo x >> runs; echo {number}") == f"{number}\n"
    line.cut_written = line.cut_received = None
    assert await sh(box, "wc -l < runs") == "12\n"


@pytest.mark.parametrize("cut", [100, 70_000, 262_144, 300_000, 1_500_000])
async def test_stdin_is_whole_through_a_cut(line: AgentLine, box: AgentSandbox, cut: int) -> None:
    data = random.Random(1).randbytes(2_000_000)
    line.cut_written = cut
    said = await sh(box, "echo x >> runs; sha256sum", stdin=data)
    assert said.split()[0] == hashlib.sha256(data).hexdigest()
    assert await sh(box, "wc -l < runs") == "1\n"


async def test_a_call_is_asked_again_from_another_process(line: AgentLine, box: AgentSandbox) -> None:
    asked = asyncio.create_task(sh(box, "echo x >> runs; sleep 0.4; echo pid $$", call_id="turn-1"))
    await asyncio.sleep(0.1)
    later = await attached(line, fence=2, boot_id=box.boot_id)
    said = await sh(later, "echo x >> runs; sleep 0.4; echo pid $$", call_id="turn-1")
    assert said.startswith("pid ")
    assert await sh(later, "echo something else", call_id="turn-1") == said, "kept until it is forgotten"
    assert await sh(later, "wc -l < runs") == "1\n"
    with pytest.raises(SandboxFencedError):
        await asked
    await later.detach()


async def test_one_call_asked_for_twice_at_once(box: AgentSandbox) -> None:
    said = await asyncio.gather(*(sh(box, "echo x >> runs; sleep 0.2; echo $$", call_id="same") for _ in range(3)))
    assert len(set(said)) == 1
    assert await sh(box, "wc -l < runs") == "1\n"


async def test_results_are_kept_until_they_are_forgotten(box: AgentSandbox) -> None:
    for number in range(5):
        await sh(box, "true", call_id=f"kept-{number}")
        await sh(box, "true")
    assert (await box._channel.ping()).kept == 5, "those that somebody can ask for"
    box.forget()
    assert (await box._channel.ping()).kept == 0


async def test_a_later_lease_fences_the_earlier(line: AgentLine, box: AgentSandbox) -> None:
    waiting = asyncio.create_task(sh(box, "sleep 5", call_id="w"))
    await asyncio.sleep(0.1)
    later = await attached(line, fence=7)
    with pytest.raises(SandboxFencedError):
        await waiting
    with pytest.raises(SandboxFencedError):
        await sh(box, "true")
    with pytest.raises(SandboxFencedError):
        await attached(line, fence=6)
    assert await sh(later, "echo mine") == "mine\n"
    await later.detach()


async def test_another_boot_is_another_sandbox(line: AgentLine) -> None:
    with pytest.raises(SandboxLostError, match="restarted"):
        await attached(line, boot_id="0" * 32)


async def test_case_029_a_silent_agent_is_given_up_in_time(line: AgentLine, box: AgentSandbox) -> None:
    line.signal_agent(signal.SIGSTOP)
    with pytest.raises(SandboxError, match="did not answer") as raised:
        await sh(box, "true")
    assert not isinstance(raised.value, SandboxLostError)
    line.signal_agent(signal.SIGCONT)
    assert await sh(box, "echo back") == "back\n"


async def test_a_dead_agent_is_a_lost_sandbox(line: AgentLine, box: AgentSandbox) -> None:
    waiting = asyncio.create_task(sh(box, "sleep 30"))
    await asyncio.sleep(0.1)
    line.signal_agent(signal.SIGKILL)
    with pytest.raises(SandboxLostError) as raised:
        await waiting
    assert raised.value.by_command
    with pytest.raises(SandboxLostError):
        await sh(box, "true")


async def test_a_long_call_outlives_patience(box: AgentSandbox) -> None:
    assert await sh(box, "sleep 1.5; echo late") == "late\n"


async def test_no_connection_to_be_had_is_an_error_in_time(line: AgentLine, box: AgentSandbox) -> None:
    line.cut_written, line.refuse_connections = 0, True
    with pytest.raises(SandboxError, match="no connection"):
        await sh(box, "true")
    line.refuse_connections = False
    assert await sh(box, "echo back") == "back\n"


@pytest.mark.parametrize("connected", [True, False])
async def test_cancelling_kills_before_it_leaves(line: AgentLine, box: AgentSandbox, connected: bool) -> None:
    call = asyncio.create_task(sh(box, "sleep 300 & setsid sleep 300 & exec sleep 300"))
    await asyncio.sleep(0.2)
    if not connected:
        line.connections[-1]._break_soon()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await sh(box, "pgrep -c 'sleep' || true") == "0\n"
    assert (await box._channel.ping()).alive == 0


async def test_leaving_a_call_that_others_can_ask_for_lets_it_run(box: AgentSandbox) -> None:
    call = asyncio.create_task(sh(box, "sleep 0.5; echo x >> runs; echo done", call_id="c"))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await sh(box, "never run", call_id="c") == "done\n"
    assert await sh(box, "wc -l < runs") == "1\n"


async def test_a_slow_reader_holds_the_agent_back(line: AgentLine, box: AgentSandbox) -> None:
    await sh(box, "head -c 20000000 /dev/zero > big")
    path = (await sh(box, "echo $PWD/big")).strip()
    before, size = line.connections[-1].bytes_received, 0
    async for piece in box.read_file(path):
        if not size:
            await asyncio.sleep(0.5)
            assert line.connections[-1].bytes_received - before <= DATA_WINDOW_BYTES * 1.1
        size += len(piece)
    assert size == 20_000_000


async def test_a_slow_taker_holds_the_giver_back(box: AgentSandbox) -> None:
    given = 0

    async def content() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(400):
            given += 50_000
            yield bytes(50_000)

    taking = asyncio.create_task(box._channel.run(Run(argv=["sleep", "30"]), stdin=content()))
    await asyncio.sleep(0.5)
    held = given
    taking.cancel()
    await asyncio.wait({taking})
    assert 0 < held <= 2 * STDIN_WINDOW_BYTES + 200_000, "a window on its way, one here, and what a pipe holds"


async def test_big_files_both_ways(box: AgentSandbox) -> None:
    data = random.Random(2).randbytes(30_000_000)
    path = (await sh(box, "echo $PWD/deep/er/file")).strip()

    async def content() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 700_001):
            yield data[start : start + 700_001]

    await box.write_file(path, content(), mode=0o750)
    back = b"".join([piece async for piece in box.read_file(path)])
    assert back == data
    assert (await sh(box, f"stat -c %a {path}")) == "750\n"
    with pytest.raises(SandboxTooLargeError):
        await box.get([path], max_bytes=1_000_000)
    assert (await box._channel.ping()).alive == 0, "what nobody reads is dead"
    archive = await box.get([path, "/not/there"], max_bytes=31_000_000)
    await sh(box, "rm -r deep")
    await box.put_tar(archive)
    assert (await sh(box, f"sha256sum < {path}")).split()[0] == hashlib.sha256(data).hexdigest()


async def test_a_file_survives_a_cut_while_it_is_written(line: AgentLine, box: AgentSandbox) -> None:
    data = random.Random(3).randbytes(3_000_000)
    path = (await sh(box, "echo $PWD/f")).strip()

    async def content() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 100_000):
            if start == 1_000_000:
                line.cut_written = 90_000
            yield data[start : start + 100_000]

    await box.write_file(path, content())
    assert (await sh(box, "sha256sum < f")).split()[0] == hashlib.sha256(data).hexdigest()


async def test_a_read_that_breaks_off_says_so_and_a_get_begins_again(line: AgentLine, box: AgentSandbox) -> None:
    await sh(box, "head -c 5000000 /dev/zero > f")
    path = (await sh(box, "echo $PWD/f")).strip()
    line.cut_received = 2_000_000
    with pytest.raises(SandboxError, match="broke"):
        async for _ in box.read_file(path):
            pass
    line.cut_received = 2_000_000
    assert len(await box.get([path], max_bytes=6_000_000)) >= 5_000_000


async def test_leaving_a_read_early_ends_it(box: AgentSandbox) -> None:
    await sh(box, "head -c 5000000 /dev/zero > f")
    reading = box.read_file((await sh(box, "echo $PWD/f")).strip())
    assert len(await anext(reading)) > 0
    await reading.aclose()  # type: ignore[attr-defined]
    assert (await box._channel.ping()).alive == 0


@pytest.mark.parametrize("path", ["/etc", "/nope/none"])
async def test_what_cannot_be_read(box: AgentSandbox, path: str) -> None:
    with pytest.raises(SandboxContentError) as raised:
        async for _ in box.read_file(path):
            pass
    assert raised.value.errno in (21, 2)


async def test_a_closed_channel_ends_what_waits(line: AgentLine) -> None:
    box = await attached(line)
    waiting = asyncio.create_task(sh(box, "sleep 30"))
    await asyncio.sleep(0.1)
    await box.detach()
    with pytest.raises(SandboxError, match="closed"):
        await waiting
