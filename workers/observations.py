"""What the model is shown for a command: one stable, plain text. Pure.

stdout, then stderr, then one line in brackets for each thing worth knowing. Output of bytes that are no UTF-8 gets U+FFFD for each; the
text stays within its bound whatever the command printed (status lines come on top), cut in the middle with a marker that counts.
"""

import re

from sandboxes.base import MARKER, ExecResult

MAX_ERROR_CHARS = 1000
"""A call that was not understood is answered briefly: its text is the model's own and may be endless."""

NO_OUTPUT = "[no output]"

_MARKER = re.compile(re.escape(MARKER).replace(re.escape("{omitted}"), r"(\d{1,18})").encode())


def command_text(result: ExecResult, *, timeout_s: float, max_bytes: int, after_timeout: str = "") -> str:
    """The observation of a command that ran.

    At most `max_bytes` bytes of output and marker, then the status lines. `timeout_s` is what the command was allowed;
    `after_timeout` is said in addition when it took longer.
    """
    stdout, stderr = valid_utf8(result.stdout), valid_utf8(result.stderr)
    cut = result.truncated or len(stdout) + len(stderr) > max_bytes
    stdout = cut_middle(stdout, max_bytes=max(max_bytes - len(stderr), max_bytes // 2))
    stderr = cut_middle(stderr, max_bytes=max_bytes - len(stdout))
    output = [stream.decode() for stream in (stdout, stderr) if stream]
    lines = _status(result, timeout_s=timeout_s, cut_to=max_bytes if cut else None)
    if result.timed_out and after_timeout:
        lines.append(f"[{after_timeout}]")
    return _on_own_lines([*output, *lines]) or NO_OUTPUT


def _status(result: ExecResult, *, timeout_s: float, cut_to: int | None) -> list[str]:
    lines = []
    if cut_to is not None:
        lines.append(f"[output cut to {cut_to} bytes]")
    if result.oom_killed:
        lines.append("[killed for memory: a process went over the sandbox's memory limit]")
    if result.disk_full:
        lines.append("[killed: the sandbox's files outgrew its disk limit; remove some]")
    if result.timed_out:
        lines.append(f"[timed out after {timeout_s:g} s; everything it started was ended]")
    elif result.exit_code:
        lines.append(f"[exit code {result.exit_code}]")
    return lines


def _on_own_lines(parts: list[str]) -> str:
    """The parts as they are, each beginning on a line of its own."""
    ended = [part if part.endswith("\n") else part + "\n" for part in parts[:-1]]
    return "".join([*ended, *parts[-1:]])


def valid_utf8(data: bytes) -> bytes:
    """`data` with U+FFFD for every byte that belongs to no character."""
    return data.decode(errors="replace").encode()


def cut_middle(data: bytes, *, max_bytes: int) -> bytes:
    """Head and tail of valid UTF-8, at most `max_bytes` in all, with `MARKER` between; whole where it fits.

    What an earlier cut left out of the same stream is added to the marker's count, so that it stays true.
    """
    if len(data) <= max_bytes:
        return data
    longest = len(MARKER.format(omitted=10**18))
    room = max_bytes - longest
    if room < 2:
        return data[:max_bytes].decode(errors="ignore").encode()
    head = data[: room // 2].decode(errors="ignore").encode()
    tail = data[len(data) - (room - room // 2) :].decode(errors="ignore").encode()
    middle = data[len(head) : len(data) - len(tail)]
    omitted = len(middle) + sum(int(earlier[1]) - len(earlier[0]) for earlier in _MARKER.finditer(middle))
    return head + MARKER.format(omitted=min(max(omitted, 1), 10**18)).encode() + tail


def tail_text(data: bytes, *, max_bytes: int) -> str:
    """The last `max_bytes` of an output as text."""
    return data[-max_bytes:].decode(errors="replace") if data else ""


_EXPLAINED = {
    "bad_json": "its arguments are not valid JSON; send one JSON object",
    "not_object": "its arguments must be one JSON object",
    "missing_argument": "an argument is missing or has the wrong type",
    "not_a_call": "it is no tool call; a call has a name and an object of arguments",
    "truncated": "it was cut off by the length limit of one turn; make it shorter",
}


def call_error_text(error: str, *, name: str, tools: list[str]) -> str:
    """What is shown in place of a call that was not understood; `error` is `code` or `code: detail`. At most MAX_ERROR_CHARS."""
    code, _, detail = error.partition(":")
    offered = f"Tools: {', '.join(tools)}." if tools else "There are no tools."
    if code == "unknown_tool":
        problem = f"Error: not run, there is no tool named {clip(name, 64)!r}."
    else:
        problem = f"Error: not run, {_EXPLAINED.get(code, 'it could not be understood')}."
        problem += f" ({code}{': ' + clip(detail.strip(), 300) if detail.strip() else ''})"
    return clip(f"{problem} {offered}", MAX_ERROR_CHARS)


def clip(text: str, length: int) -> str:
    """At most `length` characters, valid Unicode."""
    text = text[: length + 1].encode(errors="replace").decode()
    return text if len(text) <= length else text[: length - 1] + "…"
