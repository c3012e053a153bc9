"""What every sandbox backend promises, checked against a real engine and against real namespaces.

`live` is one sandbox for all tests of a backend that leave it usable; `backend.create` is for those that need their own.
"""

import asyncio
import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandboxes.base import (
    MARKER,
    ExecResult,
    Sandbox,
    SandboxBackend,
    SandboxContentError,
    SandboxError,
    SandboxLostError,
    SandboxSpec,
    SandboxSpecError,
    SandboxStartError,
)
from sandboxes.docker import DockerBackend
from sandboxes.process import ProcessBackend

IMAGE = "rollway-sandbox:1"
DEPLOYMENT = f"test-{uuid.uuid4().hex[:8]}"
LIVE = "live"
CAP = 65_536
PROCESSES = "for p in /proc/[0-9]*; do tr '\\000' ' ' < $p/cmdline 2>/dev/null; echo; done"

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]


def docker_host() -> str | None:
    return os.environ.get("ROLLWAY_DOCKER_HOST") or os.environ.get("DOCKER_HOST")


def has_engine() -> bool:
    """Asked once, through the command line client, with the image that the tests use."""
    if shutil.which("docker") is None:
        return False
    env = {**os.environ, **({"DOCKER_HOST": host} if (host := docker_host()) else {})}
    return subprocess.run(["docker", "image", "inspect", IMAGE], env=env, capture_output=True, check=False).returncode == 0


def has_namespaces() -> bool:
    """Root, and a kernel that lets it make namespaces."""
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "setpriv", "prlimit"))
    tried = ["unshare", "--mount", "--pid", "--net", "--fork", "true"]
    return os.geteuid() == 0 and tools and subprocess.run(tried, capture_output=True, check=False).returncode == 0


def make(kind: str, root: Path, *, answer_s: float = 30.0, deployment_id: str = DEPLOYMENT) -> DockerBackend | ProcessBackend:
    if kind == "docker":
        return DockerBackend(deployment_id=deployment_id, docker_host=docker_host(), answer_s=answer_s)
    return ProcessBackend(deployment_id=deployment_id, root=root, answer_s=answer_s)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}")]),
        pytest.param("process", marks=[pytest.mark.process, pytest.mark.skipif(not has_namespaces(), reason="needs root and namespaces")]),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("process-sandboxes")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(kind: str, root: Path) -> AsyncIterator[SandboxBackend]:
    async with make(kind, root) as made:
        yield made
        await made.sweep(keep=frozenset(), older_than_s=0)
        assert await made.list() == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(backend: SandboxBackend) -> Sandbox:
    return await backend.create(spec(), name=LIVE)


def spec(**changes: object) -> SandboxSpec:
    fields: dict[str, object] = {"image": IMAGE, "labels": {"owner": "a"}, "pids": 64, "memory_mib": 128, "disk_mib": 64, "start_s": 30.0}
    return SandboxSpec(**{**fields, **changes})  # type: ignore[arg-type]


def named() -> str:
    return f"own-{uuid.uuid4().hex[:8]}"


async def bash(sandbox: Sandbox, script: str, *, timeout_s: float = 20, cap: int = CAP, session: str | None = None) -> ExecResult:
    return await sandbox.exec(["bash", "-c", script], timeout_s=timeout_s, max_output_bytes=cap, session=session)


async def count(sandbox: Sandbox, pattern: str) -> int:
    """How many processes in the sandbox have a command line that matches."""
    return int((await bash(sandbox, f"{PROCESSES} | grep -c '{pattern}' || true")).stdout)


# Commands


async def test_exec_basics(live: Sandbox) -> None:
    result = await live.exec(
        ["bash", "-c", 'echo "out $A $1"; echo err >&2; pwd; cat; exit 3', "bash", "ü ' x"],
        timeout_s=10,
        max_output_bytes=CAP,
        stdin="grüße".encode(),
        env={"A": "1 2"},
        workdir="/tmp",
    )
    assert result.exit_code == 3
    assert result.stdout.decode() == "out 1 2 ü ' x\n/tmp\ngrüße"
    assert result.stderr == b"err\n"
    assert [result.timed_out, result.truncated, result.oom_killed] == [False, False, False]


@pytest.mark.parametrize(
    ("argv", "workdir", "code"),
    [
        pytest.param(["nosuchprogram"], None, 127, id="missing-program"),
        pytest.param(["/etc/passwd"], None, 126, id="no-program"),
        pytest.param(["true"], "/nowhere", 126, id="missing-directory"),
        pytest.param(["bash", "-c", "kill -9 $$"], None, 137, id="killed"),
        pytest.param(["bash", "-c", "kill -TERM $$"], None, 143, id="terminated"),
        pytest.param(["printf", "x" * 200_000], None, 126, id="argument-too-long"),
        pytest.param(["bash", "-c", "#" + "x" * 300_000 + "\nexit 5"], None, 5, id="long-script"),
    ],
)
async def test_exit_codes(live: Sandbox, argv: list[str], workdir: str | None, code: int) -> None:
    assert (await live.exec(argv, timeout_s=10, max_output_bytes=CAP, workdir=workdir)).exit_code == code


@pytest.mark.parametrize(
    ("script", "timeout_s", "cap", "code", "stdout"),
    [
        pytest.param("printf 'ok\\377\\360end\\n'", 10, CAP, 0, "ok\ufffd\ufffdend\n", id="case-020"),
        pytest.param("sleep 45 & echo started", 30, CAP, 0, "started\n", id="case-026"),
        pytest.param("read -r answer; echo rc=$? answer=[$answer]", 20, CAP, 0, "rc=1 answer=[]\n", id="case-028"),
        pytest.param("echo one; sleep 60; echo two-never", 2, CAP, None, "one\n", id="case-030"),
        pytest.param("exec >&- 2>&-; sleep 1", 10, CAP, 0, "", id="closes-its-outputs"),
    ],
)
async def test_output(live: Sandbox, script: str, timeout_s: float, cap: int, code: int | None, stdout: str) -> None:
    began = time.monotonic()
    result = await bash(live, script, timeout_s=timeout_s, cap=cap)
    assert (result.exit_code, result.timed_out) == (code, code is None)
    assert result.stdout.decode(errors="replace") == stdout
    assert time.monotonic() - began < 6


@pytest.mark.parametrize("name", ["DEBIAN_FRONTEND=noninteractive", "GIT_PAGER=cat", "PAGER=cat", "LANG=C.UTF-8", "HOME=/root"])
async def test_environment(live: Sandbox, name: str) -> None:
    environment = (await live.exec(["env"], timeout_s=10, max_output_bytes=CAP)).stdout.decode().splitlines()
    assert name in environment, "case-028"


async def test_endless_output(live: Sandbox) -> None:
    result = await bash(live, "yes 0123456789012345678901234567890123456789", timeout_s=10)
    assert result.truncated, "case-021"
    assert len(result.stdout) < 70_000
    assert result.exit_code != 0
    assert await count(live, "^yes ") == 0


async def test_head_and_tail(live: Sandbox) -> None:
    script = "i=1; while [ $i -le 20000 ]; do echo line $i; i=$((i+1)); done; echo FAILED tests/test_x.py::test_y; exit 3"
    result = await bash(live, script, timeout_s=30, cap=8192)
    assert result.exit_code == 3, "case-022"
    assert result.truncated
    assert result.stdout.startswith(b"line 1\n")
    assert b"FAILED tests/test_x.py::test_y" in result.stdout
    assert len(result.stdout) < 9000
    assert re.search(re.escape(MARKER).replace(r"\{omitted\}", r"\d+").encode(), result.stdout)


@pytest.mark.parametrize(
    ("script", "pattern"),
    [
        pytest.param("sh -c 'sleep 977 & sleep 978'", "^sleep 97[78]", id="case-027"),
        pytest.param("setsid sleep 981 & (setsid setsid sleep 982 &) ; sleep 983", "^sleep 98", id="setsid"),
        pytest.param(
            "env -i setsid sleep 991 & (env -i setsid sleep 992 &) ; trap '' TERM INT; sleep 993", "^sleep 99", id="shed-environment"
        ),
    ],
)
async def test_timeout_kills_the_tree(live: Sandbox, script: str, pattern: str) -> None:
    result = await bash(live, f"echo begun; {script}", timeout_s=1.5)
    assert result.timed_out
    assert result.exit_code is None
    assert result.stdout == b"begun\n"
    assert await count(live, pattern) == 0


async def test_prompt_loop(live: Sandbox) -> None:
    script = "while :; do echo '* Please enter some text.'; read -r x || sleep 0.01; done"
    result = await bash(live, script, timeout_s=3, cap=16_384)
    assert result.timed_out, "case-029"
    assert result.seconds < 8


async def test_fork_bomb_ends_and_the_sandbox_survives(live: Sandbox) -> None:
    result = await bash(live, "f() { f | f & }; f 2>/dev/null; sleep 30", timeout_s=2)
    assert result.timed_out
    assert (await bash(live, "echo fine")).stdout == b"fine\n"


async def test_background_of_one_call_survives_the_time_out_of_another(live: Sandbox) -> None:
    await bash(live, "sleep 971 >/dev/null 2>&1 &")
    assert (await bash(live, "sleep 30", timeout_s=1)).timed_out
    assert await count(live, "^sleep 971") == 1


async def test_cancelling_kills(live: Sandbox) -> None:
    call = asyncio.create_task(bash(live, "setsid sleep 961 & sleep 962", timeout_s=30))
    while await count(live, "^sleep 96") < 2:
        await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await count(live, "^sleep 96") == 0


async def test_twenty_at_once(live: Sandbox) -> None:
    results = await asyncio.gather(*(bash(live, f"echo {n}; sleep 0.2; echo {n} >&2", timeout_s=30) for n in range(20)))
    assert [(result.stdout, result.stderr) for result in results] == [(f"{n}\n".encode(), f"{n}\n".encode()) for n in range(20)]


async def test_kill_all(live: Sandbox) -> None:
    await bash(live, "setsid sleep 951 >/dev/null 2>&1 & sleep 952 >/dev/null 2>&1 &", session="main")
    assert await count(live, "^sleep 95") == 2
    await live.kill_all()
    assert await count(live, "^sleep 95") == 0
    assert await live.poll()


# What a command may and may not


async def test_privileges(live: Sandbox) -> None:
    status = (await bash(live, "cat /proc/self/status")).stdout.decode()
    for line in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert re.search(rf"^{line}:\s*0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s*1$", status, re.MULTILINE)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("mount -t tmpfs none /mnt", id="mount"),
        pytest.param("echo x > /proc/sys/kernel/core_pattern", id="sysctl"),
        pytest.param(
            "kill -9 1; kill -TERM 1; sleep 0.2; cat /proc/1/cmdline | grep -q rollway-init && exit 1", id="kill-the-first-process"
        ),
        pytest.param("ls /var/run/docker.sock /run/docker.sock", id="engine-socket"),
        pytest.param("chroot / true", id="chroot"),
        pytest.param("dd if=/dev/zero of=/tmp/full bs=1M count=100", id="disk"),
    ],
)
async def test_refused(live: Sandbox, script: str) -> None:
    assert (await bash(live, script)).exit_code != 0
    assert await live.poll()


async def test_no_network(live: Sandbox) -> None:
    script = (
        "for h in 1.1.1.1:53 169.254.169.254:80 172.17.0.1:2375; do"
        ' timeout 2 bash -c "</dev/tcp/${h%:*}/${h##*:}" 2>/dev/null && echo OPEN $h; done;'
        " ls /var/run/docker.sock 2>/dev/null; env | grep -ci -E 'key|token|secret|password'; true"
    )
    assert (await bash(live, script, timeout_s=30)).stdout.strip() == b"0", "case-080"


async def test_memory_kill_is_visible(live: Sandbox) -> None:
    result = await bash(live, "head -c 300m /dev/zero | tail > /dev/null; echo rc=$?", timeout_s=30)
    assert b"rc=137" in result.stdout, "case-038"
    assert result.oom_killed
    assert not (await bash(live, "echo after")).oom_killed


# Sessions


async def test_session_lasts(live: Sandbox) -> None:
    begun = await bash(live, "cd /usr; x='a b'; declare -a l=(1 '2 3'); f() { echo \"f $1\"; }; export E=e; set -o pipefail", session="s1")
    assert (begun.exit_code, begun.stderr) == (0, b"")
    told = await bash(live, 'pwd; echo "$x" "${l[1]}"; f y; printenv E; [[ -o pipefail ]] && echo on; (exit 4)', session="s1")
    assert told.stdout.decode().splitlines() == ["/usr", "a b 2 3", "f y", "e", "on"]
    assert told.exit_code == 4


@pytest.mark.parametrize(
    ("script", "code", "kept"),
    [
        pytest.param("exit 5", 5, "", id="exit"),
        pytest.param("set -e; false; echo no", 1, "", id="errexit"),
        pytest.param("exec true", 0, "", id="exec"),
        pytest.param("if", 2, "kept", id="syntax-error"),
        pytest.param("nosuchprogram", 127, "kept", id="failure"),
        pytest.param("sleep 30", None, "", id="time-out"),
    ],
)
async def test_session_ends_as_bash_does(live: Sandbox, script: str, code: int | None, kept: str) -> None:
    name = named()
    await bash(live, "x=kept", session=name)
    assert (await bash(live, script, session=name, timeout_s=2)).exit_code == code
    assert (await bash(live, "echo $x", session=name)).stdout.decode().strip() == kept


async def test_session_background_jobs_last_until_its_time_out(live: Sandbox) -> None:
    await bash(live, "sleep 941 >/dev/null 2>&1 & cd /tmp", session="s2")
    assert await count(live, "^sleep 941") == 1
    assert (await bash(live, "sleep 942", session="s2", timeout_s=1)).timed_out
    assert await count(live, "^sleep 94") == 0
    assert (await bash(live, "pwd", session="s2")).stdout == b"/work\n"


async def test_session_runs_one_command_at_a_time(live: Sandbox) -> None:
    await bash(live, "n=0", session="s3")
    await asyncio.gather(*(bash(live, "n=$((n+1))", session="s3") for _ in range(4)))
    assert (await bash(live, "echo $n", session="s3")).stdout == b"4\n"


# Files


@pytest.mark.parametrize("size", [0, 98_303, 98_304, 131_071, 131_072, 1_048_576], ids=lambda size: f"case-031-{size}")
async def test_put_and_get(live: Sandbox, size: int) -> None:
    content = bytes((i * 31 + 7) % 256 for i in range(1024)) * (size // 1024 + 1)
    content = content[:size]
    await live.put({"/tmp/deep/er/big.bin": content})
    told = await bash(live, "wc -c < /tmp/deep/er/big.bin; sha256sum < /tmp/deep/er/big.bin; stat -c '%u %a' /tmp/deep/er/big.bin")
    assert told.stdout.decode().split() == [str(size), hashlib.sha256(content).hexdigest(), "-", "0", "644"]
    packed = await live.get(["/tmp/deep", "/tmp/missing"], max_bytes=4_000_000)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        found = tar.extractfile("tmp/deep/er/big.bin")
        assert found is not None
        assert found.read() == content


async def test_put_replaces_and_follows_no_link(live: Sandbox) -> None:
    await bash(
        live,
        "mkdir -p /tmp/p/dir/full; cd /tmp/p; echo kept > target; ln -s target link; ln -s /nowhere dangling; touch dir/full/x",
    )
    await live.put({"/tmp/p/link": b"new", "/tmp/p/dangling": b"new", "/tmp/p/dir": b"new"}, mode=0o755)
    told = await bash(live, "cd /tmp/p; cat target link dangling dir; stat -c '%F %a' link dangling dir; ls -d /bin/.")
    assert told.stdout.decode().split("\n")[:2] == ["kept", "newnewnewregular file 755"]


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/", "/nul\0"])
async def test_put_refuses_such_paths(live: Sandbox, path: str) -> None:
    with pytest.raises(SandboxSpecError):
        await live.put({path: b""})


async def test_get_keeps_links_and_has_a_bound(live: Sandbox) -> None:
    await bash(
        live, "mkdir -p /tmp/g; ln -sfn /etc /tmp/g/etc; truncate -s 1T /tmp/g/huge 2>/dev/null || head -c 30000000 /dev/zero > /tmp/g/huge"
    )
    with tarfile.open(fileobj=io.BytesIO(await live.get(["/tmp/g/etc"], max_bytes=100_000))) as tar:
        assert [member.issym() for member in tar] == [True]
    with pytest.raises(SandboxContentError, match="100000 bytes"):
        await live.get(["/tmp/g"], max_bytes=100_000)
    assert await count(live, "^tar ") == 0


async def test_get_leaves_out_what_cannot_be_read(live: Sandbox) -> None:
    await bash(live, "mkdir -p /tmp/h; echo 1 > /tmp/h/closed; chmod 000 /tmp/h/closed; echo 2 > /tmp/h/open")
    with tarfile.open(fileobj=io.BytesIO(await live.get(["/tmp/h"], max_bytes=100_000))) as tar:
        assert "tmp/h/open" in tar.getnames()


async def test_put_tar_keeps_inside_its_paths(live: Sandbox) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, target in [
            ("tmp/t/good", tarfile.REGTYPE, ""),
            ("tmp/t/../../etc/climbed", tarfile.REGTYPE, ""),
            ("/etc/absolute", tarfile.REGTYPE, ""),
            ("tmp/t/link", tarfile.SYMTYPE, "/etc"),
            ("tmp/t/link/through", tarfile.REGTYPE, ""),
            ("tmp/t/hard", tarfile.LNKTYPE, "etc/passwd"),
            ("tmp/t/device", tarfile.CHRTYPE, ""),
        ]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, target, 0o4755
            tar.addfile(member)
    await live.put_tar(buffer.getvalue())
    told = await bash(live, "cd /tmp/t; ls; stat -c %a good; readlink link; ls /etc/climbed /etc/absolute /etc/through 2>/dev/null | wc -l")
    assert told.stdout.decode().split() == ["good", "link", "755", "/etc", "0"]


async def test_put_tar_refuses_nonsense(live: Sandbox) -> None:
    with pytest.raises(SandboxContentError):
        await live.put_tar(b"no tar at all")


async def test_a_full_disk_is_the_contents_fault(live: Sandbox) -> None:
    with pytest.raises(SandboxContentError):
        await live.put({"/tmp/big": b"x" * (65 * 2**20)})


# Lives


async def test_attach_from_another_backend(kind: str, root: Path, live: Sandbox) -> None:
    await bash(live, "cd /tmp; y=2", session="shared")
    async with make(kind, root) as other:
        again = await other.attach(live.id)
        assert again.start_seconds == 0.0
        assert (await bash(again, "pwd; echo $y", session="shared")).stdout == b"/tmp\n2\n"
        with pytest.raises(SandboxLostError):
            await other.attach("nosuch" + live.id)


async def test_open_detaches_and_destroy_is_idempotent(backend: SandboxBackend) -> None:
    name = named()
    async with backend.open(spec(setup=["echo hi > made"], files={"/work/f": b"1"}, env={"V": "v"}), name=name) as sandbox:
        assert (await bash(sandbox, "cat made f; echo $V")).stdout == b"hi\n1v\n"
        assert 0 < sandbox.start_seconds < 30
    (info,) = [info for info in await backend.list() if info.name == name]
    assert (info.alive, info.labels) == (True, {"owner": "a"})
    await asyncio.gather(sandbox.destroy(), sandbox.destroy())
    await sandbox.destroy()
    assert not await sandbox.poll()
    with pytest.raises(SandboxLostError) as lost:
        await bash(sandbox, "true")
    assert not lost.value.by_command
    with pytest.raises(SandboxLostError):
        await backend.attach(sandbox.id)


async def test_destroyed_while_a_command_runs(backend: SandboxBackend) -> None:
    sandbox = await backend.create(spec(), name=named())
    call = asyncio.create_task(bash(sandbox, "sleep 30", timeout_s=40))
    await asyncio.sleep(0.5)
    await sandbox.destroy()
    with pytest.raises(SandboxLostError) as lost:
        await call
    assert not lost.value.by_command


async def test_lost_by_its_own_command(backend: SandboxBackend) -> None:
    """Nothing but a debugger's tricks reaches the first process; they are enough to tell whose fault the loss was."""
    sandbox = await backend.create(spec(), name=named())
    script = (
        "import re\nmaps = open('/proc/1/maps').read()\nmemory = open('/proc/1/mem', 'r+b', 0)\n"
        "for start, end, mode in re.findall(r'^([0-9a-f]+)-([0-9a-f]+) (r.x.) .*(?:libc|bash)', maps, re.M):\n"
        "    memory.seek(int(start, 16))\n    memory.write(b'\\x00' * (int(end, 16) - int(start, 16)))\n"
    )
    with pytest.raises(SandboxLostError) as lost:
        await sandbox.exec(["python3", "-c", script], timeout_s=20, max_output_bytes=CAP)
    assert lost.value.by_command
    await sandbox.destroy()


async def test_nothing_is_left_for_the_next_of_the_same_name(backend: SandboxBackend) -> None:
    name = named()
    first = await backend.create(spec(), name=name)
    await bash(first, "echo secret > /tmp/left; echo 'alias ls=true' >> ~/.bashrc; (sleep 900 &); touch /work/.hidden; mkdir -p ~/.cache/x")
    await first.destroy()
    second = await backend.create(spec(), name=name)
    assert (await bash(second, "ls -A /tmp /work; ls ~/.cache 2>/dev/null; true")).stdout == b"/tmp:\n\n/work:\n", "case-039"
    assert await count(second, "^sleep 900") == 0
    assert first.id != second.id
    await second.destroy()


async def test_a_lost_create_reply_is_found_by_name(backend: SandboxBackend) -> None:
    name = named()
    first = await backend.create(spec(), name=name)
    second = await backend.create(spec(), name=name)
    assert [info.id for info in await backend.list() if info.name == name] == [second.id], "case-036"
    assert not await first.poll()
    with pytest.raises(SandboxStartError, match="another owner"):
        await backend.create(spec(labels={"owner": "b"}), name=name)
    assert await second.poll()
    await second.destroy()


async def test_failed_setup_leaves_nothing(backend: SandboxBackend) -> None:
    name = named()
    with pytest.raises(SandboxSpecError, match="no such thing"):
        await backend.create(spec(setup=["true", "echo no such thing >&2; exit 1"]), name=name)
    assert name not in [info.name for info in await backend.list()], "case-037"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"image": "rollway-nosuch:9"}, id="image"),
        pytest.param({"network": "host"}, id="network"),
        pytest.param({"workdir": "relative"}, id="workdir"),
        pytest.param({"runtime": "nosuch"}, id="runtime"),
        pytest.param({"memory_mib": 1}, id="memory"),
        pytest.param({"files": {"relative": b""}}, id="files"),
    ],
)
async def test_bad_specs(backend: SandboxBackend, changes: dict[str, object]) -> None:
    name = named()
    with pytest.raises(SandboxStartError) as refused:
        await backend.create(spec(**changes), name=name)
    # without a registry to ask, an unknown image may yet exist somewhere
    assert isinstance(refused.value, SandboxSpecError) or "image" in changes
    assert name not in [info.name for info in await backend.list()]


async def test_start_budget(backend: SandboxBackend) -> None:
    name = named()
    began = time.monotonic()
    with pytest.raises(SandboxStartError, match="within 2 s"):
        await backend.create(spec(setup=["sleep 60"], start_s=2.0), name=name)
    assert time.monotonic() - began < 15
    assert name not in [info.name for info in await backend.list()]


async def test_read_only(backend: SandboxBackend) -> None:
    sandbox = await backend.create(spec(read_only=True, files={"/work/f": b"1"}), name=named())
    told = await bash(
        sandbox, "cat f; touch /x /usr/x 2>/dev/null; echo $?; touch /tmp/x /root/x /work/x; echo $?; cd /tmp", session="main"
    )
    assert told.stdout == b"11\n0\n"
    assert (await bash(sandbox, "pwd", session="main")).stdout == b"/tmp\n"
    await sandbox.destroy()


async def test_sweep(kind: str, root: Path, live: Sandbox) -> None:
    async with make(kind, root, deployment_id=f"{DEPLOYMENT}-sweep") as backend:
        kept = await backend.create(spec(), name="kept-" + named())
        swept = await backend.create(spec(), name="swept-" + named())
        names = {info.name for info in await backend.list()}
        assert len(names) == 2, "case-035"
        assert await backend.sweep(keep=frozenset(), older_than_s=3600) == 0
        assert await backend.sweep(keep=frozenset(name for name in names if name.startswith("kept")), older_than_s=0) == 1
        assert (await kept.poll(), await swept.poll(), await live.poll()) == (True, False, True)
        assert await backend.sweep(keep=frozenset(), older_than_s=0) == 1


async def test_image_present_and_ping(backend: SandboxBackend) -> None:
    await backend.ping()
    assert await backend.image_present(IMAGE)
    assert not await backend.image_present("rollway-nosuch:9")


# Engines that fail


@pytest.mark.docker
async def test_an_engine_that_is_away() -> None:
    async with DockerBackend(deployment_id=DEPLOYMENT, docker_host="unix:///nowhere/docker.sock") as backend:
        with pytest.raises(SandboxError, match="ROLLWAY_DOCKER_HOST"):
            await backend.ping()
        with pytest.raises(SandboxStartError):
            await backend.create(spec(), name=named())


async def test_a_silent_engine(tmp_path: Path) -> None:
    """case-029: an engine that takes requests and never answers."""
    held: list[asyncio.StreamWriter] = []
    path = tmp_path / "silent.sock"
    async with await asyncio.start_unix_server(lambda _, writer: held.append(writer), path=path):
        async with DockerBackend(deployment_id=DEPLOYMENT, docker_host=f"unix://{path}", answer_s=1.0) as backend:
            began = time.monotonic()
            with pytest.raises(SandboxError, match="within 1 s"):
                await backend.attach("x")
            assert time.monotonic() - began < 8
        for writer in held:
            writer.close()
