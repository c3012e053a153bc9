"""What runs inside a sandbox on our behalf, as command lines: pure.

A sandbox needs `bash` and GNU `tar`, nothing else of ours. Every command starts through a few words of bash, so that a missing
program, a missing directory and an argument past the kernel's limit give the same results on every backend.
"""

import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BOOT = """IFS= read -r -d '' text; eval "$text\""""
"""The first process. Its program comes over stdin: on the command line it would fill every `ps` that a model looks at."""
STATE_DIRECTORY = "/run/rollway"
"""A small tmpfs of its own: a full disk does not break sessions. What a model writes there harms its own sandbox only."""
STATE_MIB = 16

CALL_VARIABLE = "ROLLWAY_CALL"
"""In the environment of every command: what is to die with a call is found by it."""

_INIT = Path(__file__).with_name("init.bash").read_text()
_SESSION = Path(__file__).with_name("session.bash").read_text()
_SESSION_MAIN = f'. {STATE_DIRECTORY}/session; eval "$__rollway_script"; {{ __rollway_save $? "$@"; }} 2>/dev/null'
_START = 'cd -- "$1" || exit 126; shift; exec -- "$@"'
_START_SCRIPT = 'cd -- "$1" || exit 126; shift; printf -v BASH_EXECUTION_STRING %s "$@"; set --; eval "$BASH_EXECUTION_STRING"'
_PIECE_BYTES = 120_000
"""Linux takes no single argument of 131,072 bytes or more (MAX_ARG_STRLEN)."""
_TOTAL_BYTES = 1_900_000
"""Nor more than a quarter of an 8 MiB stack for all arguments and the environment."""

_UNPACK = """
(($#)) && { rm -rf -- "$@" || exit; }
exec tar --extract --file=- --directory=/ --no-same-owner --preserve-permissions --keep-directory-symlink
"""
_PACK = """
cd / || exit 1
for path; do shift; [[ -e $path || -L $path ]] && set -- "$@" "${path#/}"; done
(($#)) || { tar --create --file=- --files-from=/dev/null; exit; }
tar --create --file=- --format=posix --numeric-owner --ignore-failed-read -- "$@"
code=$?
exit $((code == 1 ? 0 : code)) # 1: a file changed while it was read
"""


PROGRAM = f"{_INIT}\0{_SESSION}\0".encode()
"""What `BOOT` reads: written once to the first process's stdin, before the first request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a backend starts: an argument vector in an environment. `tag` is in that environment."""

    argv: Sequence[str]
    env: Mapping[str, str]
    tag: str
    stdin: bytes | None = None


class ArgumentsTooLongError(Exception):
    """The kernel would answer E2BIG."""


def new_tag(session: str | None = None) -> str:
    """A tag for one call, or, for a session, one whose beginning all of the session's calls share; see `session_prefix`."""
    return f"{session or ''}.{secrets.token_hex(8)};"


def session_prefix(session: str) -> str:
    """What the tags of all calls of this session begin with, and no other tag does."""
    return f"{session}."


def command(argv: Sequence[str], *, workdir: str, env: Mapping[str, str], stdin: bytes | None = None) -> Command:
    """Run `argv` in `workdir`.

    Raises:
        ArgumentsTooLongError: no kernel would start it.
    """
    tag = new_tag()
    if all(len(arg.encode()) < _PIECE_BYTES for arg in argv):
        line = ["bash", "-c", _START, "bash", workdir, *argv]
    elif len(argv) == 3 and list(argv[:2]) == ["bash", "-c"]:
        line = ["bash", "-c", _START_SCRIPT, "bash", workdir, *_pieces(argv[2])]
    else:
        raise ArgumentsTooLongError(argv[0])
    return _checked(Command(argv=line, env={**env, CALL_VARIABLE: tag}, tag=tag, stdin=stdin))


def session_command(script: str, *, session: str, workdir: str, env: Mapping[str, str], stdin: bytes | None = None) -> Command:
    """Run `script` in the shell session of that name. `env` is exported into the session.

    Raises:
        ArgumentsTooLongError: no kernel would start it.
    """
    tag = new_tag(session)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    line = ["bash", "-c", _SESSION_MAIN, "bash", state_file(session), workdir, exports, *_pieces(script)]
    return _checked(Command(argv=line, env={CALL_VARIABLE: tag}, tag=tag, stdin=stdin))


def state_file(session: str) -> str:
    """Where a session is kept between its calls."""
    return f"{STATE_DIRECTORY}/session-{session}"


def unpack_command(archive: bytes, *, replaced: Sequence[str] = ()) -> Command:
    """Unpack a tar at `/`, after removing what lies at the paths `replaced`."""
    tag = new_tag()
    return _checked(Command(argv=["bash", "-c", _UNPACK, "bash", *replaced], env={CALL_VARIABLE: tag}, tag=tag, stdin=archive))


def pack_command(paths: Sequence[str]) -> Command:
    """Write a tar of `paths` to stdout."""
    tag = new_tag()
    return _checked(Command(argv=["bash", "-c", _PACK, "bash", *paths], env={CALL_VARIABLE: tag}, tag=tag))


def _pieces(script: str) -> list[str]:
    """`script` in pieces that are no argument too long each; a character is at most four bytes."""
    size = _PIECE_BYTES // 4 if not script.isascii() else _PIECE_BYTES
    return [script[start : start + size] for start in range(0, len(script), size)] or [""]


def _checked(made: Command) -> Command:
    if sum(len(arg.encode()) + 9 for arg in made.argv) > _TOTAL_BYTES:
        raise ArgumentsTooLongError(made.argv[0])
    return made
