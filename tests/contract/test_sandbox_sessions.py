"""What every sandbox backend promises of sessions: a shell that lasts between calls."""

import asyncio

import pytest

from sandboxes.base import Sandbox
from tests.sandbox_backends import CAP, bash, count, named

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

both_shells = pytest.mark.parametrize("shell", ["bash", "sh"])


async def test_bash_session_lasts(live: Sandbox) -> None:
    begun = await bash(live, "cd /usr; x='a b'; declare -a l=(1 '2 3'); f() { echo \"f $1\"; }; export E=e; set -o pipefail", session="s1")
    assert (begun.exit_code, begun.stderr) == (0, b"")
    told = await bash(live, 'pwd; echo "$x" "${l[1]}"; f y; printenv E; [[ -o pipefail ]] && echo on; (exit 4)', session="s1")
    assert told.stdout.decode().splitlines() == ["/usr", "a b 2 3", "f y", "e", "on"]
    assert told.exit_code == 4


async def test_sh_session_lasts(live: Sandbox) -> None:
    await bash(live, "cd /usr; x='a b'; f() { echo \"f $1\"; }; export E=e; set -u; umask 027", session="p1", shell="sh")
    told = await bash(live, 'pwd; echo "$x"; f y; printenv E; umask; (exit 4)', session="p1", shell="sh")
    assert told.stdout.decode().splitlines() == ["/usr", "a b", "f y", "e", "0027"]
    assert told.exit_code == 4


@both_shells
async def test_jobs_and_open_files_last(live: Sandbox, shell: str) -> None:
    name = named()
    await bash(live, f"sleep 0.3 & job=$!; exec 7>/tmp/{name}; echo one >&7", session=name, shell=shell)
    told = await bash(live, f"echo two >&7; wait $job; echo rc=$?; cat /tmp/{name}", session=name, shell=shell)
    assert told.stdout == b"rc=0\none\ntwo\n"


@both_shells
@pytest.mark.parametrize(
    "script", ["echo '", 'echo "', "echo `", "echo $(", "echo \\", "# \\", "cat <<E\nx", "if true", "{ echo", "echo; }", "f() {"]
)
async def test_what_does_not_parse_costs_its_own_call_alone(live: Sandbox, shell: str, script: str) -> None:
    name = named()
    await bash(live, "x=kept", session=name, shell=shell)
    await bash(live, script, session=name, shell=shell)
    told = await bash(live, "echo $x; (exit 6)", session=name, shell=shell)
    assert (told.stdout, told.stderr, told.exit_code) == (b"kept\n", b"", 6)


async def test_a_script_that_never_ran_is_no_success(live: Sandbox) -> None:
    name = named()
    await bash(live, "exec 251<&-", session=name)
    told = await bash(live, "echo ran", session=name)
    assert told.exit_code != 0 or told.stdout == b"ran\n"


@both_shells
async def test_outputs_are_apart_and_exact(live: Sandbox, shell: str) -> None:
    told = await bash(live, "printf 'a\\000\\377b'; printf 'e\\001' >&2", session=named(), shell=shell)
    assert (told.stdout, told.stderr) == (b"a\0\xffb", b"e\1")


@both_shells
async def test_stdin_is_at_its_end(live: Sandbox, shell: str) -> None:
    told = await bash(live, "read -r answer; echo rc=$? [$answer]; cat; echo end", session=named(), shell=shell)
    assert told.stdout == b"rc=1 []\nend\n", "case-028"


@both_shells
@pytest.mark.parametrize(
    ("script", "code", "kept"),
    [
        pytest.param("exit 5", 5, "", id="exit"),
        pytest.param("set -e; false; echo no", 1, "", id="errexit"),
        pytest.param("exec true", 0, "", id="exec"),
        pytest.param("kill -9 $$", 137, "", id="killed"),
        pytest.param("nosuchprogram", 127, "kept", id="failure"),
        pytest.param("false; true", 0, "kept", id="success"),
        pytest.param("sleep 30", None, "", id="time-out"),
        pytest.param("unset PATH; cat() { :; }; printf() { :; }; alias echo=false", 0, "kept", id="redefined"),
    ],
)
async def test_session_ends_as_its_shell_does(live: Sandbox, shell: str, script: str, code: int | None, kept: str) -> None:
    name = named()
    await bash(live, "x=kept", session=name, shell=shell)
    assert (await bash(live, script, session=name, shell=shell, timeout_s=1)).exit_code == code
    assert (await bash(live, "\\echo $x", session=name, shell=shell)).stdout.decode().strip() == kept


@both_shells
async def test_a_syntax_error_is_a_result(live: Sandbox, shell: str) -> None:
    name = named()
    await bash(live, "x=kept", session=name, shell=shell)
    told = await bash(live, "if", session=name, shell=shell)
    assert told.exit_code == 2
    assert b"yntax error" in told.stderr
    # bash goes on, where other shells begin anew
    assert (await bash(live, "echo $x", session=name, shell=shell)).stdout in (b"kept\n", *([b"\n"] if shell == "sh" else []))


@both_shells
async def test_background_output_belongs_to_the_call_that_runs(live: Sandbox, shell: str) -> None:
    name = named()
    await bash(live, "(sleep 0.4; echo late) & echo now", session=name, shell=shell)
    assert (await bash(live, "wait; echo then", session=name, shell=shell)).stdout == b"late\nthen\n"


async def test_background_jobs_last_until_its_time_out(live: Sandbox) -> None:
    await bash(live, "sleep 941 >/dev/null 2>&1 & cd /tmp", session="s2")
    assert await count(live, "^sleep 941") == 1
    assert (await bash(live, "sleep 942", session="s2", timeout_s=1)).timed_out
    assert await count(live, "^sleep 94") == 0
    assert (await bash(live, "pwd", session="s2")).stdout == b"/work\n"


async def test_one_command_at_a_time(live: Sandbox) -> None:
    await bash(live, "n=0", session="s3")
    await asyncio.gather(*(bash(live, "n=$((n+1))", session="s3") for _ in range(4)))
    assert (await bash(live, "echo $n", session="s3")).stdout == b"4\n"


async def test_sessions_do_not_see_each_other(live: Sandbox) -> None:
    await bash(live, "x=1; cd /", session="s4")
    assert (await bash(live, "echo [$x]; pwd", session="s5")).stdout == b"[]\n/work\n"


async def test_long_script(live: Sandbox) -> None:
    assert (await bash(live, "#" + "x" * 300_000 + "\necho fine", session="s6")).stdout == b"fine\n"


async def test_long_output_is_cut(live: Sandbox) -> None:
    told = await bash(live, "seq 100000; echo END", session="s7", cap=4096)
    assert told.truncated
    assert told.stdout.startswith(b"1\n2\n")
    assert told.stdout.endswith(b"END\n")
    assert len(told.stdout) < 4200


async def test_stdin_cannot_be_given(live: Sandbox) -> None:
    with pytest.raises(ValueError, match="stdin"):
        await live.exec(["bash", "-c", "cat"], timeout_s=5, max_output_bytes=CAP, stdin=b"x", session="s8")


async def test_cancelling_ends_the_command(live: Sandbox) -> None:
    call = asyncio.create_task(bash(live, "sleep 931", session="s9", timeout_s=30))
    while await count(live, "^sleep 931") < 1:
        await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await count(live, "^sleep 931") == 0
    assert (await bash(live, "echo again", session="s9")).stdout == b"again\n"
