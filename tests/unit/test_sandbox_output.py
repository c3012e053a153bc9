"""What is shown of an output: all of it, or head and tail with whole characters at the seam."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.base import MARKER
from sandboxes.output import joined, trim_end, trim_start

MARKER_RE = re.compile(re.escape(MARKER).replace(r"\{omitted\}", r"(\d+)").encode())


@pytest.mark.parametrize(
    ("data", "end", "start"),
    [
        pytest.param("aé".encode()[:-1], b"a", b"a\xc3", id="cut-two"),
        pytest.param("😀".encode()[:3], b"", b"\xf0\x9f\x98", id="cut-four"),
        pytest.param("😀".encode()[1:] + b"z", b"\x9f\x98\x80z", b"z", id="rest-of-four"),
        pytest.param(b"\x80" * 5, b"\x80" * 5, b"\x80" * 5, id="no-utf8"),
        pytest.param(b"", b"", b"", id="empty"),
    ],
)
def test_trim(data: bytes, end: bytes, start: bytes) -> None:
    assert trim_end(data) == end
    assert trim_start(data) == start


@given(cap=st.integers(8, 64), text=st.text(max_size=400))
def test_what_the_agent_kept_is_shown_whole_or_with_a_marker(cap: int, text: str) -> None:
    data = text.encode()
    head, tail = data[: cap // 2], data[max(cap // 2, len(data) - (cap - cap // 2)) :]
    out = joined(len(data), head, tail)
    out.decode()
    if len(data) <= cap:
        assert out == data
    else:
        (omitted,) = MARKER_RE.findall(out)
        first, last = re.split(MARKER_RE, out, maxsplit=1)[::2]
        assert len(first) + len(last) + int(omitted) == len(data)
        assert data.startswith(first)
        assert data.endswith(last)
