"""Drive one leased rollout: ask `next_step`, do it, journal it.

What always holds: everything recorded is in the journal before the next thing that changes something outside (a tool call, a sandbox, a
verdict); and a rollout leaves this module exactly one way: finished, restarted, handed back, cancelled, or lost with its lease.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from sandboxes.base import Sandbox, SandboxError
from service import journal
from service.errors import (
    InvalidError,
    JournalError,
    LeaseLostError,
    NotFoundError,
    TaskFaultError,
    UnavailableError,
    VerifierUnavailableError,
)
from service.journal import AnyEntry
from service.leases import Lease
from service.progress import Progress, tool_message
from service.records import FinishReason, StopReason, TaskSpec
from service.replay import replayed
from workers import loop, metrics
from workers.attempt_sandbox import AttemptSandbox, way_back
from workers.encoding import off_loop
from workers.endings import DESTROYED, FencedError, HandBackError, RestartError, because, end_attempt, ended, stale_environment
from workers.replies import replied
from workers.resources import JobContext, Resources
from workers.sampling import sampled
from workers.tools import error_observation, run_call, tool_specs
from workers.verifier import Verdict, verify

logger = logging.getLogger(__name__)

MAX_EMPTY_ABORTS = 300
EMPTY_ABORT_PAUSE_S = 2.0
"""Together about ten minutes: longer than a weight update takes."""
MAX_EXPIRIES = 10
"""An attempt whose lease ran out this often may be what kills its workers: it ends, and its journal with it."""


@dataclass(slots=True)
class Hold:
    """What the worker and the rollout it drives tell each other."""

    cancelled: bool = False
    """The client ended the rollout: nobody will resume in its sandbox."""
    ended: bool = False
    """The rollout wrote its end: its lease is no longer there to be renewed, and it only cleans up."""


async def drive(lease: Lease, resources: Resources, hold: Hold) -> None:
    """Run `lease` to whichever end it comes to. Never raises but CancelledError (the lease is lost, or the worker leaves)."""
    if lease.expiries >= MAX_EXPIRIES:
        hold.ended = True
        await end_attempt(lease, resources, RestartError(f"worker_lost: {lease.expiries} leases of this attempt ran out", retry=True))
        return
    try:
        task = await resources.groups.task(lease.group_id)
        context = await resources.contexts.get(lease.job_id)
        await Rollout(lease, task, context, resources, hold).run()
    except LeaseLostError:
        logger.info("%s is no longer ours", lease.rollout_id)
    except NotFoundError:
        logger.info("%s is gone", lease.rollout_id)
    except UnavailableError as error:
        logger.warning("%s left to its lease: %s", lease.rollout_id, error)
    except InvalidError as error:
        await end_attempt(lease, resources, RestartError(f"this worker cannot load the job: {error.detail}", retry=True))
    except Exception as error:  # the one place where a bad rollout becomes data
        logger.exception("%s failed", lease.rollout_id)
        await end_attempt(lease, resources, RestartError(f"internal: {type(error).__name__}: {error}", retry=True))


class Rollout:
    """One leased attempt. `run` is its whole life."""

    def __init__(self, lease: Lease, task: TaskSpec, context: JobContext, resources: Resources, hold: Hold) -> None:
        self._lease = lease
        self._hold = hold
        self._task = task
        self._context = context
        self._resources = resources
        self._tools = tool_specs(task)
        self._progress = Progress()
        self._unwritten: list[AnyEntry] = []
        self._sandbox = AttemptSandbox(lease, task, resources)
        self._empty_aborts = 0

    # ------------------------------------------------------------------------------------------------------------------ life

    async def run(self) -> None:
        try:
            await self._resume()
            while True:
                if self._resources.stopping.is_set():
                    raise HandBackError
                if isinstance(step := self._next_step(), loop.Finish):
                    break
                await self._do(step)
            await self._finish()
        except HandBackError:
            await self._hand_back()
        except RestartError as end:
            await self._restart(end)
        except TaskFaultError as error:
            await self._restart(RestartError(f"task: {error}", retry=False))
        except JournalError as error:
            await self._restart(RestartError(f"journal: {error}", retry=True))
        except FencedError:
            metrics.fenced.inc()
            self._sandbox.keep = True
            raise
        except LeaseLostError:
            self._sandbox.over = await self._nobodys()
            self._sandbox.keep = not self._sandbox.over
            raise
        except UnavailableError:
            self._sandbox.keep = True
            raise
        except asyncio.CancelledError:
            self._sandbox.over |= self._hold.cancelled
            self._sandbox.keep = not (self._hold.cancelled or self._hold.ended)
            raise
        finally:
            await self._sandbox.leave(self._progress.snapshot)

    async def _resume(self) -> None:
        entries = await self._resources.leases.journal(self._lease.rollout_id) if self._lease.resumed else []
        self._progress = replayed(entries)
        if not entries:
            lease, worker = self._lease, self._resources.worker
            self._record(journal.Opened(at=time.time(), attempt=lease.attempt, worker=worker, queued_s=lease.queued_s))
            if not self._task.sandbox.lazy and self._task.tools:
                await self._open_sandbox()
            return
        if (lost := await self._sandbox.resume(self._progress)) is not None:
            await self._restore(lost)
        if self._progress.verifier_name == "" and self._progress.scored is None and self._task.verifier is not None:
            crashed = self._lease.expiries > 0  # a worker that left in order is nobody's fault
            raise RestartError("verification in the rollout's own sandbox was interrupted", retry=True, counts=crashed)

    async def _finish(self) -> None:
        await self._flush()
        end = ended(self._progress)
        state = await self._resources.leases.finish(self._lease, end)
        self._hold.ended = self._sandbox.over = True
        metrics.rollouts.labels(end.outcome, end.stop_reason).inc()
        logger.info("ended: %s, reward %s; group %s", end.stop_reason, end.reward, state)

    async def _hand_back(self) -> None:
        self._sandbox.keep = True
        if self._progress.length:
            self._record(journal.HandedBack(at=time.time()))
        await self._flush()
        self._hold.ended = True
        await self._resources.leases.release(self._lease)

    async def _restart(self, end: RestartError) -> None:
        """The attempt's sandbox is removed by `run`; its name is never used again, since it holds the attempt."""
        self._unwritten.clear()
        self._hold.ended = True
        self._sandbox.over = await end_attempt(self._lease, self._resources, end)

    # --------------------------------------------------------------------------------------------------------------- journal

    def _record(self, *entries: AnyEntry) -> None:
        for entry in entries:
            self._progress.apply(entry)
            self._unwritten.append(entry)

    async def _flush(self) -> None:
        """Append everything recorded; waits while the store is away, until the lease's end cancels us.

        Not even a sandbox's intent waits for the disk of Redis (up to a second each): its name follows from rollout and attempt, so what a
        rollback of Redis forgets is still found by that name.
        """
        pause = 0.05
        while self._unwritten:
            at_index = self._progress.length - len(self._unwritten)
            try:
                await self._resources.leases.append(self._lease, self._unwritten, at_index=at_index)
            except UnavailableError as error:
                logger.warning("journal of %s not written, trying again: %s", self._lease.rollout_id, error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 2.0)
            else:
                self._unwritten = []
                if self._sandbox.live is not None:
                    self._sandbox.live.forget()

    # ----------------------------------------------------------------------------------------------------------------- steps

    def _next_step(self) -> loop.Step:
        record = self._context.record
        return loop.next_step(
            self._progress,
            self._task.limits,
            context_tokens=record.spec.model.context_tokens,
            snapshot=self._task.sandbox.snapshot,
            freshness=loop.freshness(record.spec, attempt=self._lease.attempt, lineage=record.lineage, version=record.policy_version),
        )

    async def _do(self, step: loop.Step) -> None:
        match step:
            case loop.OpenSample():
                await self._open_sample([m.model_dump(exclude_none=True) for m in self._task.messages])
            case loop.Generate(max_new_tokens=max_new_tokens):
                await self._generate(max_new_tokens)
            case loop.BeginAnew(versions=versions):
                raise stale_environment(versions)
            case loop.Snapshot():
                await self._snapshot()
            case loop.Parse(cut=cut):
                self._parse(cut=cut)
            case loop.Answer(call=call):
                await self._answer(call)
            case loop.Extend():
                await self._extend()
            case loop.Stop(reason=reason):
                self._record(journal.Stopped(at=time.time(), reason=reason))
            case loop.Verify():
                await self._verify()
            case loop.Finish():
                return

    async def _generate(self, max_new_tokens: int) -> None:
        cut = self._progress.finish is FinishReason.ABORT or self._empty_aborts > 0  # by a weight update, most likely: look who serves now
        self._context = await self._resources.contexts.get(self._lease.job_id, fresh=cut)
        if isinstance(step := self._next_step(), loop.BeginAnew):  # the version moved while a call ran
            raise stale_environment(step.versions)
        flushing = asyncio.create_task(self._flush())  # beside it: a generation changes nothing outside and can be sampled anew
        try:
            timeout_s = self._resources.settings.generate_timeout_s
            generation = await sampled(self._context, self._lease, self._task, self._progress.ids, max_new_tokens, timeout_s=timeout_s)
            await flushing
        finally:
            flushing.cancel()
            await asyncio.gather(flushing, return_exceptions=True)
        if generation.finish is FinishReason.ABORT and not generation.token_ids:
            await self._nothing_sampled()
            return
        self._empty_aborts = 0
        self._record(journal.generated(generation, at=time.time(), discard_cut=self._task.sampling.restarts))
        metrics.generated(len(generation.token_ids), generation.seconds, cut=generation.finish is FinishReason.ABORT)

    async def _nothing_sampled(self) -> None:
        """An abort before the first token (a weight update in mode abort): ask again shortly, journal nothing, but not for ever."""
        self._empty_aborts += 1
        if self._empty_aborts > MAX_EMPTY_ABORTS:
            raise RestartError(f"generator: aborted {self._empty_aborts} times without a token", retry=True)
        await asyncio.sleep(min(0.05 * self._empty_aborts, EMPTY_ABORT_PAUSE_S))

    def _parse(self, *, cut: bool) -> None:
        parsed = self._context.chat.parse(self._progress.turn_ids(), self._tools, cut=cut)
        self._record(replied(parsed, self._progress))
        metrics.turns.inc()

    async def _answer(self, call: journal.Call) -> None:
        if call.error is not None:
            self._record(error_observation(self._task, call))
            return
        if not loop.needs_sandbox(call):
            self._record(journal.Observed(at=time.time(), call_id=call.id, name=call.name, text="submitted", submitted=True))
            return
        sandbox = self._sandbox.live or await self._open_sandbox()
        await self._flush()
        timeout_s = min(self._task.limits.tool_s, max(1.0, self._task.limits.wall_s - self._progress.wall_s))
        try:
            observed = await run_call(sandbox, self._task, call, call_id=self._sandbox.call_id(call.id), timeout_s=timeout_s)
        except SandboxError as error:
            if not self._sandbox.stands_in(error):
                self._sandbox_failed(error)
            else:
                await self._restore(error)
        else:
            metrics.tool_seconds.observe(observed.seconds)
            self._record(observed)

    async def _open_sample(self, messages: list[dict[str, Any]]) -> None:
        ids = await off_loop(messages, partial(self._context.chat.prompt, messages, self._tools))
        self._record(journal.Prompted(at=time.time(), token_ids=journal.pack_ids(ids)))

    async def _extend(self) -> None:
        progress = self._progress
        assert progress.reply is not None
        observations = [tool_message(progress.observed[call.id]) for call in progress.reply.calls]
        extend = partial(self._context.chat.extend, progress.ids, progress.turn_start, observations, self._tools)
        suffix = await off_loop(observations, extend)
        if suffix is not None:
            self._record(journal.Extended(at=time.time(), token_ids=journal.pack_ids(suffix)))
            return
        await self._open_sample([m.model_dump(exclude_none=True) for m in self._task.messages] + progress.messages + observations)

    # --------------------------------------------------------------------------------------------------------------- sandbox

    async def _open_sandbox(self) -> Sandbox:
        self._record(journal.SandboxIntended(at=time.time(), backend=self._task.sandbox.backend, name=self._sandbox.name))
        await self._flush()
        sandbox = await self._sandbox.create()
        self._record(journal.SandboxOpened(at=time.time(), id=sandbox.id, seconds=sandbox.start_seconds, boot_id=sandbox.boot_id))
        await self._flush()
        return sandbox

    async def _snapshot(self) -> None:
        """The one before goes once the new one is journaled: there is always one to go back to."""
        before = self._progress.snapshot
        await self._flush()
        self._record(await self._sandbox.snapshot(self._progress))
        await self._flush()
        if before is not None and before is not self._progress.snapshot:
            await self._sandbox.forget(before)

    async def _restore(self, lost: SandboxError) -> None:
        """Go on from the last snapshot, as if what came after it had never been; its tokens count as discarded.

        Raises:
            RestartError: there is none, or it cannot be had.
        """
        back, sampled = way_back(self._progress, lost), self._progress.sampled
        self._record(journal.SandboxIntended(at=time.time(), backend=self._task.sandbox.backend, name=self._sandbox.name))
        await self._flush()
        self._record(await self._sandbox.restore(back, at_index=self._progress.snapshot_at))
        await self._flush()
        metrics.cut_tokens.inc(cut := sampled - self._progress.sampled)
        logger.warning("went back to the snapshot after turn %d, %d tokens discarded: %s", back.turns, cut, lost)

    def _sandbox_failed(self, error: SandboxError) -> None:
        """P6: what the model's own commands destroyed is tried once more; the second time it is the model's answer."""
        end = because(error, what="the sandbox")
        if end.reason != DESTROYED or self._lease.sandbox_losses == 0:
            raise end from error
        now = time.time()
        detail = msgspec.json.encode({"reason": DESTROYED, "message": str(error)[:500]}).decode()
        self._record(
            journal.SandboxLost(at=now, detail=str(error)[:500]),
            journal.Stopped(at=now, reason=StopReason.SANDBOX_DESTROYED),
            journal.Scored(at=now, reward=0.0, detail=detail, seconds=0.0),
        )

    async def _nobodys(self) -> bool:
        """Whether this attempt is over for everybody, so that no worker will resume in its sandbox."""
        try:
            record = await self._resources.groups.rollout(self._lease.rollout_id)
        except NotFoundError:
            return True
        except UnavailableError:
            return False
        return record.attempt != self._lease.attempt or record.state in ("cancelled", "failed", "ended")

    # ---------------------------------------------------------------------------------------------------------------- verdict

    async def _verify(self) -> None:
        fresh = self._task.verifier is not None and getattr(self._task.verifier, "sandbox", "fresh") == "fresh"
        self._record(journal.Verifying(at=time.time(), name=f"{self._sandbox.name}-v" if fresh else ""))
        await self._flush()
        started = time.monotonic()
        try:
            verdict = await self._verdict()
        except SandboxError as error:
            self._sandbox_failed(error)
            return
        detail = msgspec.json.encode(verdict.detail).decode()
        self._record(journal.Scored(at=time.time(), reward=verdict.reward, detail=detail, seconds=time.monotonic() - started))

    async def _verdict(self) -> Verdict:
        """Raises SandboxError: the sandbox failed, whoever's doing that was."""
        messages: list[dict[str, Any]] = [m.model_dump(exclude_none=True) for m in self._task.messages] + self._progress.messages
        try:
            async with self._resources.verifying:
                return await verify(
                    self._task,
                    sandbox=self._sandbox.live,
                    open_fresh=self._sandbox.fresh,
                    trajectory_messages=messages,
                    http=self._resources.http,
                    stop_reason=self._progress.stop_reason,
                )
        except TaskFaultError as error:
            raise RestartError(f"task: {error}", retry=False) from error
        except VerifierUnavailableError as error:
            raise RestartError(f"verifier: {error}", retry=True) from error
