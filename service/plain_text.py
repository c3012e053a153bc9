"""Text from users, tools and files stays text: control markers in it are broken before a template is encoded.

A chat template is one string (or a few) in which our text and the template's own control markers stand side by side, so whoever encodes it
cannot tell a marker that a program printed from one that the template put there. `PlainText.mark` therefore cuts every marker in
untrusted text with a sentinel that nobody can guess, and the tokenizer cuts the string at the sentinels and encodes the pieces one by
one: no piece holds a whole marker, and the ids decode to the same characters.
"""

import re
import secrets
from collections import defaultdict
from collections.abc import Iterable
from typing import Any


class PlainText:
    """Cuts `markers` (strings that a tokenizer maps to one added token) in untrusted text.

    Markers of one character cannot be cut, and runs of white space are not control tokens: both are left alone.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = frozenset(marker for marker in markers if len(marker) > 1 and marker.strip())
        self.sentinel = secrets.token_hex(16)  # letters and digits: survives JSON escapes, strip() and casefolding templates
        self._starts = re.compile(self._pattern()) if self.markers else None
        self._cut = rf"\g<0>{self.sentinel}"

    def _pattern(self) -> str:
        """Match the first character of every occurrence, overlapping ones included: only that character is consumed."""
        rests = defaultdict(list)
        for marker in sorted(self.markers):
            rests[marker[0]].append(re.escape(marker[1:]))
        return "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())

    def mark_text(self, text: str) -> str:
        return self._starts.sub(self._cut, text) if self._starts else text

    def mark(self, value: Any) -> Any:
        """`value` (JSON: messages, tool specs, arguments) with every string in it marked, keys of objects included."""
        if isinstance(value, str):
            return self.mark_text(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def pieces(self, text: str) -> list[str]:
        """The parts of a marked text that must be encoded apart."""
        return text.split(self.sentinel)
