"""The agent's tar reader: what it takes, what it refuses, and that nothing in an archive crashes it or leads it out of its paths."""

import gzip
import io
import stat
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.agent_root import FileCalls, Member, archive, failure, needs_agent

pytestmark = [*needs_agent, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

REG, DIR, SYM, LNK = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
BLOCK = 512


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def files(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FileCalls]:
    made = FileCalls(tmp_path_factory.mktemp("root"))
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def here(files: FileCalls) -> Path:
    """A directory of the test's own in the agent's root."""
    return Path(tempfile.mkdtemp(dir=files.root))


FORMS = [
    pytest.param(tarfile.GNU_FORMAT, id="gnu"),
    pytest.param(tarfile.PAX_FORMAT, id="pax"),
    pytest.param(tarfile.USTAR_FORMAT, id="ustar"),
]


@pytest.mark.parametrize("form", FORMS)
async def test_an_archive_arrives(files: FileCalls, here: Path, form: int) -> None:
    top, long = here.name, form != tarfile.USTAR_FORMAT
    name, target = ("n" * 200, "t" * 300) if long else ("n" * 90, "t" * 90)
    members: list[Member] = [
        (f"{top}/dir", DIR, ""),
        (f"{top}/dir/file", REG, b"content"),
        (f"./{top}//dir/./é{name}", REG, b"x" * 1000),
        (f"{top}/dir/link", SYM, target),
        (f"{top}/dir/hard", LNK, f"{top}/dir/file"),
        (f"/{top}/absolute", REG, b""),
        (f"{top}/made/on/the/way", REG, b"way"),
        (f"{top}/device", tarfile.CHRTYPE, ""),
        (f"{top}/fifo", tarfile.FIFOTYPE, ""),
    ]
    assert failure(await files.unpack(archive(members, form=form, mode=0o7751, mtime=1_234_567_890.5))) is None
    found = {str(path.relative_to(here)) for path in here.rglob("*")}
    assert found == {
        "dir",
        "dir/file",
        f"dir/é{name}",
        "dir/link",
        "dir/hard",
        "absolute",
        "made",
        "made/on",
        "made/on/the",
        "made/on/the/way",
    }
    file = (here / "dir/file").stat()
    assert (file.st_nlink, int(file.st_mtime), stat.S_IMODE(file.st_mode)) == (2, 1_234_567_890, 0o1751)
    assert (here / f"dir/é{name}").read_bytes() == b"x" * 1000
    assert (here / "dir/link").readlink() == Path(target)
    packed = await files.packed(f"/{top}")
    assert set(packed) == {top, *(f"{top}/{name}" for name in found)}


async def test_what_is_in_the_way_is_replaced(files: FileCalls, here: Path) -> None:
    top = here.name
    (here / "target").write_text("kept")
    (here / "hard").hardlink_to(here / "target")
    for name in ("link", "dir_over_link"):
        (here / name).symlink_to("target")
    (here / "dir_over_file").write_text("")
    members: list[Member] = [(f"{top}/{name}", REG, b"new") for name in ("hard", "link")]
    members += [(f"{top}/dir_over_{name}", DIR, "") for name in ("link", "file")]
    assert failure(await files.unpack(archive(members))) is None
    assert (here / "target").read_text() == "kept"
    assert (here / "hard").read_text() == (here / "link").read_text() == "new"
    assert (here / "dir_over_link").is_dir()
    assert not (here / "dir_over_link").is_symlink()
    assert (here / "dir_over_file").is_dir()


async def test_a_directory_gives_way_only_if_it_was_named(files: FileCalls, here: Path) -> None:
    path = here / "in_the_way"
    (path / "full").mkdir(parents=True)
    (path / "out").symlink_to("/usr")
    packed = archive([(f"{here.name}/in_the_way", REG, b"new")])
    assert failure(await files.unpack(packed)) == (21, f"/{here.name}/in_the_way: is a directory")
    assert failure(await files.unpack(packed, f"/{here.name}/in_the_way", "/missing/too")) is None
    assert path.read_bytes() == b"new"
    assert (files.root / "usr/bin").is_dir()


async def test_only_links_of_the_image_lead_anywhere(files: FileCalls, here: Path) -> None:
    assert failure(await files.unpack(archive([("bin/tool", REG, b"tool"), ("bin", DIR, "")]))) is None
    assert (files.root / "usr/bin/tool").read_bytes() == b"tool"
    assert (files.root / "bin").is_symlink()
    through: list[tuple[bytes, str | bytes]] = [(REG, b""), (LNK, "usr/bin/tool"), (SYM, "/x")]
    for kind, what in through:
        packed = archive([(f"{here.name}/link", SYM, "/usr/bin"), (f"{here.name}/link/through", kind, what)])
        assert failure(await files.unpack(packed)) == (1, f"/{here.name}/link/through: a link is among its parents")
    hard = archive([(f"{here.name}/link", SYM, "/usr/bin"), (f"{here.name}/hard", LNK, f"{here.name}/link")])
    assert failure(await files.unpack(hard)) == (1, f"/{here.name}/link: is no file to link to")
    assert not (files.root / "usr/bin/through").exists()


@pytest.mark.parametrize("removed", ["/", "/usr/..", ".."])
async def test_some_paths_are_not_removed(files: FileCalls, removed: str) -> None:
    assert failure(await files.unpack(b"", removed)) is not None
    assert (files.root / "usr/bin").is_dir()


async def test_removing_follows_no_link(files: FileCalls, here: Path) -> None:
    (here / "tree").mkdir()
    (here / "tree/usr").symlink_to("/usr")
    (here / "usr").symlink_to("/usr")
    assert failure(await files.unpack(b"", f"/{here.name}/tree", f"/{here.name}/usr", "/missing")) is None
    assert list(here.iterdir()) == []
    assert (files.root / "usr/bin").is_dir()


def _header(name: bytes = b"x", size: bytes = b"00000000000", kind: bytes = b"0", content: bytes = b"") -> bytes:
    """One entry with a right checksum, whatever its fields hold."""
    head = bytearray(BLOCK)
    head[: len(name)] = name
    head[100:108] = b"0000644\0"
    head[124 : 124 + len(size)] = size
    head[136:148] = b"00000000000\0"
    head[156:157] = kind
    head[257:265] = b"ustar\x0000"
    head[148:156] = b"%06o\0 " % (sum(head) + 8 * 32)
    return bytes(head) + content + bytes(-len(content) % BLOCK)


def _extended(kind: bytes, content: bytes) -> bytes:
    return _header(size=b"%011o" % len(content), kind=kind, content=content)


END = bytes(2 * BLOCK)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        pytest.param(b"no tar at all", "cut short", id="short"),
        pytest.param(gzip.compress(bytes(5000)) + bytes(BLOCK), "not a tar archive", id="gzip"),
        pytest.param(b"x" * 5000, "not a tar archive", id="text"),
        pytest.param(_header(), "cut short", id="no-end"),
        pytest.param(_header(size=b"00000001000") + bytes(100), "cut short", id="content-cut"),
        pytest.param(_header(size=b"\xff" * 12) + END, "a size is no number", id="negative"),
        pytest.param(_header(size=b"\x80" + b"\xff" * 11) + END, "a size is no number", id="past-64-bits"),
        pytest.param(_header(size=b"\x80\0\0\0\x7f" + b"\xff" * 7) + END, "a size is no number", id="past-the-bound"),
        pytest.param(_header(size=b"9") + END, "a size is no number", id="not-octal"),
        pytest.param(_header(kind=b"S") + END, "an entry of unknown kind", id="sparse"),
        pytest.param(_header(kind=b"L", size=b"77777777777") + END, "an extended header is too long", id="long-name-of-8-gib"),
        pytest.param(_extended(b"L", b"a/" * 40_000) + _header() + END, "a path is too long", id="path-too-long"),
        pytest.param(_extended(b"L", b"lost") + END, "cut short", id="name-of-nothing"),
        pytest.param(_extended(b"x", b"") * 20 + _header() + END, "too many extended headers", id="headers-without-end"),
        pytest.param(_extended(b"x", b"11 path=abc") + _header() + END, "a pax header is malformed", id="pax-no-newline"),
        pytest.param(_extended(b"x", b"99 path=ab\n") + _header() + END, "a pax header is malformed", id="pax-too-long"),
        pytest.param(_extended(b"x", b"0 path=abc\n") + _header() + END, "a pax header is malformed", id="pax-of-nothing"),
        pytest.param(_extended(b"x", b"3 \n") + _header() + END, "a pax header is malformed", id="pax-no-key"),
        pytest.param(_extended(b"x", b"18446744073709551627 path=abc\n") + _header() + END, "a pax header is malformed", id="pax-overflow"),
        pytest.param(_extended(b"x", b"11 size=-1\n") + _header() + END, "a pax size is no number", id="pax-negative"),
        pytest.param(_extended(b"x", b"22 GNU.sparse.major=1\n") + _header() + END, "sparse entries are not understood", id="pax-sparse"),
        pytest.param(_extended(b"g", b"12 path=abc\n") + _header() + END, "a global header names one file", id="global-path"),
    ],
)
async def test_a_malformed_archive_is_an_error(files: FileCalls, sent: bytes, reason: str) -> None:
    assert failure(await files.unpack(sent)) == (1, f"the archive: {reason}")


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(END, id="empty"),
        pytest.param(END * 20, id="padded"),
        pytest.param(bytes(BLOCK), id="half-an-end"),
        pytest.param(_extended(b"g", b"16 comment=made\n") + END, id="global-comment"),
        pytest.param(_extended(b"x", b"22 SCHILY.xattr.x=a=b\n") + _header(b"usr/attributed") + END, id="pax-unknown-key"),
    ],
)
async def test_such_archives_are_none(files: FileCalls, sent: bytes) -> None:
    assert failure(await files.unpack(sent)) is None


@pytest.mark.parametrize("name", [b"../out", b"usr/../../out", b"usr/..", b"..", b"a/../b"])
async def test_names_that_climb_are_refused(files: FileCalls, name: bytes) -> None:
    code, reason = failure(await files.unpack(_header(name) + END)) or (0, "")
    assert (code, reason.endswith(": a path with .. in it")) == (1, True)
    assert not (files.root.parent / "out").exists()


@pytest.mark.parametrize("name", [b"", b"/", b".", b"///", b"./."])
async def test_the_root_is_only_a_directory(files: FileCalls, name: bytes) -> None:
    assert failure(await files.unpack(_header(name, kind=b"5") + END)) is None
    code, reason = failure(await files.unpack(_header(name, kind=b"2") + END)) or (0, "")
    assert (code, reason.endswith(": is a directory")) == (21, True)


@pytest.mark.parametrize("form", FORMS)
async def test_an_archive_cut_anywhere_is_an_error(files: FileCalls, here: Path, form: int) -> None:
    members = [(f"{here.name}/d/f{i}", REG, b"y" * 700) for i in range(3)]
    whole = archive(members, form=form)
    end = len(whole.rstrip(b"\0")) // BLOCK * BLOCK + BLOCK
    for cut in (*range(1, BLOCK, 100), *range(BLOCK, end, 97), end):
        assert failure(await files.unpack(whole[:cut])) is not None, cut
    assert failure(await files.unpack(whole[: end + BLOCK])) is None


SEEDS = [
    archive(
        [
            ("area/dir", DIR, ""),
            ("area/dir/file", REG, b"z" * 700),
            (f"area/{'n' * 120}", REG, b"q"),
            ("area/out", SYM, "/usr/kept"),
            (f"area/{'m' * 120}", SYM, "t" * 150),
            ("area/hard", LNK, "area/dir/file"),
        ],
        form=form,
    )
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
]
FIELDS = [0, 1, 100, 124, 125, 134, 135, 136, 156, 157, 257, 263, 345]
VALUES = [0, 1, ord(" "), ord("/"), ord("."), ord("7"), ord("8"), 0x7F, 0x80, 0xFF, *b"012567LKxgS="]


def _resealed(archive_bytes: bytearray) -> bytes:
    """With right checksums in every block that may be a header: behind them is where a parser is weak."""
    for start in range(0, len(archive_bytes) - BLOCK + 1, BLOCK):
        block = archive_bytes[start : start + BLOCK]
        if block[257:262] == b"ustar":
            total = sum(block) - sum(block[148:156]) + 8 * 32
            archive_bytes[start + 148 : start + 156] = b"%06o\0 " % total
    return bytes(archive_bytes)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A real archive with some bytes changed, blocks moved, or its end gone."""
    seed = draw(st.sampled_from(SEEDS))
    made = bytearray(seed[: len(seed.rstrip(b"\0")) + 2 * BLOCK])
    blocks = len(made) // BLOCK
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, blocks - 1)) * BLOCK
        match draw(st.sampled_from(["field", "byte", "move", "cut"])):
            case "field":
                made[at + draw(st.sampled_from(FIELDS))] = draw(st.sampled_from(VALUES))
            case "byte":
                made[at + draw(st.integers(0, BLOCK - 1))] = draw(st.integers(0, 255))
            case "move":
                other = draw(st.integers(0, blocks - 1)) * BLOCK
                made[at : at + BLOCK] = made[other : other + BLOCK]
            case "cut" if draw(st.integers(0, 3)) == 0:
                return _resealed(made[: at + draw(st.integers(1, BLOCK))])
    return _resealed(made) if draw(st.booleans()) else bytes(made)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sent=damaged())
async def test_a_damaged_archive_is_taken_or_refused(files: FileCalls, sent: bytes) -> None:
    """Never a crash (`failure` sees to that), never a file through the link that the archive itself makes."""
    kept = files.root / "usr/kept"
    kept.mkdir(exist_ok=True)
    failure(await files.unpack(sent, "/area"))
    assert list(kept.iterdir()) == []
    again, result = await files.pack("/area")
    assert failure(result) is None
    tarfile.open(fileobj=io.BytesIO(again)).close()
