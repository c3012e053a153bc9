"""Tars made and cleaned."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import archive
from sandboxes.base import SandboxSpecError

NAMES = st.sampled_from(["a", "a/b", "a/b/c", "../x", "/abs", "a/../../x", "l", "l/inside", "./dot", ".", "d"])
TYPES = st.sampled_from([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.BLKTYPE])


def packed(entries: list[tuple[str, bytes, str]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, target in entries:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, target, 0o6777
            tar.addfile(member)
    return buffer.getvalue()


@given(entries=st.lists(st.tuples(NAMES, TYPES, NAMES), max_size=12))
def test_cleaned_stays_below_its_own_names(entries: list[tuple[str, bytes, str]]) -> None:
    links: set[str] = set()
    files: set[str] = set()
    with tarfile.open(fileobj=io.BytesIO(archive.cleaned(packed(entries)))) as tar:
        for member in tar:
            parts = member.name.split("/")
            assert ".." not in parts
            assert parts[0] != ""
            assert not any("/".join(parts[:depth]) in links for depth in range(1, len(parts)))
            assert member.isreg() or member.isdir() or member.issym() or member.linkname in files
            assert member.mode & 0o7000 == 0
            assert (member.uid, member.gid) == (0, 0)
            (links if member.issym() else files).add(member.name)


def test_a_hard_link_is_no_way_through_a_link() -> None:
    """Its target is written as it was cleaned; one to a link would be a link that nobody looks at."""
    hard, soft, file = tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.REGTYPE
    entries = [("./f", file, ""), ("h", hard, "./f"), ("l", soft, "/etc"), ("through", hard, "l"), ("through/x", file, "")]
    with tarfile.open(fileobj=io.BytesIO(archive.cleaned(packed(entries)))) as tar:
        assert [(member.name, member.linkname) for member in tar] == [("f", ""), ("h", "f"), ("l", "/etc"), ("through/x", "")]


def test_files_come_back() -> None:
    files = {"/a/b": b"1", "/c": b"", "/ü/x": b"\xff"}
    with tarfile.open(fileobj=io.BytesIO(archive.from_files(files, mode=0o600))) as tar:
        found = {f"/{member.name}": tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        assert {member.mode for member in tar} == {0o600}
    assert found == files


@pytest.mark.parametrize("path", ["", "/", "a", "a/b", "../a", "/a/../b", "/a\0b", "."])
def test_only_absolute_paths_of_files(path: str) -> None:
    with pytest.raises(SandboxSpecError, match="absolute"):
        archive.checked_path(path)


def test_long_names_stay_what_they_are() -> None:
    """The agent reads GNU tars: a name past 100 bytes, and one with bytes that are no text."""
    files = {f"/{'d' * 90}/{'f' * 90}": b"1", "/" + "é" * 120: b"2"}
    with tarfile.open(fileobj=io.BytesIO(archive.cleaned(archive.from_files(files, mode=0o644)))) as tar:
        assert [f"/{member.name}" for member in tar] == list(files)
