"""What a tool call, a file, a start and an idle sandbox cost: ours beside the bare agent, docker-py and aiodocker, in one run.

usage: .venv/bin/python -m tests.bench.sandbox_plane [--quick] [--idle N] [--large N] [--rounds N] [--json FILE]

Needs root, a local engine with the image rollway-sandbox:1, and musl-gcc. The variants of every row are shuffled and take turns, round by
round. With n sandboxes, n loops have one call in flight each: past the cores, times are queueing, so read calls/s there. Of docker-py and
aiodocker at most 16 loops run: for more the engine serves no more execs a second, it only falls behind for minutes. CPU per 1,000 calls
is what this process, the engine's processes, and the whole machine (less what it used idle, in the same run) took. Takes six minutes.
Everything that is started carries one run's own name and is removed at the end, after an interrupt too.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from sandboxes.base import Sandbox
from tests.bench import sandbox_costs as costs
from tests.bench.sandbox_report import CALL, show
from tests.bench.sandbox_results import Key, Memory, Results, Samples
from tests.bench.sandbox_starts import measure_starts
from tests.bench.sandbox_variants import AIODOCKER, CAP, DOCKER_PY, Box, Fleet

MIB = 1 << 20
FILES = {"1 KB": 1 << 10, "1 MB": MIB, "50 MB": 50 * MIB}
SETTLE_S = 2.0
IDLE_S = 3.0
MOST_LOOPS = {DOCKER_PY: 16, AIODOCKER: 16}
CPU_WINDOW_S = 2.0
"""At least so long is the machine's CPU measured with many sandboxes: what else it does in a second varies."""
IDLE_CALLS = 400
"""Calls on random ones of many idle sandboxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One row. `large`: it moves so much that one call a loop is enough, and with many sandboxes one round, if that is asked for."""

    name: str
    work: Callable[[Box], Awaitable[None]]
    large: bool = False


def command(name: str, argv: Sequence[str], printed: int) -> Operation:
    async def work(box: Box) -> None:
        if (length := len(await box.run(argv))) != printed:
            raise SystemExit(f"{argv}: {length} bytes for {printed}")

    return Operation(name=name, work=work)


def transfers(name: str, size: int) -> list[Operation]:
    path, content = f"/tmp/bench-{size}", random.Random(size).randbytes(size)

    async def get(box: Box) -> None:
        if (length := await box.get(path)) != size:
            raise SystemExit(f"{path}: {length} bytes for {size}")

    return [
        Operation(name=f"put {name}", work=lambda box: box.put(path, content), large=size > MIB),
        Operation(name=f"get {name}", work=get, large=size > MIB),
    ]


OPERATIONS = [
    command(CALL, ["sh", "-c", "true"], 0),
    command("echo", ["echo", "hi"], 3),
    command("1 MB output", ["head", "-c", str(MIB), "/dev/zero"], MIB),
    *(operation for name, size in FILES.items() for operation in transfers(name, size)),
]


async def closed_loop(boxes: Sequence[Box], operation: Operation, seconds: float, container_ids: Sequence[str]) -> Samples:
    """One loop a box until the time is up; each makes at least one call."""
    times_s: list[float] = []
    deadline = time.perf_counter() + seconds

    async def loop(box: Box) -> None:
        while True:
            began = time.perf_counter()
            await operation.work(box)
            ended = time.perf_counter()
            times_s.append(ended - began)
            if ended >= deadline or (operation.large and len(boxes) > 1):
                return

    meter = costs.Meter(container_ids)
    await asyncio.gather(*map(loop, boxes))
    return Samples(times_s=times_s, cpu=meter.read())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run measures."""

    sizes: Sequence[int] = (1, 50, 200)
    rounds: int = 3
    seconds: float = 1.0
    starts: int = 8
    idle: int = 0
    large: int = 1
    """The most sandboxes that 50 MB files are moved to and from at once."""

    def of(self, size: int, round_number: int) -> list[Operation]:
        return [each for each in OPERATIONS if not each.large or size == 1 or (size <= self.large and round_number == 0)]

    def rounds_of(self, size: int) -> int:
        """Many sandboxes give many samples a round."""
        return self.rounds if size == 1 else min(self.rounds, 2) if size <= 50 else 1

    def seconds_of(self, size: int, operation: Operation) -> float:
        if size == 1:
            return self.seconds
        return max(self.seconds, CPU_WINDOW_S) if operation.name == CALL else self.seconds / 2


async def measure_calls(fleet: Fleet, plan: Plan) -> dict[Key, Samples]:
    samples: dict[Key, Samples] = defaultdict(Samples)
    for size in plan.sizes:
        boxes = await fleet.grow(size)
        await asyncio.sleep(SETTLE_S)
        for round_number in range(plan.rounds_of(size)):
            for operation in plan.of(size, round_number):
                for variant in random.sample(list(boxes), len(boxes)):
                    some, seconds = boxes[variant][: MOST_LOOPS.get(variant)], plan.seconds_of(size, operation)
                    samples[Key(size, operation.name, variant)] += await closed_loop(some, operation, seconds, fleet.container_ids)
    return samples


async def idle_busy() -> float:
    """How many cores are busy while nothing is called: idle shims, and whoever else is on the machine."""
    meter = costs.Meter()
    await asyncio.sleep(IDLE_S)
    used = meter.read()
    return used.machine_s / used.wall_s


async def measure_idle(fleet: Fleet, count: int) -> Memory:
    """Grow to `count` of ours, and see what each costs while it does nothing, and a call on random ones of them."""
    settled, already = costs.available_bytes(), len(fleet.sandboxes)
    began = time.perf_counter()
    await asyncio.gather(*(fleet.one_of_ours() for _ in range(count - already)))
    took_s = time.perf_counter() - began
    await asyncio.sleep(SETTLE_S)
    taken = settled - costs.available_bytes()
    resident = costs.resident_bytes(sandbox.id for sandbox in fleet.sandboxes)
    return Memory(
        sandboxes=count,
        available_mib=taken / (count - already) / MIB,
        resident_mib=resident / count / MIB,
        starts_per_s=(count - already) / took_s,
        busy_cores=await idle_busy(),
        call_ms=await random_calls(fleet.sandboxes),
    )


async def random_calls(sandboxes: Sequence[Sandbox]) -> list[float]:
    """Milliseconds of single calls, one at a time."""
    times = []
    for sandbox in random.choices(sandboxes, k=IDLE_CALLS):
        began = time.perf_counter()
        await sandbox.exec(["sh", "-c", "true"], timeout_s=60, max_output_bytes=CAP)
        times.append((time.perf_counter() - began) * 1000)
    return times


async def bench(plan: Plan) -> Results:
    stop_on_term()
    with tempfile.TemporaryDirectory() as folder:
        async with Fleet(f"bench-{uuid.uuid4().hex[:8]}", Path(folder)) as fleet:
            await fleet.prepare()
            starts = await measure_starts(fleet, plan.starts)
            memory = [await measure_idle(fleet, 50)]
            calls = await measure_calls(fleet, plan)
            busy = await idle_busy()
            if plan.idle:
                memory.append(await measure_idle(fleet, plan.idle))
    return Results(starts=starts, memory=memory, calls=calls, idle_busy_cores=statistics.mean([busy, memory[0].busy_cores]))


def plain(results: Results) -> dict[str, object]:
    """As JSON has it: every sample of every cell."""
    calls = [key._asdict() | asdict(samples) for key, samples in results.calls.items()]
    memory = [asdict(row) for row in results.memory]
    return {"calls": calls, "memory": memory, "starts": results.starts, "idle_busy_cores": results.idle_busy_cores}


def stop_on_term() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def plan_of(arguments: argparse.Namespace) -> Plan:
    if not arguments.quick:
        return Plan(idle=arguments.idle, large=arguments.large, rounds=arguments.rounds or 3)
    return Plan(sizes=(1, 50), rounds=arguments.rounds or 1, seconds=0.5, starts=5, idle=arguments.idle, large=arguments.large)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 50 sandboxes, one round")
    parser.add_argument("--idle", type=int, default=0, help="also hold so many idle sandboxes")
    parser.add_argument("--large", type=int, default=1, help="move 50 MB files with up to so many sandboxes at once (minutes)")
    parser.add_argument("--rounds", type=int, help="how often every row is measured")
    parser.add_argument("--json", type=Path, help="write every sample there")
    chosen = parser.parse_args()
    results = uvloop.run(bench(plan_of(chosen)))
    show(results)
    if chosen.json:
        chosen.json.write_text(json.dumps(plain(results)))
