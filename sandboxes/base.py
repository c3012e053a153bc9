"""The sandbox contract: what a backend promises to whoever runs untrusted commands. It knows nothing of rollouts.

What must always hold (the conformance suite in tests/contract/ checks it against every backend):

* A non-zero exit, a time-out, a kill for memory and nonsense output are results. Only a sandbox that cannot do its work raises.
* `exec` ends on time whatever the command does: background children, stdin readers, pagers, fork bombs, endless or binary output.
* Defaults are safe: no network, no capabilities, no new privileges, limits on pids, memory, cpu and disk, no socket of the engine.
* Leaving `open` detaches; `destroy` removes. Teardown always reaches the removal, and removing what is gone is no error.

* SandboxError                this sandbox, or the backend, cannot do its work: infrastructure, never an observation
  + SandboxLostError          it is gone or dead; `poll` was asked before this was raised
  + SandboxFencedError        the holder of a later lease attached to it: stop, it is no longer ours
  + SandboxContentError       it is well, but what is in it refuses (full disk, no file): a model can cause this
    - SandboxTooLargeError    it is more than `max_bytes`
    - SandboxUserError        it has no such user
  + SandboxStartError         it did not start within its budget
    - SandboxSpecError        it can never start from this spec (unknown image, bad setup): the task's fault, do not retry
"""

from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

MARKER = "\n[... {omitted} bytes omitted ...]\n"
"""Stands between the head and the tail of an output that was cut."""

MAX_OUTPUT_BYTES = 32 * 2**20
"""The most that is kept of one output of one command."""

INODES_PER_MIB = 64
"""`disk_mib` bounds files in number too: a million empty ones harm a machine as much as their bytes."""

DEFAULT_ENV: Mapping[str, str] = {
    "DEBIAN_FRONTEND": "noninteractive",
    "GIT_PAGER": "cat",
    "PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LANG": "C.UTF-8",
    "HOME": "/root",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}


class SandboxError(Exception):
    """The sandbox could not do its work. The message names the sandbox and the cure where there is one."""


class SandboxLostError(SandboxError):
    """The sandbox is gone. `by_command`: it died while a command ran in it and the backend itself is well."""

    def __init__(self, message: str, *, by_command: bool = False) -> None:
        super().__init__(message)
        self.by_command = by_command


class SandboxFencedError(SandboxError):
    """The holder of a later lease is attached. Nothing more may be done here, removal included."""


class SandboxContentError(SandboxError):
    """The sandbox is well; what is in it refused a transfer or a user. Not infrastructure: a command in it can bring this about.

    `errno`: the kernel's reason (ENOENT, EISDIR, EACCES, ENOSPC, ...), where it gave one.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class SandboxTooLargeError(SandboxContentError):
    """More bytes than the caller allowed."""


class SandboxUserError(SandboxContentError):
    """The sandbox has no such user."""


class SandboxStartError(SandboxError):
    """The sandbox did not start."""


class SandboxSpecError(SandboxStartError):
    """The sandbox can never start from this spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is made from. `files` and `setup` are applied after the start, in this order."""

    image: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    setup: Sequence[str] = ()
    workdir: str = "/work"
    network: str = "none"
    """`none`, or `open` for whatever the machine reaches; whether that may be asked for is the operator's to say."""
    user: str | None = None
    """Name or `uid[:gid]`; None: the image's own."""
    capabilities: str = "none"
    """`none`, or `root`: root may give files away and become other users, as package managers and `adduser` want. Never more."""
    cpus: float = 1.0
    memory_mib: int = 512
    pids: int = 256
    disk_mib: int = 1024
    env: Mapping[str, str] = field(default_factory=dict)
    read_only: bool = False
    runtime: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)
    """Who owns it (tenant, job, rollout, attempt); the backend adds `rollway=<deployment id>`."""
    start_s: float = 120.0
    """Budget in wall time from the call to the first command."""
    lifetime_s: float = 7200.0
    """A hard end at the provider, where it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """One command's end. `exit_code` is 128 + n for signal n, and None when it ran out of time.

    stdout and stderr hold at most the cap each, head and tail with `MARKER` between, cut at UTF-8 borders; `truncated` says so.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool = False
    truncated: bool = False
    oom_killed: bool = False
    """A process of the sandbox was killed for memory while this ran."""
    disk_full: bool = False
    """It was killed since the sandbox's files outgrew `disk_mib` or its inodes."""
    start_errno: int | None = None
    """Why the program itself could not be started (`exit_code` is 126 or 127 then): tells it from a shell that says 126."""


class Sandbox(Protocol):
    """A live sandbox. Calls may overlap, except that one shell session runs one command at a time."""

    @property
    def id(self) -> str:
        """The backend's own id, enough to `attach` again from another process."""
        ...

    @property
    def boot_id(self) -> str:
        """Names this very life of its first process: another one knows nothing of the calls before."""
        ...

    @property
    def start_seconds(self) -> float:
        """Wall time from the first request to the backend to readiness, the wait for a place to start left out; 0.0 after `attach`."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        max_output_bytes: int,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        user: str | None = None,
        session: str | None = None,
        call_id: str | None = None,
    ) -> ExecResult:
        """Run `argv` to its end. stdin is at end-of-file unless given. `max_output_bytes`: of each output, at most `MAX_OUTPUT_BYTES`.

        A program that is not there is exit code 127, one that cannot be executed (or an argument too long for the kernel, or a working
        directory that is not there) 126, with the reason in stderr.
        With `session`, `argv` is `[shell, "-c", script]` (shell: bash or sh) and the script runs in the lasting shell of that name:
        directory, variables, functions, options, jobs and open files last between calls. What background jobs print belongs to the
        call that is running then. A session that ended (exit, exec, set -e) starts anew at the next call; so does one that ran out of
        time, and all of its processes are dead by then. `stdin` cannot be given with a session.
        Everything the command started is dead when this returns with `timed_out`. Cancelling kills the command's
        processes before the cancellation leaves.
        With `call_id`, the call runs at most once: its result is kept in the sandbox until `forget`, and asking again by this id, from
        any process, returns it, or waits for the command that still runs. Leaving such a call, be it by a lost connection or by
        cancelling, does not kill it: whoever asks next must find it run once. `kill_all` and `destroy` end it.

        Raises:
            SandboxLostError: the sandbox is gone.
            SandboxFencedError: it is another holder's now.
            SandboxUserError: no such user.
            SandboxError: the sandbox could not run the command at all.
            ValueError: a NUL in `argv` or `env`, `stdin` with a session, `max_output_bytes` out of range.
        """
        ...

    def forget(self) -> None:
        """Drop the kept results that were returned here so far: their journal entries are written. Sends no request of its own."""
        ...

    async def put(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        """Write files at absolute paths, parents made, owned by the sandbox's user; replaces what is there, never follows a link out.

        Raises:
            SandboxContentError: it does not fit, or something in the sandbox is in the way.
        """
        ...

    async def get(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        """A tar of these paths (missing ones left out, symlinks kept as links and never followed).

        Raises:
            SandboxTooLargeError: more than `max_bytes`.
        """
        ...

    async def put_tar(self, archive: bytes) -> None:
        """Unpack a tar made by `get` at `/`."""
        ...

    def read_file(self, path: str) -> AsyncIterator[bytes]:
        """The bytes of one file of any size, as they come; a link is followed.

        Raises:
            SandboxContentError: not there, a directory, not readable.
        """
        ...

    async def write_file(self, path: str, content: AsyncIterable[bytes], *, mode: int = 0o644) -> None:
        """Write one file of any size, as `put` does; until it is whole, what was there stays.

        Raises:
            SandboxContentError: it does not fit, or something in the sandbox is in the way.
        """
        ...

    async def snapshot(self, *, ttl_s: float) -> str:
        """Keep its files as they are, for `ttl_s` seconds: what `restore` takes. Memory and tmpfs are not part of it.

        Raises:
            SandboxError: this backend has no snapshots, or the engine failed.
        """
        ...

    async def processes(self) -> int:
        """How many processes live in it that `exec` started: idle shells of sessions and daemons included."""
        ...

    async def kill_all(self) -> None:
        """Kill every process that was started through `exec`, sessions and daemons included. The sandbox stays usable."""
        ...

    async def poll(self) -> bool:
        """Whether it is alive, asked from the backend."""
        ...

    async def detach(self) -> None:
        """Let go of it: what waits here ends with SandboxError, the sandbox and the calls that have ids go on. Idempotent."""
        ...

    async def destroy(self) -> None:
        """Remove it and everything in it. Idempotent; shielded from cancellation by the backend."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """One sandbox as the backend lists it."""

    id: str
    name: str
    labels: Mapping[str, str]
    age_s: float
    alive: bool


class SandboxBackend(Protocol):
    """Where sandboxes come from. A context manager: leaving closes connections, it destroys nothing."""

    name: str

    def open(self, spec: SandboxSpec, *, name: str, fence: int = 0) -> AbstractAsyncContextManager[Sandbox]:
        """`create`, and detach on leaving. `name` is chosen by the caller before the call and journaled first."""
        ...

    async def create(self, spec: SandboxSpec, *, name: str, fence: int = 0) -> Sandbox:
        """Make one, apply files and setup. `fence`: the caller's lease; later attachers need one at least as high.

        A failed start leaves nothing behind. A name that is taken by a sandbox with the same owner labels (a lost reply) is removed
        first; another owner's is an error.

        Raises:
            SandboxSpecError: unknown image, a setup command that fails: the message is the first error.
            SandboxStartError: not within `spec.start_s`, engine refused.
        """
        ...

    async def attach(self, sandbox_id: str, *, name: str | None = None, fence: int = 0, boot_id: str | None = None) -> Sandbox:
        """Find a live sandbox again from any process. The attacher before is ended.

        name: what it must be called: one of another name is somebody else's, and is left in peace.

        Raises:
            SandboxLostError: it is gone, is called otherwise, or is not the boot that `boot_id` names.
            SandboxFencedError: the holder of a later lease is attached.
        """
        ...

    async def restore(self, snapshot: str, spec: SandboxSpec, *, name: str, fence: int = 0) -> Sandbox:
        """A new sandbox with the files of a snapshot; `spec.files` and `spec.setup` are not applied again.

        Raises:
            SandboxLostError: the snapshot is gone.
            SandboxStartError: as `create`.
        """
        ...

    async def forget_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot. Idempotent. The sweep removes those past their time."""
        ...

    async def images(self) -> frozenset[str]:
        """References of the images that can be used without asking a registry."""
        ...

    async def disk_limits(self) -> str:
        """How `disk_mib` is kept here: `quota: ...` or `watch: ...`, in one sentence for an operator. Raises SandboxError."""
        ...

    async def list(self) -> Sequence[SandboxInfo]:
        """Every sandbox of this deployment."""
        ...

    async def sweep(
        self, *, keep: frozenset[str], older_than_s: float, keep_prefixes: tuple[str, ...] = (), only: frozenset[str] | None = None
    ) -> int:
        """Destroy this deployment's sandboxes that are older than `older_than_s` and whose name is not in `keep` and begins with none of
        `keep_prefixes`; how many. With `only`, none but those of these names: a caller who looked who owns what does not doom what was
        claimed, and so renamed, since. Also drops snapshots past their time."""
        ...

    async def ping(self) -> None:
        """Raises SandboxError with the cure when the backend cannot be reached."""
        ...

    async def aclose(self) -> None: ...
