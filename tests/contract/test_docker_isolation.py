"""What a command in a Docker sandbox cannot do: reach a neighbour, gain a right, touch the agent."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandboxes.base import Sandbox, SandboxContentError
from sandboxes.docker import DockerBackend
from tests.docker_images import changed_image
from tests.sandbox_backends import IMAGE, bash, docker_host, has_engine, named, spec

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}"),
    pytest.mark.asyncio(loop_scope="module"),
]
DEPLOYMENT = "test-isolation"

CALLS = {
    "unshare-user": (272, 0x10000000),
    "unshare-mount": (272, 0x00020000),
    "unshare-net": (272, 0x40000000),
    "mount": (165, b"none", b"/mnt", b"tmpfs", 0, 0),
    "umount2": (166, b"/proc", 2),
    "setns": (308, 0, 0),
    "clone-user": (56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone-net": (56, 0x40000000 | 17, 0, 0, 0, 0),
    "clone3": (435, 0, 0),
    "pivot_root": (155, b"/", b"/"),
    "chroot": (161, b"/tmp"),
    "open_tree": (428, -100, b"/", 1),
    "move_mount": (429, -1, b"", -1, b"", 0),
    "fsopen": (430, b"tmpfs", 0),
    "fsmount": (432, -1, 0, 0),
    "fspick": (433, -100, b"/", 0),
    "mount_setattr": (442, -100, b"/", 0, 0, 0),
    "keyctl": (250, 0, -3, 0),
    "add_key": (248, b"user", b"a", b"b", 1, -3),
    "request_key": (249, b"user", b"a", 0, -3),
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "fanotify_init": (300, 0, 0),
    "sethostname": (170, b"other", 5),
    "setdomainname": (171, b"other", 5),
    "ptrace-agent": (101, 16, 1, 0, 0),
    "seize-agent": (101, 0x4206, 1, 0, 0),
    "read-agent": (310, 1, 0, 0, 0, 0, 0),
    "kill-agent": (62, 1, 9),
    "init_module": (175, 0, 0, b""),
    "reboot": (169, 0xFEE1DEAD, 672274793, 0, 0),
    "swapon": (167, b"/tmp", 0),
    "quotactl": (179, 0, 0, 0, 0),
    "acct": (163, 0),
    "open_by_handle_at": (304, -100, 0, 0),
    "lookup_dcookie": (212, 0, 0, 0),
    "syslog": (103, 3, 0, 0),
    "socket-vsock": (41, 40, 1, 0),
    "socket-alg": (41, 38, 5, 0),
    "limit-agent": (302, 1, 7, 0, 0),
    "x32": (0x40000000 | 39,),
}
"""By their x86_64 numbers. `kill-agent` returns 0 for a signal that PID 1 of a namespace does not get: it is looked at apart."""
PROBE = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for name, (number, *arguments) in CALLS.items():
    values = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    if libc.syscall(ctypes.c_long(number), *values) == -1:
        found[name] = errno.errorcode[ctypes.get_errno()]
    else:
        if name.startswith("clone") and os.getpid() != PID:
            os._exit(0)
        found[name] = "done"
for path in ("/proc/1/mem", "/proc/sysrq-trigger", "/proc/sys/kernel/hostname", "/sys/kernel/uevent_helper", "/.rollway/agent"):
    try:
        open(path, "r+b").close()
        found[path] = "done"
    except OSError as error:
        found[path] = errno.errorcode[error.errno]
print(json.dumps(found))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[DockerBackend]:
    async with DockerBackend(deployment_id=DEPLOYMENT, docker_host=docker_host()) as made:
        yield made
        await made.sweep(keep=frozenset(), older_than_s=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(backend: DockerBackend) -> Sandbox:
    return await backend.create(spec(), name=named())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(backend: DockerBackend) -> Sandbox:
    return await backend.create(spec(), name=named())


async def out(sandbox: Sandbox, script: str, *, session: str | None = None) -> str:
    result = await bash(sandbox, script, session=session)
    assert result.exit_code == 0, result
    return result.stdout.decode()


def status(text: str) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


@pytest.mark.parametrize("session", [pytest.param(None, id="exec"), pytest.param("s", id="session")])
async def test_what_runs_holds_no_capability(one: Sandbox, session: str | None) -> None:
    found = status(await out(one, "cat /proc/$BASHPID/status", session=session))
    sets = {name: found[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    assert sets == dict.fromkeys(sets, "0" * 16)
    assert (found["NoNewPrivs"].strip(), found["Seccomp"].strip()) == ("1", "2")


async def test_the_agent_keeps_no_right_over_the_machine(one: Sandbox) -> None:
    found = status(await out(one, "cat /proc/1/status"))
    chown, dac_override, fowner, kill, setgid, setuid = 0, 1, 3, 5, 6, 7
    allowed = sum(1 << bit for bit in (chown, dac_override, fowner, kill, setgid, setuid))
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(found[name], 16) & ~allowed == 0, (name, found[name])
    assert (found["NoNewPrivs"].strip(), found["Seccomp"].strip()) == ("1", "2")


@pytest.mark.parametrize("user", [pytest.param(None, id="root"), pytest.param("nobody", id="nobody")])
async def test_calls_that_open_a_sandbox_are_refused(one: Sandbox, user: str | None) -> None:
    script = f"PID = __import__('os').getpid()\nCALLS = {CALLS!r}\n{PROBE}"
    result = await one.exec(["python3", "-c", script], timeout_s=20, max_output_bytes=65_536, user=user)
    assert result.exit_code == 0, result
    found = json.loads(result.stdout)
    agent_signal = found.pop("kill-agent")
    assert agent_signal in ("done", "EPERM")
    assert [name for name, outcome in found.items() if outcome == "done"] == []
    assert found["clone3"] == "ENOSYS", "libc tries clone instead"
    assert await one.poll()
    assert (await bash(one, "echo well")).stdout == b"well\n"


async def test_threads_and_processes_still_work(one: Sandbox) -> None:
    script = (
        "import threading, subprocess\nt = threading.Thread(target=print, args=('thread',), kwargs={'flush': True})\nt.start(); t.join()\n"
    )
    script += "print(subprocess.run(['echo', 'process'], capture_output=True, text=True).stdout.strip())"
    assert await out(one, f'python3 -c "{script}"') == "thread\nprocess\n"


async def test_each_has_a_loopback_of_its_own(one: Sandbox, other: Sandbox) -> None:
    serve = (
        "python3 -m http.server 5999 --bind 0.0.0.0 >/dev/null 2>&1 & for i in $(seq 100); do {probe} 2>/dev/null && break; sleep 0.1; done"
    )
    probe = "(exec 3<>/dev/tcp/127.0.0.1/5999)"
    await out(one, serve.format(probe=probe))
    await out(one, probe)
    assert (await bash(other, probe)).exit_code != 0
    spaces = [await out(sandbox, "readlink /proc/self/ns/net") for sandbox in (one, other)]
    assert spaces[0] != spaces[1]
    assert (await out(one, "ls /sys/class/net 2>/dev/null || cut -d: -f1 /proc/net/dev | tail -n +3")).split() == ["lo"]
    await one.kill_all()


async def test_an_abstract_socket_is_nobody_elses(one: Sandbox, other: Sandbox) -> None:
    serve = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + 'rollway'); s.listen(); time.sleep(60)"
    join = "import socket; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + 'rollway')"
    await out(one, f'python3 -c "{serve}" >/dev/null 2>&1 & sleep 0.5')
    await out(one, f'python3 -c "{join}"')
    assert (await bash(other, f'python3 -c "{join}"')).exit_code != 0
    await one.kill_all()


@pytest.mark.parametrize("path", ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/shm/x", "/tmp/x", "/run/x"])
async def test_no_file_is_shared(backend: DockerBackend, one: Sandbox, other: Sandbox, path: str) -> None:
    await bash(one, f"echo from-one >> {path}")
    assert "from-one" not in (await bash(other, f"cat {path} 2>/dev/null; true")).stdout.decode()
    third = await backend.create(spec(), name=named())
    try:
        assert "from-one" not in (await bash(third, f"cat {path} 2>/dev/null; true")).stdout.decode()
    finally:
        await third.destroy()


async def test_the_names_of_a_sandbox(one: Sandbox) -> None:
    assert await out(one, "hostname 2>/dev/null || cat /proc/sys/kernel/hostname") == "sandbox\n"
    assert "127.0.0.1" in await out(one, "cat /etc/hosts")
    assert await out(one, "python3 -c \"import socket; print(socket.gethostbyname('localhost'))\"") == "127.0.0.1\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def connected(backend: DockerBackend) -> Sandbox:
    """Its agent may not mount, nor unmount: the volume that all have stays in sight."""
    return await backend.create(spec(network="open"), name=named())


async def test_the_agent_cannot_be_changed(connected: Sandbox) -> None:
    for script in ("echo x > /.rollway/x", "rm -f /.rollway/agent", "chmod 700 /.rollway", "mv /.rollway /moved", "cat /proc/1/environ"):
        assert (await bash(connected, script)).exit_code != 0, script
    assert "docker.sock" not in await out(connected, "cat /proc/mounts; ls /run /var/run 2>/dev/null")


async def test_a_user_leads_no_file_out_of_its_own_directories(backend: DockerBackend) -> None:
    """Files are put with root's rights: a link among the parents of a path must not turn them on what the user may not write."""
    links = ["mkdir own && ln -s own mine && ln -s /etc out"]
    sandbox = await backend.create(spec(user="nobody", setup=links, files={"/bin/given": b"x"}), name=named())
    try:
        await sandbox.put({"/work/mine/x": b"1", "/bin/other": b"2"})
        with pytest.raises(SandboxContentError, match="a link"):
            await sandbox.put({"/work/out/passwd": b""})
        assert await out(sandbox, "cat own/x; stat -c %U /etc/passwd") == "1root\n"
    finally:
        await sandbox.destroy()


async def test_what_all_sandboxes_mount_is_out_of_reach(one: Sandbox) -> None:
    """Read-only as it is, a lock on it is seen by every neighbour."""
    assert await out(one, "ls -A /.rollway; grep -c /.rollway /proc/self/mountinfo || true") == "0\n"


async def test_a_user_reads_no_more_than_it_may(backend: DockerBackend) -> None:
    sandbox = await backend.create(spec(user="nobody", setup=["ln -s /secret answer"]), name=named())
    try:
        await sandbox.exec(["sh", "-c", "echo x > /secret; chmod 600 /secret"], timeout_s=10, max_output_bytes=100, user="root")
        with pytest.raises(SandboxContentError) as refused:
            _ = [piece async for piece in sandbox.read_file("/work/answer")]
        assert refused.value.errno == errno.EACCES
    finally:
        await sandbox.destroy()


async def test_masked_paths_stay_masked(one: Sandbox) -> None:
    assert await out(one, "cat /proc/kcore /proc/timer_list /proc/keys 2>/dev/null | wc -c") == "0\n"
    assert await out(one, "ls -A /proc/acpi /sys/firmware 2>/dev/null | grep -v : | wc -w") == "0\n"


async def test_the_user_is_the_images(backend: DockerBackend) -> None:
    async with changed_image("USER nobody") as image:
        sandbox = await backend.create(spec(image=image, workdir="/srv/own", files={"/srv/own/given": b"x"}), name=named())
        try:
            assert await out(sandbox, "id -un; touch here && stat -c %U . here given") == "nobody\nnobody\nnobody\nnobody\n"
            assert await out(sandbox, "id -un", session="s") == "nobody\n"
            assert (await bash(sandbox, "echo x > /etc/x")).exit_code != 0
            as_root = await sandbox.exec(["id", "-un"], timeout_s=10, max_output_bytes=100, user="root")
            assert as_root.stdout == b"root\n"
        finally:
            await sandbox.destroy()


async def test_an_image_cannot_bring_the_agent(backend: DockerBackend) -> None:
    """What an image holds where the agent lies is neither run nor copied to where others would run it."""
    first = await backend.create(spec(network="open"), name=named())
    try:
        async with changed_image("VOLUME /.rollway", "LABEL rollway.rollout=forged rollway=other") as image:
            sandbox = await backend.create(spec(image=image, network="open"), name=named())
            try:
                (info,) = [each for each in await backend.list() if each.id == sandbox.id]
                assert "rollout" not in info.labels
                same = [(await bash(each, "sha256sum /.rollway/agent")).stdout for each in (first, sandbox)]
                assert same[0] == same[1] != b""
            finally:
                await sandbox.destroy()
    finally:
        await first.destroy()


async def test_two_at_once_answer_each_its_own(one: Sandbox, other: Sandbox) -> None:
    await asyncio.gather(bash(one, "echo one > /work/name"), bash(other, "echo other > /work/name"))
    assert [await out(each, "cat /work/name") for each in (one, other)] == ["one\n", "other\n"]
