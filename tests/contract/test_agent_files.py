"""The agent's file calls, seen from outside its root: what arrives, what is left alone, and what a sandbox can put in their way."""

import asyncio
import errno
import hashlib
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from sandboxes.frames import Kind, Result, Run
from tests.contract.agent_root import SMALL_BYTES, FileCalls, archive, failure, needs_agent

pytestmark = [*needs_agent, pytest.mark.timeout(60)]

REG, DIR, SYM, LNK = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
USER = 12_345


@pytest_asyncio.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileCalls]:
    made = FileCalls(tmp_path)
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def users_files(tmp_path: Path) -> AsyncIterator[FileCalls]:
    made = FileCalls(tmp_path)
    await made.start(user=f"{USER}:{USER}")
    yield made
    await made.stop()


# ---- write and read ----


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 262_145, 50 * 2**20])
async def test_a_file_goes_in_and_out(files: FileCalls, size: int) -> None:
    content = (hashlib.sha256(b"x").digest() * (size // 32 + 1))[:size]
    assert failure(await files.write("/deep/er/file", content, "751")) is None
    there = files.root / "deep/er/file"
    assert there.read_bytes() == content
    assert stat.S_IMODE(there.stat().st_mode) == 0o751
    assert os.listdir(there.parent) == ["file"]
    got, result = await files.read("/deep/er/file")
    assert failure(result) is None
    assert got == content


async def test_what_is_made_belongs_to_the_user(users_files: FileCalls) -> None:
    files, root = users_files, users_files.root
    assert failure(await files.write("/made/file", b"")) is None
    assert (
        failure(await files.unpack(archive([("unpacked/file", REG, b""), ("unpacked/dir", DIR, ""), ("unpacked/link", SYM, "/x")]))) is None
    )
    for name in ("made", "made/file", "unpacked", "unpacked/file", "unpacked/dir", "unpacked/link"):
        status = (root / name).lstat()
        assert (status.st_uid, status.st_gid) == (USER, USER), name
    assert (root / "usr/bin").stat().st_uid == 0


async def test_write_follows_no_link_at_the_end(files: FileCalls) -> None:
    (files.root / "target").write_text("kept")
    (files.root / "link").symlink_to("/target")
    (files.root / "dangling").symlink_to("/nowhere")
    for name in ("link", "dangling"):
        assert failure(await files.write(f"/{name}", b"new")) is None
        assert not (files.root / name).is_symlink()
    assert (files.root / "target").read_text() == "kept"
    assert not (files.root / "nowhere").exists()


async def test_write_goes_through_links_among_the_parents(files: FileCalls) -> None:
    assert failure(await files.write("/bin/tool", b"#!")) is None
    assert (files.root / "usr/bin/tool").read_bytes() == b"#!"
    assert (files.root / "bin").is_symlink()


def _directory(path: Path) -> None:
    (path / "x").mkdir(parents=True)


def _file_among_parents(path: Path) -> None:
    path.parent.write_text("")


def _dangling_among_parents(path: Path) -> None:
    path.parent.symlink_to("/nowhere")


@pytest.mark.parametrize(
    ("plant", "code", "reason"),
    [
        pytest.param(_directory, errno.EISDIR, "/a/b: is a directory", id="directory"),
        pytest.param(_file_among_parents, errno.ENOTDIR, "/a/b: not a directory", id="file-among-parents"),
        pytest.param(_dangling_among_parents, errno.ENOENT, "/a/b: no such file or directory", id="dangling-link-among-parents"),
    ],
)
async def test_write_says_what_is_in_the_way(files: FileCalls, plant: Callable[[Path], None], code: int, reason: str) -> None:
    plant(files.root / "a/b")
    assert failure(await files.write("/a/b", b"new")) == (code, reason)


@pytest.mark.parametrize(("path", "mode"), [("/../x", "644"), ("/a/../../x", "644"), ("/", "644"), ("/x", "9"), ("/x", "77777")])
async def test_write_refuses_such_arguments(files: FileCalls, path: str, mode: str) -> None:
    assert failure(await files.write(path, b"", mode)) is not None
    assert not (files.root.parent / "x").exists()
    assert not (files.root / "x").exists()


async def test_a_full_disk_leaves_the_old_file(files: FileCalls) -> None:
    assert failure(await files.write("/small/file", b"old")) is None
    assert failure(await files.write("/small/file", bytes(2 * SMALL_BYTES))) == (errno.ENOSPC, "/small/file: no space left on device")
    assert (await files.read("/small/file"))[0] == b"old"
    full = await files.unpack(archive([("small/other", REG, bytes(2 * SMALL_BYTES))]))
    assert failure(full) == (errno.ENOSPC, "/small/other: no space left on device")
    assert set(await files.packed("/small")) == {"small", "small/file"}


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        pytest.param("missing", errno.ENOENT, "no such file or directory", id="missing"),
        pytest.param("usr", errno.EISDIR, "is a directory", id="directory"),
        pytest.param("fifo", 1, "is no regular file", id="fifo"),
        pytest.param("socket", 1, "is no regular file", id="socket"),
        pytest.param("loop", errno.ELOOP, "symbolic link loop", id="loop"),
    ],
)
async def test_read_says_why_not(files: FileCalls, name: str, code: int, reason: str) -> None:
    _special_files(files.root)
    (files.root / "loop").symlink_to("loop")
    got, result = await files.read(f"/{name}")
    assert (got, failure(result)) == (b"", (code, f"/{name}: {reason}"))


async def test_read_follows_links(files: FileCalls) -> None:
    (files.root / "usr/bin/tool").write_text("here")
    (files.root / "link").symlink_to("/bin/tool")
    assert (await files.read("/link"))[0] == b"here"


def _special_files(at: Path) -> None:
    os.mkfifo(at / "fifo")
    os.mknod(at / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mknod(at / "socket", 0o666 | stat.S_IFSOCK)


# ---- pack ----


async def test_pack_takes_files_directories_and_links(files: FileCalls) -> None:
    tree = files.root / "tree"
    (tree / "sub/empty").mkdir(parents=True)
    (tree / "sub/file").write_bytes(b"content")
    (tree / "sub/file").chmod(0o640)
    os.utime(tree / "sub/file", (1, 1_234_567_890))
    os.link(tree / "sub/file", tree / "again")
    (tree / "link").symlink_to("/usr")
    (tree / "long").symlink_to("t" * 300)
    (tree / ("n" * 255)).write_bytes(b"long")
    (tree / "é\nü").write_bytes(b"odd")
    _special_files(tree)
    packed = await files.packed("/tree", "/missing", "/tree/sub/file/below", "//tree/./sub//empty/")
    assert set(packed) == {
        "tree", "tree/sub", "tree/sub/empty", "tree/sub/file", "tree/again", "tree/link", "tree/long", "tree/" + "n" * 255, "tree/é\nü",
    }  # fmt: skip
    member, content = packed["tree/sub/file"]
    assert (content, member.mode, member.mtime, member.type) == (b"content", 0o640, 1_234_567_890, REG)
    assert packed["tree/again"][1] == b"content"
    assert packed["tree/link"][0].linkname == "/usr"
    assert packed["tree/long"][0].linkname == "t" * 300


async def test_pack_follows_no_link_and_does_not_climb(files: FileCalls) -> None:
    assert set(await files.packed("/bin")) == {"bin"}
    archive_bytes, result = await files.pack("/bin/tool")
    assert failure(result) == (1, "/bin/tool: a link is among its parents")
    assert archive_bytes == b""
    assert failure((await files.pack("/usr/../.."))[1]) == (1, "/usr/../..: a path with .. in it")


async def test_nothing_packed_is_an_archive(files: FileCalls) -> None:
    assert await files.packed() == {}
    assert await files.packed("/missing") == {}


async def test_pack_keeps_its_word_on_sizes_that_change(files: FileCalls) -> None:
    """A file that shrinks or grows while it is read takes the bytes that its header says."""
    growing = files.root / "tree/growing"
    growing.parent.mkdir()
    growing.write_bytes(b"")
    (growing.parent / "last").write_bytes(b"last")
    stop = asyncio.Event()

    def change() -> None:
        while not stop.is_set():
            growing.write_bytes(b"x" * 3_000_000)
            growing.write_bytes(b"")

    changes = asyncio.create_task(asyncio.to_thread(change))
    try:
        for _ in range(20):
            packed = await files.packed("/tree")
            assert packed["tree/last"][1] == b"last"
            assert not packed["tree/growing"][1].strip(b"x\0")
    finally:
        stop.set()
        await changes


async def test_sparse_files_and_sizes_past_8_gib(files: FileCalls) -> None:
    for name, size in (("holes", 8 * 2**20), ("huge", 9 * 2**30)):
        with (files.root / name).open("wb") as file:
            file.truncate(size)
    assert (await files.packed("/holes"))["holes"][1] == bytes(8 * 2**20)

    def unwanted(result: Result) -> None:
        raise AssertionError(result)

    async with aclosing(files.channel.data(Run(kind=Kind.PACK, argv=["/huge"]), unwanted)) as pieces:
        first = await anext(pieces)
    assert tarfile.TarInfo.frombuf(first[:512], "utf-8", "strict").size == 9 * 2**30


async def test_many_files_and_deep_trees(files: FileCalls) -> None:
    many = {f"many/{i % 100}/{i}": str(i).encode() for i in range(20_000)}
    assert failure(await files.unpack(archive([(name, REG, content) for name, content in many.items()]))) is None
    packed = await files.packed("/many")
    assert {name: content for name, (member, content) in packed.items() if member.isreg()} == many
    deepest = _deep(files.root / "many", 900)
    assert deepest in await files.packed("/many")
    assert failure(await files.unpack(b"", "/many")) is None
    assert not (files.root / "many").exists()


async def test_a_tree_too_deep_for_any_path_is_refused_and_removed(files: FileCalls) -> None:
    _deep(files.root / "tree", 3_000)
    code, reason = failure((await files.pack("/tree"))[1]) or (0, "")
    assert (code, reason.endswith(": too many directories in each other")) == (1, True)
    assert failure(await files.unpack(archive([("tree", REG, b"a file")]), "/tree")) is None
    assert (files.root / "tree").read_bytes() == b"a file"


def _deep(top: Path, levels: int) -> str:
    """Makes directories in each other, past what one path may name; the innermost's path from the top's parent."""
    top.mkdir(exist_ok=True)
    at = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    return "/".join([top.name, *["d"] * levels])
