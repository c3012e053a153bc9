"""Tars made and cleaned; the command lines of a guest."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes import archive, guest
from sandboxes.base import SandboxSpec, SandboxSpecError
from sandboxes.docker_config import callers_labels, checked, container

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


@given(script=st.text(alphabet=st.characters(exclude_characters="\0", codec="utf-8"), max_size=50), repeat=st.integers(1, 9000))
def test_long_scripts_are_cut_into_arguments_a_kernel_takes(script: str, repeat: int) -> None:
    whole = script * repeat
    made = guest.session_command(whole, session="s", workdir="/", env={})
    assert "".join(made.argv[7:]) == whole
    assert all(len(arg.encode()) < 131_072 for arg in made.argv)


def test_tags_of_sessions_share_their_beginning_with_nobody() -> None:
    assert guest.new_tag("s1").startswith(guest.session_prefix("s1"))
    assert not guest.new_tag("s11").startswith(guest.session_prefix("s1"))
    assert not guest.new_tag().startswith(guest.session_prefix("s1"))


def test_a_container_is_closed_by_default() -> None:
    config = container(SandboxSpec(image="i", labels={"job": "j"}), name="n1", deployment_id="d", image_env={"PATH": "/opt/bin"})
    host = config["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["MemorySwap"] == host["Memory"] == 512 * 2**20
    assert "Binds" not in host
    assert not any(entry.startswith("PATH=") for entry in config["Env"]), "the image's own PATH stands"
    assert config["Labels"] == {"rollway": "d", "rollway.sandbox": "n1", "rollway.job": "j"}
    assert callers_labels(config["Labels"]) == {"job": "j"}


@pytest.mark.parametrize("network", ["host", "container:abc"])
def test_networks_of_others_are_refused(network: str) -> None:
    with pytest.raises(SandboxSpecError, match="network"):
        checked(SandboxSpec(image="i", network=network), "n1")
