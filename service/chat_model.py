"""Messages to token ids and sampled ids back to tool calls, for one model: the only place where a chat template is applied.

`prompt` renders a conversation once; from then on `extend` adds the ids that new messages append, and nothing sampled is encoded again
(P1). Text in messages and tool specs never becomes a control token (P2, `plain_text`).
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from service.calls import ParsedCall, ToolRules, failed_call
from service.errors import TaskFaultError
from service.fast_tokenizer import FastTokenizer
from service.hermes import MAX_CALLS, read_reply
from service.plain_text import PlainText

TAIL_IDS = 64
"""How much of the history before a turn an extension needs: the last turn boundary and the generation prompt. Checked at load."""

HERMES = frozenset({"chatml", "qwen3", "qwen3-vl"})
"""Renderers whose replies are Hermes text. We read it ourselves: an end tag may stand in a JSON string, ids may be cut anywhere."""

RENDERER_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, RecursionError, NotImplementedError)
"""What the renderers of the package raise on messages or replies that they do not foresee."""

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """One reply. `calls`: in the order the model made them, bad ones in their place; `content`: what stands before the first."""

    content: str
    reasoning: str | None
    calls: tuple[ParsedCall, ...]


class ChatModel:
    """One tokenizer and one renderer. Thread-safe after construction; `load_chat_model` makes it.

    name: of the renderer. vocab_size: ids below it are safe to send to the engine. fingerprint: sha256 of tokenizer and renderer.
    tail_only: extensions look at the end of the history only. tokenizer, plain: how it encodes, what it keeps apart.
    """

    def __init__(
        self, *, renderer: Any, tokenizer: FastTokenizer, plain: PlainText, name: str, vocab_size: int, fingerprint: str, tail_only: bool
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint
        self.stop_token_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        self._renderer = renderer
        self.tokenizer = tokenizer
        self.plain = plain
        self.tail_only = tail_only
        self._opening: list[int] = self.prompt([{"role": "user", "content": "hi"}], [])

    def prompt(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of the whole conversation, ready for the model's next turn. Cost: its length.

        Raises:
            TaskFaultError: the template cannot write these messages.
        """
        try:
            ids: list[int] = self._renderer.render_ids(self._ready(messages), tools=self._specs(tools), add_generation_prompt=True)
        except RENDERER_ERRORS as error:
            raise TaskFaultError(f"messages: renderer {self.name} cannot render them ({type(error).__name__}: {error})") from error
        return ids

    def extend(self, ids: "array[int]", turn_start: int, messages: Sequence[Message], tools: Tools) -> list[int] | None:
        """The ids that follow a whole turn: what closes it, `messages` (observations), the next generation prompt. Cost: the turn's length.

        `ids` is the sample so far, the turn's sampled ids from `turn_start` on. None: the template cannot extend it; a new sample opens.
        """
        head = ids[max(0, turn_start - TAIL_IDS) if self.tail_only else 0 : turn_start].tolist()
        return self._bridge(head, ids[turn_start:].tolist(), messages, tools)

    def _bridge(self, head: list[int], turn: list[int], messages: Sequence[Message], tools: Tools) -> list[int] | None:
        try:
            bridged = self._renderer.bridge_to_next_turn(head, turn, self._ready(messages), tools=self._specs(tools))
        except RENDERER_ERRORS:
            return None  # `prompt` says what is wrong, if it cannot render them either
        if bridged is None:
            return None
        known = len(head) + len(turn)
        extended: list[int] = bridged.token_ids
        return extended[known:] if extended[:known] == head + turn else None

    def parse(self, token_ids: Sequence[int], tools: Tools, *, cut: bool) -> Parsed:
        """Read one whole turn. `cut`: it ended for its length, so its last call may be incomplete. Never raises, whatever the ids."""
        rules = ToolRules(tools)
        if self.name in HERMES:
            return self._parse_hermes(self._until_stop(token_ids), rules, cut=cut)
        try:
            reply = self._renderer.parse_response(list(token_ids), tools=list(tools), prompt_ids=self._opening)
        except RENDERER_ERRORS as error:
            text = self.decode(token_ids)
            call = failed_call("truncated" if cut else "bad_json", f"the reply cannot be read ({type(error).__name__})", text)
            return Parsed(content="", reasoning=None, calls=(call,))
        calls = [_checked(call, rules, cut=cut) for call in reply.tool_calls[:MAX_CALLS]]
        return _parsed(reply.content, reply.reasoning_content, calls, rest=len(reply.tool_calls) > MAX_CALLS)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, control tokens shown; for people and for parsing only."""
        return self.tokenizer.decode(token_ids)

    def _parse_hermes(self, token_ids: Sequence[int], rules: ToolRules, *, cut: bool) -> Parsed:
        reply = read_reply(self.decode(token_ids))
        return _parsed(reply.content, reply.reasoning, [rules.check_block(block, cut=cut) for block in reply.blocks], rest=reply.rest)

    def _until_stop(self, token_ids: Sequence[int]) -> Sequence[int]:
        stop = next((index for index, token in enumerate(token_ids) if token in self.stop_token_ids), None)
        return token_ids if stop is None else token_ids[:stop]

    def _ready(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as the renderers want them: arguments as objects, no empty fields, control markers broken."""
        ready: list[dict[str, Any]] = self.plain.mark([_with_objects(message) for message in messages])
        return ready

    def _specs(self, tools: Tools) -> list[dict[str, Any]] | None:
        return self.plain.mark(list(tools)) or None


def _with_objects(message: Message) -> dict[str, Any]:
    ready = {key: value for key, value in message.items() if value is not None}
    if ready.get("tool_calls"):
        ready["tool_calls"] = [_with_object(call) for call in ready["tool_calls"]]
    return ready


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """A template writes arguments its own way, so it wants the object; text that is no object stays text."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return dict(call)
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return dict(call)
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else dict(call)


def _parsed(content: str, reasoning: str | None, calls: list[ParsedCall], *, rest: bool) -> Parsed:
    if rest:
        calls = [*calls, failed_call("not_a_call", f"more than {MAX_CALLS} calls in one reply; the rest was not read", "")]
    return Parsed(content=content, reasoning=reasoning, calls=tuple(calls))


_CODES = {
    "invalid_json": "bad_json",
    "unclosed_block": "truncated",
    "missing_name": "not_a_call",
    "malformed_structure": "not_a_call",
    "unknown_tool": "unknown_tool",
}


def _checked(call: Any, rules: ToolRules, *, cut: bool) -> ParsedCall:
    """A call that a renderer read, under the one rule for all."""
    code = _CODES.get(str(call.status))
    named = isinstance(call.name, str) and call.name != ""
    if code is None or (named and not rules.knows(call.name)):
        return rules.check(call.name, {} if call.arguments is None else call.arguments, call.raw)
    if code == "truncated" and not cut:
        code = "bad_json"
    return failed_call(code, f"the call is not well formed ({call.status})", call.raw, name=call.name if named else "")
