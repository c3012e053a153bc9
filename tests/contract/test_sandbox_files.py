"""What every sandbox backend promises of files that go in and out."""

import errno
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from sandboxes.base import Sandbox, SandboxBackend, SandboxContentError, SandboxTooLargeError
from tests.sandbox_backends import HAVE_USERS, bash, count, named, spec

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]


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
    with pytest.raises(SandboxContentError):
        await live.put({path: b""})
    with pytest.raises(SandboxContentError):
        await live.write_file(path, _pieces(b"x"))


async def test_get_keeps_links_and_has_a_bound(live: Sandbox) -> None:
    await bash(
        live, "mkdir -p /tmp/g; ln -sfn /etc /tmp/g/etc; truncate -s 1T /tmp/g/huge 2>/dev/null || head -c 30000000 /dev/zero > /tmp/g/huge"
    )
    with tarfile.open(fileobj=io.BytesIO(await live.get(["/tmp/g/etc"], max_bytes=100_000))) as tar:
        assert [member.issym() for member in tar] == [True]
    with pytest.raises(SandboxTooLargeError, match="100000 bytes"):
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
    await bash(live, "rm -f /tmp/big")  # what came before the kill counts in the other tests


# Streams


async def _pieces(*contents: bytes) -> AsyncIterator[bytes]:
    for content in contents:
        yield content


async def _read(sandbox: Sandbox, path: str) -> bytes:
    return b"".join([piece async for piece in sandbox.read_file(path)])


async def test_fifty_megabytes_in_and_out(backend: SandboxBackend) -> None:
    sandbox = await backend.create(spec(disk_mib=256), name=named())
    piece = bytes((i * 31 + 7) % 256 for i in range(2**20))
    sent = hashlib.sha256()

    async def content() -> AsyncIterator[bytes]:
        for n in range(50):
            each = piece[n:] + piece[:n]
            sent.update(each)
            yield each

    await sandbox.write_file("/work/deep/er/large", content(), mode=0o640)
    told = await bash(sandbox, "sha256sum < /work/deep/er/large; stat -c '%s %a' /work/deep/er/large; ls -A /work/deep/er")
    assert told.stdout.decode().split() == [sent.hexdigest(), "-", str(50 * 2**20), "640", "large"]
    received = hashlib.sha256()
    async with aclosing(sandbox.read_file("/work/deep/er/large")) as pieces:
        async for each in pieces:
            received.update(each)
    assert received.digest() == sent.digest()
    await sandbox.destroy()


async def test_small_streams(live: Sandbox) -> None:
    await live.write_file("/tmp/w/empty", _pieces())
    await live.write_file("/tmp/w/small", _pieces(b"a", b"", b"b\0\xff"))
    assert await _read(live, "/tmp/w/empty") == b""
    assert await _read(live, "/tmp/w/small") == b"ab\0\xff"


async def test_write_replaces_and_read_follows_a_link(live: Sandbox) -> None:
    await bash(live, "mkdir -p /tmp/v; cd /tmp/v; echo kept > target; ln -sfn target link; ln -sfn target other")
    await live.write_file("/tmp/v/link", _pieces(b"new"))
    assert (await bash(live, "cd /tmp/v; cat target link; test -L link; echo $?")).stdout == b"kept\nnew1\n"
    assert await _read(live, "/tmp/v/other") == b"kept\n"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        pytest.param("/tmp", errno.EISDIR, id="directory"),
        pytest.param("/tmp/no/such/file", errno.ENOENT, id="missing"),
        pytest.param("/etc/passwd/below", errno.ENOTDIR, id="below-a-file"),
        pytest.param("/dev/zero", None, id="device"),
    ],
)
async def test_read_says_why_not(live: Sandbox, path: str, reason: int | None) -> None:
    with pytest.raises(SandboxContentError, match=path) as refused:
        await _read(live, path)
    assert refused.value.errno == reason


async def test_a_pipe_is_no_file(live: Sandbox) -> None:
    await bash(live, "mkfifo /tmp/fifo")
    with pytest.raises(SandboxContentError):
        await _read(live, "/tmp/fifo")


async def test_write_says_why_not(live: Sandbox) -> None:
    await bash(live, "mkdir -p /tmp/u/dir")
    for path, reason in (("/tmp/u/dir", errno.EISDIR), ("/etc/passwd/below", errno.ENOTDIR)):
        with pytest.raises(SandboxContentError) as refused:
            await live.write_file(path, _pieces(b"x"))
        assert refused.value.errno == reason
    with pytest.raises(SandboxContentError):
        await live.put({"/etc/passwd/below": b"x"})


async def test_until_it_is_whole_what_was_there_stays(live: Sandbox) -> None:
    await live.put({"/tmp/s/file": b"before"})

    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * 300_000
        raise EOFError("the source broke off")

    with pytest.raises(EOFError):
        await live.write_file("/tmp/s/file", broken())
    assert (await bash(live, "cat /tmp/s/file; ls -A /tmp/s")).stdout == b"beforefile\n"


async def test_a_reader_that_leaves_early(live: Sandbox) -> None:
    await bash(live, "head -c 20000000 /dev/zero > /tmp/left-early")
    async with aclosing(live.read_file("/tmp/left-early")) as pieces:
        async for _ in pieces:
            break
    assert (await bash(live, "rm /tmp/left-early; echo fine")).stdout == b"fine\n"


async def test_files_and_directory_belong_to_the_sandboxes_user(kind: str, backend: SandboxBackend) -> None:
    if kind not in HAVE_USERS:
        pytest.skip("one user only: root")
    sandbox = await backend.create(spec(user="1234:2345", workdir="/new/work", files={"/new/work/f": b"1"}), name=named())
    await sandbox.put({"/etc/deep/g": b"2"})
    await sandbox.write_file("/new/work/h", _pieces(b"3"))
    script = "id -u; stat -c '%u:%g' . f h /etc/deep/g /etc/deep; touch mine && cat f h /etc/deep/g; touch /etc/x || echo refused"
    assert (await bash(sandbox, script)).stdout.decode().split() == ["1234", *["1234:2345"] * 5, "132refused"]
    assert (await sandbox.get(["/new/work/mine"], max_bytes=100_000)) != b""
    await sandbox.destroy()
