"""Archives out of a sandbox that the model owned: what may pass to the verifier's."""

import io
import posixpath
import tarfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.artifacts import ArtifactsError, checked, link_stays


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, len(data), mode
    return info, data


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def passed(*members: tuple[tarfile.TarInfo, bytes], roots: tuple[str, ...] = ("/work",)) -> list[str]:
    done = checked(archive(*members), roots, max_bytes=10_000)
    with tarfile.open(fileobj=io.BytesIO(done.archive)) as tar:
        names = tar.getnames()
    assert done.dropped == len(members) - len(names)
    return names


LINK, HARD, DIRECTORY = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        pytest.param([member("work", DIRECTORY), member("work/a", data=b"x")], ["work", "work/a"], id="files"),
        pytest.param([member("/work/a"), member("./work/b")], ["work/a", "work/b"], id="spellings-of-a-name"),
        pytest.param([member("verify/run.py"), member("workshop/x")], [], id="outside"),
        pytest.param([member("work/../verify/run.py")], [], id="dots"),
        pytest.param([member("work/l", LINK, "/verify/solution.py")], [], id="link-to-the-verifier"),
        pytest.param([member("work/l", LINK, "../verify/solution.py")], [], id="relative-link-out"),
        pytest.param([member("work", LINK, "/verify")], [], id="the-artifact-itself-is-a-link"),
        pytest.param([member("work/d/l", LINK, "../a"), member("work/m", LINK, "/work/a")], ["work/d/l", "work/m"], id="links-inside"),
        pytest.param([member("work/venv/bin/python", LINK, "/usr/bin/python3")], ["work/venv/bin/python"], id="link-to-an-interpreter"),
        pytest.param([member("work/l", LINK, "/proc/self/root/verify/solution.py")], [], id="link-through-proc"),
        pytest.param([member("work/d/l", LINK, "/work"), member("work/m", LINK, "d/l/../verify/x")], ["work/d/l"], id="dots-after-a-link"),
        pytest.param([member("work/l", LINK, "d"), member("work/l/x")], ["work/l"], id="below-a-link"),
        pytest.param([member("work/l", LINK, "d"), member("work/l", data=b"x")], ["work/l"], id="twice"),
        pytest.param([member("work/a"), member("work/b", HARD, "work/a")], ["work/a", "work/b"], id="hard-link-inside"),
        pytest.param([member("work/b", HARD, "verify/run.py"), member("work/c", HARD, "work/later")], [], id="hard-link-out"),
        pytest.param([member("work/f", tarfile.FIFOTYPE), member("work/z", tarfile.CHRTYPE)], [], id="devices"),
    ],
)
def test_what_may_pass(members: list[Any], expected: list[str]) -> None:
    assert passed(*members) == expected


def test_set_id_bits_are_taken_off_and_contents_kept() -> None:
    done = checked(archive(member("work/x", data=b"body", mode=0o4755)), ["/work"], max_bytes=10_000)
    with tarfile.open(fileobj=io.BytesIO(done.archive)) as tar:
        info = tar.getmember("work/x")
        content = tar.extractfile(info)
        assert content is not None
        assert content.read() == b"body"
    assert info.mode == 0o755


def test_too_much_is_refused_by_its_unpacked_size() -> None:
    with pytest.raises(ArtifactsError, match="9 bytes"):
        checked(archive(member("work/a", data=b"12345"), member("work/b", data=b"67890")), ["/work"], max_bytes=9)


def test_what_is_no_tar_raises() -> None:
    with pytest.raises(tarfile.TarError):
        checked(b"x" * 2000, ["/work"], max_bytes=10_000)


steps = st.lists(st.sampled_from(["a", "b", "work", "verify", "..", ".", ""]), min_size=1, max_size=5).map("/".join)


@given(steps, st.dictionaries(st.sampled_from(["/work/a", "/work/b", "/work/b/a", "/work/a/b"]), steps, max_size=4))
def test_no_chain_of_kept_links_leads_out(target: str, others: dict[str, str]) -> None:
    """Follow a kept link as a kernel would, through every other kept link."""
    links = {path: to for path, to in {**others, "/work/l": target}.items() if link_stays(path, to, ["/work"])}
    links = {path: to for path, to in links.items() if not any(path.startswith(f"{other}/") for other in links)}
    if "/work/l" in links:
        end = follow("/work/l", links)
        assert end is None or end == "/work" or end.startswith("/work/")


def follow(path: str, links: dict[str, str]) -> str | None:
    """Where `path` really leads; None for a loop."""
    todo, at, hops = path.split("/")[1:], "", 0
    while todo:
        step = todo.pop(0)
        if step in ("", "."):
            continue
        at = posixpath.dirname(at).rstrip("/") if step == ".." else f"{at}/{step}"
        if at in links:
            hops += 1
            if hops > 40:
                return None
            to = links[at]
            at = "" if to.startswith("/") else posixpath.dirname(at).rstrip("/")
            todo = [*to.split("/"), *todo]
    return at or "/"
