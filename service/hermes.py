"""The Hermes form of a reply, read as text: optional `<think>` reasoning, content, then `<tool_call>` blocks of JSON.

Pure. The whole turn is read as one text, so the calls are the same however its ids were cut. A block's JSON decides where the block ends:
an end tag inside a JSON string does not. A broken block ends at the first tag that can end it, so its neighbours are still read.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"

MAX_CALLS = 256
"""More calls than this in one reply are not read one by one; every call costs an observation."""

_EDGE = re.compile(r"</tool_call>|\n[ \t]*<tool_call>")
"""What ends a broken block: its end tag, or a call that opens on a line of its own."""

_SPACE = re.compile(r"\s*")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One `<tool_call>` block. `value`: its JSON; `problem` says why there is none. `closed`: its end tag was there."""

    raw: str
    value: object = None
    problem: str | None = None
    closed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HermesReply:
    """`content`: what stands before the first call. `rest`: blocks past `MAX_CALLS`, unread."""

    content: str
    reasoning: str | None
    blocks: tuple[Block, ...]
    rest: bool = False


def read_reply(text: str, *, thinking: bool = False) -> HermesReply:
    """Read a whole turn. `thinking`: the prompt already opened the reasoning. Never raises."""
    reasoning, start = _reasoning(text, thinking=thinking)
    opening = text.find(OPEN, start) if start >= 0 else -1
    if opening < 0:
        return HermesReply(content=text[start:].strip() if start >= 0 else "", reasoning=reasoning, blocks=())
    blocks: list[Block] = []
    for block in _blocks(text, opening):
        if len(blocks) == MAX_CALLS:
            return HermesReply(content=text[start:opening].strip(), reasoning=reasoning, blocks=tuple(blocks), rest=True)
        blocks.append(block)
    return HermesReply(content=text[start:opening].strip(), reasoning=reasoning, blocks=tuple(blocks))


def _reasoning(text: str, *, thinking: bool) -> tuple[str | None, int]:
    """The reasoning and where the rest begins (-1: nowhere). A call ends reasoning that has no end tag; with one, it is part of it."""
    opened = text.lstrip().startswith(THINK)
    if not opened and not thinking:
        return None, 0
    start = text.index(THINK) + len(THINK) if opened else 0
    end = text.find(END_THINK, start)
    after = end + len(END_THINK)
    if end < 0:
        end = after = text.find(OPEN, start)
    reasoning = text[start : end if end >= 0 else len(text)].strip()
    return reasoning or None, after if end >= 0 else -1


def _blocks(text: str, opening: int) -> Iterator[Block]:
    while opening >= 0:
        block, end = _block(text, opening + len(OPEN))
        yield block
        opening = text.find(OPEN, end)


def _block(text: str, start: int) -> tuple[Block, int]:
    """The block whose opening tag ends at `start`, and where the text goes on."""
    begin = _end_of_space(text, start)
    try:
        value, stop = _decoder.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        return _broken(text, start, start, "nested too deeply" if isinstance(error, RecursionError) else str(error))
    after = _end_of_space(text, stop)
    if text.startswith(CLOSE, after):
        return Block(raw=text[begin:stop], value=value), after + len(CLOSE)
    return _broken(text, start, stop, "something follows the JSON value")


def _broken(text: str, start: int, search: int, problem: str) -> tuple[Block, int]:
    edge = _EDGE.search(text, search)
    raw = text[start : edge.start() if edge else len(text)].strip()
    if edge is None:
        return Block(raw=raw, problem=problem, closed=False), len(text)
    closed = edge.group() == CLOSE
    return Block(raw=raw, problem=problem), edge.end() if closed else edge.end() - len(OPEN)


def _end_of_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start
