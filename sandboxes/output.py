"""What is kept of an output that may be endless: its head and its tail, bounded while it is read."""

from collections import deque

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


class HeadTail:
    """Takes bytes in any pieces, keeps at most `limit` of them (plus one `MARKER`): the first half and the last half.

    Memory stays under `limit` and one piece, whatever is fed. What comes out does not depend on where the pieces were cut.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError("limit must not be negative")
        self._head_limit = limit // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.total = 0
        """Bytes fed so far."""

    @property
    def truncated(self) -> bool:
        return self.total > self._head_limit + self._tail_limit

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._keep(data[-self._tail_limit :] if self._tail_limit else b"")

    def _keep(self, data: bytes) -> None:
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_limit:
            self._tail_size -= len(self._tail.popleft())
        if len(self._tail) > 256:  # many tiny pieces: one buffer, or the bookkeeping outgrows the bytes
            merged = b"".join(self._tail)[-self._tail_limit :]
            self._tail = deque([merged])
            self._tail_size = len(merged)

    def value(self) -> bytes:
        """Everything where it fitted, else head, marker, tail."""
        joined = b"".join(self._tail)
        tail = joined[-self._tail_limit :] if self._tail_limit else b""
        if not self.truncated:
            return bytes(self._head) + tail
        head, tail = trim_end(bytes(self._head)), trim_start(tail)
        return head + MARKER.format(omitted=self.total - len(head) - len(tail)).encode() + tail
