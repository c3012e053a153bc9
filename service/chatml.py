"""A renderer for ChatML models that the `renderers` package lacks (SmolLM2 and many others): what `ChatModel` calls of its protocol.

`<|im_start|>role\\ncontent<|im_end|>\\n`, tools in the Hermes form: their specs in the system message, calls and answers as text in
`<tool_call>` and `<tool_response>`, which are no special tokens here. What a turn adds is a pure suffix by construction: every message is
written by itself, and the sampled ids are kept.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from renderers.base import RenderedTokens

START, END = "<|im_start|>", "<|im_end|>"

_TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

Message = Mapping[str, Any]


class ChatmlRenderer:
    """Messages to ids and back for one ChatML vocabulary.

    `default_system`: what the model's own template says where no system message is given; None: nothing.
    """

    def __init__(self, tokenizer: Any, *, default_system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._start, self._end = tokenizer.convert_tokens_to_ids([START, END])
        self._default_system = default_system
        eos = {tokenizer.eos_token_id, *tokenizer.known_ids("<|endoftext|>")} - {None, self._end}
        self._stops = [self._end, *sorted(eos)]

    def get_stop_token_ids(self) -> list[int]:
        return list(self._stops)

    def render_ids(self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        ids: list[int] = []
        system, rest = self._split_system(messages, tools)
        if system is not None:
            ids += self._message("system", system)
        ids += self._messages(rest)
        return ids + self._generation_prompt() if add_generation_prompt else ids

    def bridge_to_next_turn(
        self, previous_prompt_ids: list[int], previous_completion_ids: list[int], new_messages: Sequence[Message], *, tools: Any = None
    ) -> RenderedTokens | None:
        """The previous ids and what follows them. A turn that was cut gets the end token that the model did not sample."""
        if not new_messages or any(message["role"] == "assistant" for message in new_messages):
            return None
        ended = [index for index, token in enumerate(previous_completion_ids) if token in self._stops]
        if ended and ended[0] != len(previous_completion_ids) - 1:
            return None  # the model went on past its own end: no template writes this
        close = [] if ended else [self._end]
        suffix = [*close, *self._text("\n"), *self._messages(new_messages), *self._generation_prompt()]
        return RenderedTokens(token_ids=[*previous_prompt_ids, *previous_completion_ids, *suffix])

    def _split_system(self, messages: Sequence[Message], tools: Any) -> tuple[str | None, Sequence[Message]]:
        """The text of the system message, tools included, and the messages after it."""
        first = messages[0] if messages else {}
        system = first["content"] if first.get("role") == "system" else self._default_system
        rest = messages[1:] if first.get("role") == "system" else messages
        if not tools:
            return system, rest
        specs = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (f"{system}\n\n" if system else "") + _TOOLS_HEADER + specs + _TOOLS_FOOTER, rest

    def _messages(self, messages: Sequence[Message]) -> list[int]:
        return [token for role, text in _turns(messages) for token in self._message(role, text)]

    def _message(self, role: str, text: str) -> list[int]:
        return [self._start, *self._text(f"{role}\n{text}"), self._end, *self._text("\n")]

    def _generation_prompt(self) -> list[int]:
        return [self._start, *self._text("assistant\n")]

    def _text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _turns(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Role and text of each message; neighbouring tool messages share one turn of the user."""
    responses: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            responses.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if responses:
            yield "user", "\n".join(responses)
            responses = []
        yield message["role"], _assistant_text(message) if message["role"] == "assistant" else message["content"]
    if responses:
        yield "user", "\n".join(responses)


def _assistant_text(message: Message) -> str:
    reasoning = message.get("reasoning_content")
    parts = [f"<think>\n{reasoning}\n</think>\n\n{message['content']}" if reasoning else message["content"]]
    for call in message.get("tool_calls") or []:
        function = call["function"]
        body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(part for part in parts if part)
