"""The `edit_file` tool: write a file of the sandbox, or replace one passage of it.

All of it runs as commands inside the sandbox, so every path is the sandbox's own and whatever is wrong there (a full disk, a read-only
directory, a file where a directory should be) is an observation. A write lands whole or not at all, and keeps the file's mode and owner.
"""

import posixpath

import msgspec

from sandboxes.base import ExecResult
from workers.commands import Steps
from workers.observations import clip, tail_text

MAX_FILE_BYTES = 1_048_576
"""Larger files are for bash: here the whole file passes through the worker."""

_READ = """
if [ -L "$1" ]; then readlink "$1"; exit 90; fi
if [ -d "$1" ]; then exit 91; fi
if [ ! -e "$1" ]; then exit 92; fi
if [ ! -f "$1" ]; then exit 93; fi
exec head -c "$2" "$1"
"""

_WRITE = """
new="$1.rollway-$$"
mkdir -p "${1%/*}/" || exit 1
if [ -e "$1" ]; then cp -p "$1" "$new" || exit 1; fi
if cat > "$new" && mv -f "$new" "$1"; then exit 0; fi
rm -f "$new"
exit 1
"""


class EditRefusedError(Exception):
    """The edit cannot be made; the message is for the model."""


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """One call's arguments. `old_text` None: the whole file becomes `new_text`."""

    path: str
    new_text: str
    old_text: str | None = None


async def edit_file(steps: Steps, edit: Edit, *, workdir: str) -> str:
    """Make the edit; the sentence that says so.

    Raises:
        EditRefusedError: it cannot be made, and why.
        SandboxError: the sandbox could not do its work.
    """
    path = resolve(edit.path, workdir=workdir)
    new_text = edit.new_text.encode()
    old = await _read(steps, path, max_bytes=0 if edit.old_text is None else MAX_FILE_BYTES)
    if edit.old_text is None:
        content, done = new_text, f"{'created' if old is None else 'wrote'} {path} ({len(new_text)} bytes)"
    else:
        if old is None:
            raise EditRefusedError(f"{path} does not exist; leave out old_text to create it")
        content, done = replace_once(old, edit.old_text.encode(), new_text, path=path), f"replaced 1 passage in {path}"
    await _write(steps, path, content)
    return done


def resolve(path: str, *, workdir: str) -> str:
    """The absolute path inside the sandbox; relative ones start at `workdir`."""
    if not path or "\x00" in path or len(path) > 4096:
        raise EditRefusedError("path must be the path of a file, at most 4096 characters, without NUL")
    if path.endswith("/"):
        raise EditRefusedError(f"{clip(path, 200)} names a directory; path must name a file")
    return "/" + posixpath.normpath(posixpath.join(workdir, path)).lstrip("/")


def replace_once(content: bytes, old: bytes, new: bytes, *, path: str) -> bytes:
    """`content` with its single occurrence of `old` replaced.

    Raises:
        EditRefusedError: `old` is empty, absent, or there more than once (the message has the count), or the file is no text.
    """
    if not old:
        raise EditRefusedError("old_text is empty; leave it out to write the whole file")
    try:
        content.decode()
    except UnicodeDecodeError:
        raise EditRefusedError(f"{path} is not UTF-8 text") from None
    first = content.find(old)
    if first < 0:
        raise EditRefusedError(f"old_text occurs 0 times in {path}; it must occur exactly once, whitespace included")
    if content.find(old, first + 1) >= 0:
        count = max(2, content.count(old))  # overlapping ones count as two
        raise EditRefusedError(f"old_text occurs {count} times in {path}; it must occur exactly once: add lines around it")
    return content[:first] + new + content[first + len(old) :]


async def _read(steps: Steps, path: str, *, max_bytes: int) -> bytes | None:
    """The file's bytes (as many as asked for), or None where there is none."""
    argv = ["sh", "-c", _READ, "sh", path, str(max_bytes + 1 if max_bytes else 0)]
    result = await steps.program("read", argv, max_output_bytes=MAX_FILE_BYTES + 4096)
    match result.exit_code:
        case 0 if len(result.stdout) > max_bytes or result.truncated:
            raise EditRefusedError(f"{path} is larger than {MAX_FILE_BYTES} bytes; use bash")
        case 0:
            return result.stdout
        case 92:
            return None
        case 90:
            raise EditRefusedError(f"{path} is a symbolic link to {clip(tail_text(result.stdout, max_bytes=400).strip(), 200)}; edit that")
        case 91:
            raise EditRefusedError(f"{path} is a directory")
        case 93:
            raise EditRefusedError(f"{path} is not a regular file")
    raise EditRefusedError(f"{path} could not be read: {_why(result, steps.timeout_s)}")


async def _write(steps: Steps, path: str, content: bytes) -> None:
    if len(content) > MAX_FILE_BYTES:
        raise EditRefusedError(f"{path} would be larger than {MAX_FILE_BYTES} bytes; use bash")
    argv = ["sh", "-c", _WRITE, "sh", path]
    result = await steps.program("write", argv, stdin=content, max_output_bytes=4096)
    if result.exit_code != 0:
        raise EditRefusedError(f"{path} could not be written: {_why(result, steps.timeout_s)}")


def _why(result: ExecResult, timeout_s: float) -> str:
    if result.timed_out:
        return f"timed out after {timeout_s:g} s"
    if result.disk_full:
        return "the sandbox's files outgrew its disk limit; remove some"
    return tail_text(result.stderr, max_bytes=500).strip() or f"exit code {result.exit_code}"
