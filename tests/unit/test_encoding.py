"""Long texts do not hold up the loop."""

import threading

import pytest

from workers.encoding import ENCODED_CHARS, off_loop


@pytest.mark.parametrize(
    ("length", "on_loop"),
    [pytest.param(10, True, id="short"), pytest.param(ENCODED_CHARS + 1, False, id="case-064-long")],
)
async def test_where_it_is_encoded(length: int, on_loop: bool) -> None:
    thread = await off_loop([{"role": "tool", "content": "x" * length}, {"role": "tool", "content": None}], threading.get_ident)
    assert (thread == threading.get_ident()) is on_loop
