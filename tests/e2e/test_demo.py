"""`rollway demo` as a newcomer runs it, only shorter."""

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from service.demo.processes import rollway_argv

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]


async def start(data_dir: Path, *options: str) -> asyncio.subprocess.Process:
    """The demo with its data in `data_dir`; the tokenizer that the other tests made is used again."""
    tokenizer = Path(__file__).parents[2] / ".rollway" / "tokenizers" / "qwen3"
    argv = rollway_argv("demo", "--json", "--tokenizer", str(tokenizer), *options)
    env = os.environ | {"ROLLWAY_DATA_DIR": str(data_dir)}
    return await asyncio.create_subprocess_exec(*argv, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)


async def test_a_short_demo_passes_and_prints_one_json_object(tmp_path: Path, qwen3_dir: Path) -> None:
    process = await start(tmp_path, "--groups", "3", "--group-size", "2", "--seed", "3")
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    report = json.loads(stdout)
    assert report["passed"] is True
    assert report["groups"] == {"acked": 3}
    assert report["samples"] >= 6
    assert report["tokens_compared"] == report["tokens"] > 0
    assert report["staleness"]["max"] <= report["staleness_budget"]
    assert report["sandboxes_left"] == 0


async def test_ctrl_c_stops_everything(tmp_path: Path, qwen3_dir: Path) -> None:
    process = await start(tmp_path, "--groups", "30")
    async with asyncio.timeout(60):
        while not list(tmp_path.glob("demo/*/record.jsonl")):
            await asyncio.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, stderr = await process.communicate()
    assert process.returncode == 130, stderr.decode()
    assert b"interrupted" in stderr
    gone, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=10)
    assert gone
    assert not alive
