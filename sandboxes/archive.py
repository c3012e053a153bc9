"""Tars that go into a sandbox: made from files, or cleaned from what another sandbox gave. Pure."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import PurePosixPath

from sandboxes.base import SandboxSpecError

_KEPT_MODE = 0o777
"""No set-uid, set-gid or sticky bit goes from one sandbox into another."""


def from_files(files: Mapping[str, bytes], *, mode: int) -> bytes:
    """A tar of regular files owned by root. The paths are absolute.

    Raises:
        SandboxSpecError: a path that is not absolute or climbs.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(checked_path(path).lstrip("/"))
            member.size = len(content)
            member.mode = mode
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def checked_path(path: str) -> str:
    """`path`, normalised.

    Raises:
        SandboxSpecError: it is not an absolute path of a file.
    """
    parts = PurePosixPath(path).parts
    if not parts or parts[0] != "/" or len(parts) == 1 or ".." in parts or "\0" in path:
        raise SandboxSpecError(f"{path!r} is not an absolute path to a file: write it as /directory/name, without '..'")
    return str(PurePosixPath("/", *parts[1:]))


def cleaned(archive: bytes) -> bytes:
    """An archive from an untrusted sandbox without what could reach outside its own paths.

    Left out: absolute or climbing names, devices and pipes, hard links to what is no file here, anything below a name
    that is a link here, and every entry of a name but its first. Links stay links.

    Raises:
        tarfile.TarError: it is no tar.
    """
    buffer, links, seen = io.BytesIO(), set[str](), set[str]()
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as source,
        tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as target,
    ):
        for member in source:
            name = _safe_name(member.name)
            if name is None or name in seen or _below(name, links) or not _transferable(member, seen, links):
                continue
            if not member.isdir():
                seen.add(name)
            if member.issym():
                links.add(name)
            if member.islnk():
                member.linkname = _safe_name(member.linkname) or ""
            member.name, member.mode = name, member.mode & _KEPT_MODE
            member.uid = member.gid = 0
            member.pax_headers = {}
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
    return buffer.getvalue()


def _safe_name(name: str) -> str | None:
    parts = [part for part in PurePosixPath(name).parts if part != "."]
    return None if not parts or parts[0].startswith("/") or ".." in parts else "/".join(parts)


def _below(name: str, links: set[str]) -> bool:
    return any(str(parent) in links for parent in PurePosixPath(name).parents)


def _transferable(member: tarfile.TarInfo, seen: set[str], links: set[str]) -> bool:
    """A hard link to a link would be one more link, and nothing would keep entries from being put below it."""
    if not member.islnk():
        return member.isreg() or member.isdir() or member.issym()
    target = _safe_name(member.linkname)
    return target in seen and target not in links
