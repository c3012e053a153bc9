"""Many calls at once over one stream to a sandbox's agent; survives the stream.

What must always hold:

* A call that was sent and whose answer did not come is asked for again, by its id, on the next connection: the agent starts it once.
* Every call ends: by its answer, by its own deadline, or with a SandboxError within the channel's patience after the agent fell silent.
* A call that is cancelled is killed before the cancellation leaves, as far as the sandbox can still be reached; one that others can ask
  for by its id goes on.
* A channel that was fenced, or whose sandbox is gone, stays so. Idle, it has no task and no timer.
"""

import asyncio
import hashlib
import logging
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sandboxes.base import SandboxError, SandboxFencedError, SandboxLostError
from sandboxes.channel_attachment import Attachment, Patience
from sandboxes.channel_calls import Call, Incoming, Outgoing
from sandboxes.channel_link import Link
from sandboxes.frames import (
    DURABLE,
    MAX_PAYLOAD_BYTES,
    Frame,
    MalformedError,
    Pong,
    Result,
    Run,
    Type,
    encode,
    pack_calls,
    pack_configure,
    pack_credit,
    pack_run,
    unpack_error,
    unpack_pong,
    unpack_result,
    unpack_u64,
)
from sandboxes.line import Line
from sandboxes.shielding import to_the_end

logger = logging.getLogger(__name__)

_RESULT_HEAD_BYTES = 1024
_STDERR_OF_FILES_BYTES = 4096
_AT_ONCE_BYTES = 65_536
"""A result of this size is dropped in the agent at once; smaller ones with the next call."""
_PIECE_BYTES = 65_536
_ASKED_BY: Mapping[int, Type] = {Type.RESULT: Type.RUN, Type.DATA: Type.RUN, Type.GIVEN: Type.RUN, Type.PONG: Type.PING}


class RefusedError(SandboxError):
    """The agent refused one request; `code` is a `frames.Refusal`. The sandbox is well."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class StreamLostError(SandboxError):
    """The connection broke in the middle of a stream of bytes. The sandbox is well; ask again from the start."""


def wire_id(call_id: str) -> int:
    """The number that stands for a caller's id on the wire, the same in every process."""
    return int.from_bytes(hashlib.blake2b(call_id.encode(errors="surrogatepass"), digest_size=8).digest(), "little") or 1


class Channel:
    """The calls of one attacher to one sandbox."""

    def __init__(self, line: Line, *, fence: int = 0, boot_id: str | None = None, patience: Patience = Patience()) -> None:
        self._line = line
        self._patience = patience
        self._at = Attachment(
            line,
            fence=fence,
            boot_id=boot_id,
            patience=patience,
            handle=self._handle,
            attached=self._attached,
            lost=self._lost,
            failed=self._fail_all,
        )
        self._calls: dict[int, Call] = {}
        self._returned: list[int] = []
        self._forget: list[int] = []
        self._forgotten: deque[int] = deque(maxlen=256)
        """Said to be forgotten lately: said again on the next connection, for the last words of a broken one may be lost."""
        self._watch: asyncio.TimerHandle | None = None
        self._heard = True
        self._silent = 0
        self._held = 0

    @property
    def boot_id(self) -> str:
        """Known once `open` returned."""
        return self._at.boot_id or ""

    async def open(self) -> None:
        """Attach.

        Raises:
            SandboxLostError: it is gone, or another boot than the one that was given.
            SandboxFencedError: a later lease holds it.
            SandboxError: it could not be reached.
        """
        await self._at.open()

    async def aclose(self, why: SandboxError | None = None) -> None:
        """Let go of the agent: what waits here ends with `why`, else a SandboxError; what runs there goes on."""
        await self._at.aclose(why or SandboxError(f"{self._line.id}: its channel was closed"))
        if self._watch is not None:
            self._watch.cancel()

    async def run(self, run: Run, *, call_id: str | None = None, stdin: bytes | AsyncIterable[bytes] | None = None) -> Result:
        """Have the agent run it, at most once, and wait for its end. Without `call_id` nobody can ask for its result again.

        `stdin` is needed for the kinds that read one: at its end at once where it is b"".

        Raises:
            RefusedError: the agent would not.
            SandboxError: as `open`, or the result did not come in time.
            ValueError: a NUL in a string, more than a message holds.
        """
        number = secrets.randbits(64) | 1 if call_id is None else wire_id(call_id)
        while other := self._calls.get(number):
            await asyncio.wait((other.answer,))
        call = Call(
            number, Type.RUN, pack_run(run), flags=DURABLE, deadline=self._due(run), max_answer_bytes=_RESULT_HEAD_BYTES + 2 * run.cap
        )
        call.ours = call_id is None
        if stdin is not None:
            call.outgoing = Outgoing()
            if isinstance(stdin, bytes) and len(stdin) <= _PIECE_BYTES:
                call.outgoing.feed(stdin)
                call.outgoing.end()
                stdin = None
        try:
            self._send(call)
            if stdin is not None:
                await self._pour(_slices(stdin) if isinstance(stdin, bytes) else stdin, call)
            result: Result = await call.answer
        finally:
            if self._calls.get(number) is call:
                if call_id is None:
                    await self._leave(call)
                else:
                    del self._calls[number]  # it goes on: killed, it would be run again for whoever asks next
        return result

    async def data(self, run: Run, check: Callable[[Result], None]) -> AsyncGenerator[bytes, None]:
        """The bytes that a call of kind PACK or READ gives, as they come; `check` sees its end. Leaving early kills it.

        Raises:
            StreamLostError: the connection broke; what was on it is gone.
            SandboxError: as `run`.
        """
        call = Call(
            secrets.randbits(64) | 1, Type.RUN, pack_run(run), deadline=self._due(run), max_answer_bytes=_RESULT_HEAD_BYTES + 2 * run.cap
        )
        call.incoming = incoming = Incoming(lambda count: self._write(Type.CREDIT, call.id, pack_credit(count)))
        try:
            self._send(call)
            async for piece in incoming.pieces():
                yield piece
            check(await call.answer)
        finally:
            if call.id in self._calls:
                await self._leave(call)

    async def configure(self, *, user: str = "", workdir: str = "", env: Mapping[str, str], disk_mib: int = 0, inodes: int = 0) -> None:
        """What holds for every later call: whose they are, where, in which environment, and how much disk they may fill (0: unwatched)."""
        await self._ask(Type.CONFIGURE, pack_configure(disk_mib=disk_mib, inodes=inodes, user=user, workdir=workdir, env=env))

    async def kill_all(self) -> None:
        """Every process but the agent is dead when this returns."""
        await self._ask(Type.KILL_ALL)

    async def ping(self) -> Pong:
        """How the sandbox is."""
        pong: Pong = await self._ask(Type.PING)
        return pong

    def forget(self) -> None:
        """The results that were returned under a `call_id` are needed no more: said with the next call."""
        self._forget += self._returned
        self._returned.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While the sandbox is stopped on purpose (a snapshot): its silence means nothing."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    # What is sent

    async def _ask(self, kind: Type, payload: bytes = b"") -> Any:
        call = Call(secrets.randbits(64) | 1, kind, payload, deadline=self._now() + self._patience.slack_s)
        try:
            self._send(call)
            return await call.answer
        finally:
            self._calls.pop(call.id, None)

    def _send(self, call: Call) -> None:
        link = self._at.link
        if self._at.over is not None:
            raise _again(self._at.over)
        self._calls[call.id] = call
        if link is None:
            self._at.recover()
            return
        data = call.request(link.channel)
        link.write(self._forgetting(link) + data if self._forget else data)
        self._arm()

    def _write(self, kind: Type, call: int, payload: bytes = b"") -> None:
        if self._at.link is not None:
            self._at.link.write(encode(kind, self._at.link.channel, call, payload))

    def _forgetting(self, link: Link) -> bytes:
        """The frames that drop what is needed no more."""
        gone, self._forget = self._forget, []
        self._forgotten.extend(gone)
        most = MAX_PAYLOAD_BYTES // 8
        pieces = (gone[start : start + most] for start in range(0, len(gone), most))
        return b"".join([encode(Type.FORGET, link.channel, payload=pack_calls(piece)) for piece in pieces])

    async def _pour(self, content: AsyncIterable[bytes], call: Call) -> None:
        """Feed `content` to the call as it takes it; stop where the call is over before."""
        assert call.outgoing is not None
        async for piece in content:
            for start in range(0, len(piece), _PIECE_BYTES):
                if not await call.outgoing.room():
                    return
                call.outgoing.feed(memoryview(piece)[start : start + _PIECE_BYTES])
                self._push(call)
        call.outgoing.end()
        self._push(call)

    def _push(self, call: Call) -> None:
        if self._at.link is not None:
            self._at.link.write(call.stdin(self._at.link.channel))

    async def _leave(self, call: Call) -> None:
        """Kill a call whose caller goes; it is over in the sandbox when this returns, or the sandbox cannot be reached."""
        call.killed, call.answer = True, asyncio.get_running_loop().create_future()
        self._write(Type.KILL, call.id)
        try:
            await to_the_end(self._left(call))
        except SandboxError as error:
            logger.warning("a cancelled call may still run in %s: %s", self._line.id, error)
        finally:
            if self._calls.pop(call.id, None) is not None:
                (self._forget if call.ours else self._returned).append(call.id)

    async def _left(self, call: Call) -> None:
        try:
            async with asyncio.timeout(self._patience.kill_s):
                await call.answer
        except RefusedError:
            return  # it never began
        except TimeoutError as error:
            raise SandboxError(f"it did not end within {self._patience.kill_s:g} s") from error

    # What arrives

    def _handle(self, frame: Frame) -> None:
        self._heard = True
        if frame.type == Type.FENCED:
            self._at.end(SandboxFencedError(f"{self._line.id}: the holder of another lease attached to it"))
            return
        if frame.type == Type.LOST:
            self._lost("its agent lost the stream")
            return
        call = self._calls.get(frame.call)
        if call is None:
            return
        try:
            self._answered(call, frame)
        except MalformedError as error:
            self._finish(call, SandboxError(f"{self._line.id}: its agent answers nonsense: {error}"))

    def _answered(self, call: Call, frame: Frame) -> None:
        if _ASKED_BY.get(frame.type, call.kind) != call.kind:
            raise MalformedError(f"a frame of type {frame.type} for a call of type {call.kind}")
        match frame.type:
            case Type.RESULT:
                whole = call.part(frame)
                if whole is not None:
                    self._finish(call, unpack_result(whole), len(whole))
                    self._at.progressed()
            case Type.DATA:
                if call.incoming is not None and not call.incoming.feed(frame.payload):
                    raise MalformedError("more data than it was allowed")
            case Type.GIVEN:
                if call.outgoing is not None:
                    call.outgoing.allow(unpack_u64(frame.payload))
                    self._push(call)
            case Type.ERROR:
                code, text = unpack_error(frame.payload)
                self._finish(call, RefusedError(f"{self._line.id}: {text or f'refused with code {code}'}", code=code))
            case Type.DONE if call.kind in (Type.CONFIGURE, Type.KILL_ALL):
                self._finish(call, None)
            case Type.PONG:
                self._finish(call, unpack_pong(frame.payload))

    def _finish(self, call: Call, outcome: object, size: int = 0) -> None:
        self._calls.pop(call.id, None)
        if call.kind == Type.RUN:
            (self._forget if call.ours else self._returned).append(call.id)
        call.finish(outcome)
        if size >= _AT_ONCE_BYTES and call.ours and (link := self._at.link) is not None:
            link.write(self._forgetting(link))

    def _fail_all(self, error: SandboxError) -> None:
        for call in list(self._calls.values()):
            self._finish(call, _again(error))

    # The connection

    def _attached(self, link: Link) -> None:
        self._heard, self._silent = True, 0
        self._forget = [*self._forgotten, *self._forget]
        if self._forget:
            link.write(self._forgetting(link))
        for call in list(self._calls.values()):
            call.rewind()
            link.write(call.request(link.channel))
        self._arm()

    def _lost(self, reason: str) -> None:
        self._at.cut(reason)
        for call in list(self._calls.values()):
            if call.incoming is not None and not call.killed:
                self._finish(call, StreamLostError(f"{self._line.id}: the connection broke while its data came: {reason}"))
        if self._calls:
            self._at.recover()

    # Time

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _due(self, run: Run) -> float:
        return self._now() + run.timeout_ms / 1000 + self._patience.slack_s if run.timeout_ms else math.inf

    def _arm(self) -> None:
        if self._watch is None and self._calls:
            self._watch = asyncio.get_running_loop().call_later(self._patience.tick_s, self._tick)

    def _tick(self) -> None:
        """Runs only while calls wait: gives up those that are overdue, and a connection on which nothing is heard."""
        self._watch = None
        if not self._held:
            self._give_up_overdue()
            self._listen()
        self._arm()

    def _give_up_overdue(self) -> None:
        now = self._now()
        for call in [call for call in self._calls.values() if call.deadline < now]:
            self._finish(call, SandboxError(f"{self._line.id}: its agent did not answer in time"))

    def _listen(self) -> None:
        self._silent = 0 if self._heard else self._silent + 1
        self._heard = False
        if self._at.link is None or not self._calls:
            return
        if self._silent > 2:
            self._lost(f"its agent was silent for {3 * self._patience.tick_s:g} s")
        elif self._silent:
            self._write(Type.PING, 0)


async def _slices(data: bytes) -> AsyncGenerator[bytes, None]:
    yield data


def _again(error: SandboxError) -> SandboxError:
    """The same error for one more caller: one raised twice would gather the traces of all."""
    if isinstance(error, SandboxLostError):
        return SandboxLostError(str(error), by_command=error.by_command)
    return type(error)(str(error)) if type(error) in (SandboxError, SandboxFencedError) else error
