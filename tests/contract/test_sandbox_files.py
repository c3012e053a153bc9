"""What every sandbox backend promises of files that go in and out."""

import hashlib
import io
import tarfile

import pytest

from sandboxes.base import Sandbox, SandboxContentError, SandboxSpecError
from tests.sandbox_backends import bash, count

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
