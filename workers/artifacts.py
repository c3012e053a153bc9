"""What goes from the agent's sandbox to the verifier's: files and directories, and nothing that could point elsewhere.

The archive comes out of a sandbox that the model owned, so every member is checked: it lies under an asked-for path, it is a file, a
directory or a link that stays among the artifacts or leads to the system's programs. Whatever else there is (devices, links to the
verifier's own files) is left behind.
"""

import asyncio
import io
import posixpath
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sandboxes.base import Sandbox, SandboxContentError, SandboxTooLargeError
from workers.commands import COPY_S, within

_PROGRAMS = ("/bin", "/lib", "/lib64", "/sbin", "/usr")
"""A link may lead here too: to the interpreter of a virtual environment. No verifier keeps its files here."""


class ArtifactsError(Exception):
    """What the model left cannot be copied: reward 0 with `reason`, no fault of anyone else."""

    def __init__(self, reason: Literal["artifacts_too_large", "artifacts_unreadable"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Artifacts:
    """A checked archive for `put_tar`; `dropped` counts the members that were left behind."""

    archive: bytes
    dropped: int


async def collect(sandbox: Sandbox, paths: Sequence[str], *, max_bytes: int) -> Artifacts:
    """Copy `paths` out of the agent's sandbox. Nothing of the agent may run any more.

    Raises:
        ArtifactsError: more than `max_bytes`, as an archive or unpacked; or the agent broke what is needed to read them.
        SandboxError: the sandbox could not do its work.
    """
    try:
        archive = await within(COPY_S, sandbox.get(paths, max_bytes=max_bytes), what="copying the artifacts")
        return await asyncio.to_thread(checked, archive, paths, max_bytes=max_bytes)
    except SandboxTooLargeError as error:
        raise ArtifactsError("artifacts_too_large", str(error)) from error
    except (SandboxContentError, tarfile.TarError) as error:
        raise ArtifactsError("artifacts_unreadable", str(error)) from error


def checked(archive: bytes, paths: Sequence[str], *, max_bytes: int) -> Artifacts:
    """The members of `archive` that may be unpacked elsewhere, in their order.

    Raises:
        ArtifactsError: unpacked they are more than `max_bytes` (sparse files).
        tarfile.TarError: not a tar.
    """
    kept: set[str] = set()
    links: set[str] = set()
    dropped = size = 0
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as source,
        tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in source:
            path = posixpath.normpath("/" + member.name.lstrip("/"))
            if not _may_pass(member, path, paths, kept=kept, links=links):
                dropped += 1
                continue
            size += member.size if member.isreg() else 0
            if size > max_bytes:
                raise ArtifactsError("artifacts_too_large", f"unpacked they are more than {max_bytes} bytes")
            kept.add(path)
            if member.issym():
                links.add(path)
            target.addfile(_plain(member, path), source.extractfile(member) if member.isreg() else None)
    return Artifacts(out.getvalue(), dropped)


def _may_pass(member: tarfile.TarInfo, path: str, roots: Sequence[str], *, kept: set[str], links: set[str]) -> bool:
    """A member below a kept link could land anywhere; a link may only lead to what is copied."""
    if ".." in member.name.split("/") or path in kept or not _inside(path, roots) or not links.isdisjoint(_parents(path)):
        return False
    if member.issym():
        return path not in roots and link_stays(path, member.linkname, [*roots, *_PROGRAMS])
    if member.islnk():
        target = posixpath.normpath("/" + member.linkname.lstrip("/"))
        return target in kept and target not in links
    return member.isreg() or member.isdir()


def link_stays(path: str, target: str, roots: Sequence[str]) -> bool:
    """Whether a symlink at `path` leads to something under `roots`, whatever other kept links are on the way.

    `..` is only taken at the beginning, where it climbs from the link's own, real directory; later it could climb from another link's
    target.
    """
    steps = target.split("/")
    while steps and steps[0] in ("..", "."):
        steps.pop(0)
    if not target or ".." in steps or "\x00" in target:
        return False
    return _inside(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)), roots)


def _inside(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def _parents(path: str) -> list[str]:
    steps = path.split("/")[1:-1]
    return ["/" + "/".join(steps[: index + 1]) for index in range(len(steps))]


def _plain(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """The member without set-id bits, extended attributes and sparseness."""
    plain = tarfile.TarInfo(path.lstrip("/"))
    plain.type = tarfile.REGTYPE if member.isreg() else member.type
    plain.size = member.size if member.isreg() else 0
    plain.mode, plain.mtime, plain.uid, plain.gid = member.mode & 0o777, member.mtime, member.uid, member.gid
    plain.linkname = member.linkname
    return plain
