"""What every sandbox backend promises of commands: output, time, privileges."""

import asyncio
import hashlib
import re
import time

import pytest

from sandboxes.base import MARKER, MAX_OUTPUT_BYTES, ExecResult, Sandbox, SandboxBackend, SandboxError, SandboxUserError
from tests.sandbox_backends import CAP, HAVE_USERS, bash, count, named, spec

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]


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
        pytest.param(["true", *["x" * 100_000] * 40], None, 126, id="four-megabytes-of-arguments"),
        pytest.param(["true", *["x" * 100_000] * 60], None, 126, id="six-megabytes-of-arguments"),
        pytest.param(["sh", "-c", "exit 5"], None, 5, id="exit-code"),
        pytest.param([""], None, 127, id="empty-name"),
        pytest.param(["/"], None, 126, id="a-directory"),
    ],
)
async def test_exit_codes(live: Sandbox, argv: list[str], workdir: str | None, code: int) -> None:
    result = await live.exec(argv, timeout_s=10, max_output_bytes=CAP, workdir=workdir)
    assert result.exit_code == code
    if code in (126, 127):
        assert result.stderr
        assert result.start_errno


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        pytest.param(["echo", "a\0b"], {}, id="argv"),
        pytest.param(["env"], {"A": "a\0b"}, id="env"),
    ],
)
async def test_a_nul_is_refused(live: Sandbox, argv: list[str], env: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="NUL"):
        await live.exec(argv, timeout_s=10, max_output_bytes=CAP, env=env)


@pytest.mark.parametrize("cap", [-1, MAX_OUTPUT_BYTES + 1])
async def test_a_cap_out_of_range_is_refused(live: Sandbox, cap: int) -> None:
    with pytest.raises(ValueError, match="max_output_bytes"):
        await live.exec(["true"], timeout_s=10, max_output_bytes=cap)


async def test_stdin_of_any_size(live: Sandbox) -> None:
    sent = bytes(range(256)) * 12_000
    result = await live.exec(["sha256sum"], timeout_s=20, max_output_bytes=CAP, stdin=sent)
    assert result.stdout.split()[0].decode() == hashlib.sha256(sent).hexdigest()


async def test_stdin_that_is_not_read(live: Sandbox) -> None:
    result = await live.exec(["echo", "fine"], timeout_s=20, max_output_bytes=CAP, stdin=b"x" * 3_000_000)
    assert result.stdout == b"fine\n"


async def test_binary_output_is_exact(live: Sandbox) -> None:
    content = bytes(range(256)) * 64
    result = await live.exec(
        ["sh", "-c", "cat; cat /dev/null >&2; printf '\\000\\377' >&2"], timeout_s=20, max_output_bytes=CAP, stdin=content
    )
    assert (result.stdout, result.stderr) == (content, b"\0\xff")


async def test_large_output_is_exact(live: Sandbox) -> None:
    result = await bash(live, "head -c 20000000 /dev/zero | tr '\\0' x", cap=MAX_OUTPUT_BYTES)
    assert not result.truncated
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(b"x" * 20_000_000).digest()
    assert (await bash(live, "echo fine", cap=MAX_OUTPUT_BYTES)).stdout == b"fine\n"


async def test_each_output_has_its_cap(live: Sandbox) -> None:
    result = await bash(live, "seq 50000; seq 50000 >&2", cap=1000)
    assert result.truncated
    for output in (result.stdout, result.stderr):
        assert output.startswith(b"1\n2\n")
        assert output.endswith(b"50000\n")
        assert len(output) < 1100


async def test_a_cap_of_nothing(live: Sandbox) -> None:
    assert (await bash(live, "true", cap=0)).stdout == b""
    assert (await bash(live, "echo x", cap=0)).truncated


async def test_a_call_for_a_user_that_is_not_there(live: Sandbox) -> None:
    with pytest.raises(SandboxUserError, match="nosuchuser"):
        await bash(live, "id", user="nosuchuser")
    assert (await bash(live, "id -u", user="root")).stdout == b"0\n"


@pytest.mark.parametrize(("user", "ids"), [("nobody", b"65534 65534\n"), ("1234:2345", b"1234 2345\n"), ("1234", b"1234 ")])
async def test_a_call_has_its_user(kind: str, live: Sandbox, user: str, ids: bytes) -> None:
    if kind not in HAVE_USERS:
        with pytest.raises(SandboxUserError):
            await bash(live, "id", user=user)
        return
    script = "echo $(id -u) $(id -g); touch /etc/mine 2>/dev/null && echo WROTE; grep -E '^(CapEff|CapBnd)' /proc/self/status"
    result = await bash(live, script, user=user)
    assert result.stdout.startswith(ids)
    assert b"WROTE" not in result.stdout
    assert set(re.findall(rb"Cap.*:\s*(\S+)", result.stdout)) == {b"0" * 16}
    assert (await bash(live, "id -u; cd /; x=1", user=user, session=f"of-{user.replace(':', '-')}")).stdout == ids.split()[0] + b"\n"


@pytest.mark.parametrize(
    ("script", "timeout_s", "cap", "code", "stdout"),
    [
        pytest.param("printf 'ok\\377\\360end\\n'", 10, CAP, 0, "ok\ufffd\ufffdend\n", id="case-020"),
        pytest.param("sleep 45 & echo started", 30, CAP, 0, "started\n", id="case-026"),
        pytest.param("read -r answer; echo rc=$? answer=[$answer]", 20, CAP, 0, "rc=1 answer=[]\n", id="case-028"),
        pytest.param("echo one; sleep 60; echo two-never", 2, CAP, None, "one\n", id="case-030"),
        pytest.param("exec >&- 2>&-; sleep 0.3", 10, CAP, 0, "", id="closes-its-outputs"),
        pytest.param("(sleep 0.1; echo late) & echo early; wait", 10, CAP, 0, "early\nlate\n", id="waits-for-its-child"),
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


async def test_two_hundred_at_once(backend: SandboxBackend) -> None:
    sandbox = await backend.create(spec(pids=512), name=named())
    results = await asyncio.gather(*(bash(sandbox, f"echo {n}; exec sleep 0.3", shell="sh", timeout_s=30) for n in range(200)))
    assert [(result.exit_code, result.stdout) for result in results] == [(0, f"{n}\n".encode()) for n in range(200)]
    await sandbox.destroy()


async def test_no_place_for_a_process_is_a_result_or_an_error_and_passes(live: Sandbox) -> None:
    """More calls than the sandbox may have processes."""
    calls = [bash(live, "sleep 0.3", timeout_s=20) for _ in range(150)]
    for told in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(told, ExecResult) or type(told) is SandboxError
    assert (await bash(live, "echo fine")).stdout == b"fine\n"


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
        pytest.param("kill -9 1; kill -TERM 1; kill -STOP 1; sleep 0.1; false", id="kill-the-first-process"),
        pytest.param("cat /proc/1/environ /proc/1/mem /proc/1/maps || head -c1 /proc/1/exe", id="read-the-first-process"),
        pytest.param("test -e /.rollway/agent && { echo x > /.rollway/agent || rm -rf /.rollway/agent; }", id="change-the-agent"),
        pytest.param("unshare --user true", id="unshare-user"),
        pytest.param("unshare --mount true", id="unshare-mount"),
        pytest.param("nsenter --target 1 --net true", id="nsenter"),
        pytest.param("mknod /tmp/disk b 8 0", id="device"),
        pytest.param("ls /var/run/docker.sock /run/docker.sock", id="engine-socket"),
        pytest.param("chroot / true", id="chroot"),
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
