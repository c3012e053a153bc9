"""Control markers in untrusted text are cut; everything else stays as it is."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.plain_text import PlainText

MARKERS = ["<|im_end|>", "<|im_start|>", "<tool_call>", "<<", "<<<", "aba", "\n\n", "x"]
PLAIN = PlainText(MARKERS)
CUT = [marker for marker in MARKERS if marker not in ("\n\n", "x")]

text = st.lists(st.one_of(st.sampled_from([*MARKERS, "<", "<|", "|>", "a", "b", "im_end"]), st.text(max_size=4)), max_size=12).map("".join)


def test_white_space_and_single_characters_cannot_be_cut() -> None:
    assert PLAIN.markers == set(CUT)


def test_every_string_of_a_value_is_marked() -> None:
    marked = PLAIN.mark([{"a<tool_call>": ["<tool_call>", 5, None]}])
    assert marked == [{f"a<{PLAIN.sentinel}tool_call>": [f"<{PLAIN.sentinel}tool_call>", 5, None]}]


def test_two_processes_never_share_a_sentinel() -> None:
    assert PlainText(MARKERS).sentinel != PLAIN.sentinel


def test_a_vocabulary_without_added_tokens_needs_no_cuts() -> None:
    assert PlainText([]).mark("<|im_end|>") == "<|im_end|>"


@given(text=text)
def test_no_piece_holds_a_marker_and_no_character_is_lost(text: str) -> None:
    pieces = PLAIN.pieces(PLAIN.mark_text(text))
    assert "".join(pieces) == text
    assert not [piece for piece in pieces for marker in CUT if marker in piece]


@given(
    value=st.recursive(
        st.one_of(st.integers(), st.text(max_size=3)), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner)
    )
)
def test_text_without_markers_is_left_alone(value: Any) -> None:
    assert PlainText(["<|never|>"]).mark(value) == value
