"""The demo's child processes: shown when they fail, gone when they are left."""

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from service.demo.processes import ChildError, free_port, output_of, running


async def test_leaving_ends_the_child_and_what_it_started(tmp_path: Path) -> None:
    argv = ["bash", "-c", f"trap 'exit 0' TERM; sleep 300 & echo $! > {tmp_path}/pid; wait"]
    async with running("parent", argv, env=os.environ, log=tmp_path / "log"):
        async with asyncio.timeout(10):
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
                await asyncio.sleep(0.02)
        pid = int((tmp_path / "pid").read_text())
        assert psutil.pid_exists(pid)
    async with asyncio.timeout(10):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)


async def test_a_child_that_ends_early_is_shown_with_its_log(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "raise SystemExit('no such tokenizer')"]
    with pytest.raises(ChildError, match="no such tokenizer"):
        async with running("generator", argv, env=os.environ, log=tmp_path / "log") as child:
            await child.ready(f"http://127.0.0.1:{free_port()}/ready", timeout_s=20)


async def test_a_child_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="did not answer"):
        async with running("gateway", ["sleep", "60"], env=os.environ, log=tmp_path / "log") as child:
            await child.ready(f"http://127.0.0.1:{free_port()}/readyz", timeout_s=0.3)


async def test_output_of_a_failing_command_is_an_error(tmp_path: Path) -> None:
    assert await output_of(["echo", "one"], env=os.environ, log=tmp_path / "log") == "one\n"
    with pytest.raises(ChildError, match="status 1"):
        await output_of(["false"], env=os.environ, log=tmp_path / "log")
