"""What every sandbox backend promises of commands: output, time, privileges, sessions."""

import asyncio
import re
import time

import pytest

from sandboxes.base import MARKER, Sandbox
from tests.sandbox_backends import CAP, bash, count, named

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
