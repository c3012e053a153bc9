"""How an output is shown of which the agent kept the head and the tail. Pure."""

from sandboxes.base import MARKER

_UTF8_MAX_TRAIL = 3
"""A UTF-8 character has at most three bytes after its first."""


def trim_end(data: bytes) -> bytes:
    """`data` without a character that is cut at its end. Bytes that are not UTF-8 stay as they are."""
    for back in range(1, min(len(data), _UTF8_MAX_TRAIL) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        return data[:-back] if _width(byte) > back else data
    return data


def trim_start(data: bytes) -> bytes:
    """`data` without the rest of a character that was cut at its start. Longer rows of trail bytes are no UTF-8 and stay."""
    for start in range(min(len(data), _UTF8_MAX_TRAIL + 1)):
        if data[start] & 0xC0 != 0x80:
            return data[start:]
    return data


def _width(first: int) -> int:
    """How many bytes the character that starts with `first` has; 1 for what starts none."""
    if first & 0xE0 == 0xC0:
        return 2
    if first & 0xF0 == 0xE0:
        return 3
    return 4 if first & 0xF8 == 0xF0 else 1


def joined(printed: int, head: bytes, tail: bytes) -> bytes:
    """What an output of `printed` bytes is shown as, where its first and its last bytes were kept: all of it, or head, marker, tail."""
    if len(head) + len(tail) >= printed:
        return head + tail
    head, tail = trim_end(head), trim_start(tail)
    return head + MARKER.format(omitted=printed - len(head) - len(tail)).encode() + tail
