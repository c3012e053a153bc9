"""What the agent's calls do, at the wire: processes and their ends, users, outputs, lasting shells."""

import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sandboxes.frames import Ended, How, Refusal, Run, Type
from tests.agent_attacher import AGENT, Attacher, PipedAgent, Refused

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="users, kills and namespaces need root"),
    pytest.mark.skipif(not AGENT.exists(), reason=f"no agent for this machine: {AGENT}"),
]

SHELLS = [pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"no {name} here")) for name in ("bash", "dash")]


@pytest.fixture(scope="module", params=[pytest.param(True, id="first"), pytest.param(False, id="not_first")])
def attached(request: pytest.FixtureRequest) -> Iterator[Attacher]:
    agent = PipedAgent(first=request.param)
    attacher = agent.attacher()
    attacher.hello()
    yield attacher
    agent.close()


def _all_running(attacher: Attacher) -> list[str]:
    return attacher.run(["ps", "-eo", "args"]).stdout.head.decode().splitlines()


def _running(attacher: Attacher) -> set[str]:
    return set(_all_running(attacher))


# How it ends.


def test_outputs_and_the_exit_code_come_apart(attached: Attacher) -> None:
    result = attached.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.how, result.code, result.stdout.head, result.stderr.head) == (How.EXITED, 3, b"out\n", b"err\n")


def test_a_signal_is_told(attached: Attacher) -> None:
    result = attached.run(["sh", "-c", "kill -TERM $$"])
    assert (result.how, result.code) == (How.SIGNALLED, 15)


@pytest.mark.parametrize(
    ("argv", "workdir", "reason", "flags"),
    [
        pytest.param(["no-such-program"], "", 2, 0, id="no program"),
        pytest.param([""], "", 2, 0, id="no name"),
        pytest.param(["/etc/passwd"], "", 13, 0, id="no program file"),
        pytest.param(["true"], "/no/such", 2, Ended.NO_WORKDIR, id="no directory"),
        pytest.param(["true"], "/etc/passwd", 20, Ended.NO_WORKDIR, id="no directory but a file"),
        pytest.param(["true", "x" * 200_000], "", 7, 0, id="an argument too long for the kernel"),
    ],
)
def test_what_does_not_start_says_why(attached: Attacher, argv: list[str], workdir: str, reason: int, flags: int) -> None:
    result = attached.run(argv, workdir=workdir)
    assert (result.how, result.code, result.flags) == (How.NOT_STARTED, reason, flags)


def test_stdin_is_given_whole(attached: Attacher) -> None:
    content = os.urandom(200_000)
    result = attached.run(["cat"], stdin=content, cap=2**20)
    assert result.stdout.head == content
    assert attached.run(["head", "-c", "5"], stdin=content).stdout.head == content[:5]
    assert attached.run(["cat"]).stdout.printed == 0


def test_what_a_call_leaves_behind_does_not_hold_it_up(attached: Attacher) -> None:
    began = time.monotonic()
    result = attached.run(["sh", "-c", "(sleep 987; echo late) & echo early"])
    assert result.stdout.head == b"early\n"
    assert time.monotonic() - began < 100
    assert any("sleep 987" in line for line in _running(attached))
    attached.send(Type.KILL_ALL, 5)
    assert attached.expect(Type.DONE).call == 5
    assert not any("sleep 987" in line for line in _running(attached))


_TREES = {
    "a child": "sleep 981 & wait",
    "a session leader": "setsid sleep 981 & wait; sleep 981",
    "a daemon": "(setsid sh -c 'sleep 981 & exit' &) ; sleep 981",
    "a deaf one": "trap '' TERM INT HUP; setsid sh -c \"trap '' TERM; sleep 981; sleep 981\" & sleep 981; sleep 981",
    "a stopped one": "sleep 981 & kill -STOP $!; sleep 981",
    "one that stops its supervisor": "setsid sleep 981 & kill -STOP $PPID; sleep 981",
    "one with a name that misleads": "cp $(command -v sleep) '/tmp/a) R 1 1 (' && '/tmp/a) R 1 1 (' 981 & wait",
}


@pytest.mark.parametrize("script", [pytest.param(script, id=name) for name, script in _TREES.items()])
def test_a_call_that_runs_out_of_time_dies_whole(attached: Attacher, script: str) -> None:
    result = attached.run(["sh", "-c", script], timeout_ms=300)
    assert (result.how, result.flags) == (How.SIGNALLED, Ended.TIMED_OUT)
    assert not [line for line in _running(attached) if line.endswith(" 981")]


def test_a_kill_ends_it_whole_and_nothing_else(attached: Attacher) -> None:
    attached.start(Run(argv=["sh", "-c", "setsid sleep 982 & echo up; sleep 982"]), 7)
    while _all_running(attached).count("sleep 982") < 2:  # the second one starts when `up` is said
        time.sleep(0.02)
    attached.start(Run(argv=["sh", "-c", "sleep 0.5; echo other"]), 8)
    attached.send(Type.KILL, 7)
    results = dict(attached.next_result() for _ in range(2))
    assert (results[7].flags, results[7].stdout.head) == (Ended.KILLED, b"up\n")
    assert results[8].stdout.head == b"other\n"
    assert "sleep 982" not in _running(attached)


def test_a_fork_bomb_dies(attached: Attacher) -> None:
    limited = "ulimit -u 300; bomb() { bomb | bomb & }; bomb; sleep 983"
    result = attached.run(["bash", "-c", limited], timeout_ms=400, user="nobody")
    assert result.flags & Ended.TIMED_OUT
    assert attached.run(["echo", "well"]).stdout.head == b"well\n"


# Users, privileges.


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        pytest.param("nobody", "65534 65534", id="name"),
        pytest.param("1234", "1234 0", id="number"),
        pytest.param("1234:77", "1234 77", id="number and group"),
        pytest.param("nobody:daemon", "65534 1", id="name and group"),
    ],
)
def test_a_call_may_be_another_users(attached: Attacher, user: str, expected: str) -> None:
    result = attached.run(["sh", "-c", "echo $(id -u) $(id -g); echo said >/dev/stderr"], user=user)
    assert (result.stdout.head.decode().strip(), result.stderr.head) == (expected, b"said\n")


@pytest.mark.parametrize("user", ["", "nobody"])
def test_no_call_holds_a_capability(attached: Attacher, user: str) -> None:
    status = dict(line.split(":\t") for line in attached.run(["cat", "/proc/self/status"], user=user).stdout.head.decode().splitlines())
    assert {int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_namespaces_are_closed(attached: Attacher) -> None:
    for argv in (["unshare", "-Ur", "true"], ["unshare", "-m", "true"], ["mount", "-t", "tmpfs", "x", "/mnt"]):
        assert attached.run(argv).code != 0


# Outputs.


def test_a_long_output_keeps_both_ends(attached: Attacher) -> None:
    whole = b"".join(b"%d\n" % number for number in range(1, 300_001))
    result = attached.run(["seq", "1", "300000"], cap=10_001)
    assert result.stdout.printed == len(whole)
    assert (result.stdout.head, result.stdout.tail) == (whole[:5001], whole[-5000:])
    assert attached.run(["seq", "1", "9"], cap=0).stdout.printed == 18


def test_a_flood_ends_the_call(attached: Attacher) -> None:
    result = attached.run(["yes"], cap=1000, flood=2**22)
    assert (result.how, result.flags) == (How.SIGNALLED, Ended.FLOODED)
    assert len(result.stdout.head + result.stdout.tail) == 1000


# Lasting shells.


@pytest.mark.parametrize("shell", SHELLS)
def test_a_session_lasts(attached: Attacher, shell: str) -> None:
    def said(script: str, **more: Any) -> tuple[int, bytes, bytes]:
        result = attached.session(script, shell=shell, name=f"lasts-{shell}", **more)
        assert result.flags == 0
        return result.code, result.stdout.head, result.stderr.head

    assert said("cd /tmp; X=5; f() { echo f$1; }; exec 4>&1") == (0, b"", b"")
    assert said('pwd; echo "$X"; f 1; echo four >&4; false') == (1, b"/tmp\n5\nf1\nfour\n", b"")
    assert said("if")[0] == 2
    assert said("echo 'it''s'; cat <<EOF\n$X 'quoted'\nEOF") == (0, b"its\n5 'quoted'\n", b"")
    assert said("cat; read nothing; echo end") == (0, b"end\n", b"")
    assert said("exec 2>&1; echo merged >&2") == (0, b"merged\n", b"")
    assert said("printf() { echo no; }; alias command=false eval=false") == (0, b"", b"")
    assert said("echo $NEW", env={"NEW": 'it\'s\n"new"'}) == (0, b'it\'s "new"\n', b"")
    assert said("# nothing\\") == (0, b"", b"")
    assert said("") == (0, b"", b"")
    assert said("echo " + "x" * 100_000 + " | wc -c") == (0, b"100001\n", b"")
    assert said("printf() { \\command printf \"$@\"; }; printf '\udcff\udc80' | od -An -tx1") == (0, b" ff 80\n", b"")
    assert said("set -a; true " + "x" * 200_000 + "\nenv | wc -c")[0] == 0
    assert said("set +a; set | grep -c __rollway") == (1, b"0\n", b"")
    assert said("set -x; echo traced")[1].lstrip(b"+ ") == b"echo traced\ntraced\n"
    said("set +x")
    assert said("echo quiet") == (0, b"quiet\n", b"")
    assert said("(sleep 0.1; echo late) & echo now; wait") == (0, b"now\nlate\n", b"")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("script", "how", "code"),
    [
        pytest.param("trap 'echo bye' EXIT; exit 4", How.EXITED, 4, id="exit"),
        pytest.param("set -e; false; echo no", How.EXITED, 1, id="errexit"),
        pytest.param("exec sh -c 'exit 6'", How.EXITED, 6, id="exec"),
        pytest.param("kill -9 $$", How.SIGNALLED, 9, id="killed"),
    ],
)
def test_a_session_that_ends_starts_anew(attached: Attacher, shell: str, script: str, how: int, code: int) -> None:
    assert attached.session("X=old", shell=shell).flags == 0
    result = attached.session(script, shell=shell)
    assert (result.how, result.code, result.flags) == (how, code, Ended.SESSION_OVER)
    assert attached.session('echo "[$X]"', shell=shell).stdout.head == b"[]\n"
    attached.session("exit", shell=shell)


def test_a_session_out_of_time_dies_whole(attached: Attacher) -> None:
    result = attached.session("setsid sleep 984 & sleep 984", timeout_ms=300)
    assert result.flags == Ended.TIMED_OUT | Ended.SESSION_OVER
    assert "sleep 984" not in _running(attached)
    assert attached.session("echo new").stdout.head == b"new\n"


def test_calls_of_one_session_wait_for_each_other(attached: Attacher) -> None:
    for call in range(1, 6):
        attached.start(Run(kind=1, session="queue", argv=["bash", f"sleep 0.05; echo {call}; [ {call} != 3 ] || exit 3"]), call)
    results = dict(attached.next_result() for _ in range(5))
    assert list(results) == [1, 2, 3, 4, 5]
    assert [results[call].stdout.head for call in results] == [b"%d\n" % call for call in results]
    assert [results[call].flags for call in results] == [0, 0, Ended.SESSION_OVER, 0, 0]


def test_a_session_needs_a_shell(attached: Attacher) -> None:
    with pytest.raises(Refused) as refused:
        attached.session("true", shell="no-such-shell", name="none")
    assert refused.value.code == Refusal.NO_SHELL


# The supervisor that waits for the next call.


def _supervisor(attached: Attacher) -> int:
    return int(attached.run(["sh", "-c", "echo $PPID"]).stdout.head)


def test_calls_one_after_the_other_share_a_supervisor_and_nothing_else(attached: Attacher) -> None:
    first = attached.run(["sh", "-c", "cat; echo $PPID; cd /; export LEAK=1; ulimit -n 32"], stdin=b"one\n")
    second = attached.run(["sh", "-c", "cat; echo $PPID$LEAK; ulimit -n"], stdin=b"two\n", env={"OWN": "1"})
    (one, parent), (two, again, files) = first.stdout.head.split(), second.stdout.head.split()
    assert (one, two, parent) == (b"one", b"two", again)
    assert files != b"32"


def test_a_spare_supervisor_that_was_killed_or_stopped_costs_no_call(attached: Attacher) -> None:
    for number in (9, 19):
        parent = _supervisor(attached)
        attached.run(["sh", "-c", f"(sleep 0.1; kill -{number} {parent}) >/dev/null 2>&1 &"])
        time.sleep(0.3)
        assert attached.run(["sh", "-c", "exit 5"]).code == 5


def test_a_supervisor_with_something_left_behind_takes_no_other_call(attached: Attacher) -> None:
    busy = int(attached.run(["sh", "-c", "sleep 30 >/dev/null 2>&1 & echo $PPID"]).stdout.head)
    assert _supervisor(attached) != busy
    attached.send(Type.KILL_ALL, 7)
    attached.expect(Type.DONE)
    assert attached.run(["sh", "-c", "exit 6"]).code == 6


def test_a_call_too_large_to_be_handed_over_gets_a_supervisor_of_its_own(attached: Attacher) -> None:
    for size in (10_000, 20_000, 100_000):
        assert attached.run(["sh", "-c", 'printf %s "$1" | wc -c', "sh", "x" * size]).stdout.head.strip() == str(size).encode()
    assert attached.run(["true", *["x"] * 5000]).code == 0
