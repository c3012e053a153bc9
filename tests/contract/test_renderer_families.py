"""Renderers of the package whose calls are not Hermes text, each on a tiny vocabulary with the family's markers."""

import json
import random
from array import array
from itertools import takewhile
from typing import Any

import pytest

from service.chat import ChatModel, load_chat_model
from service.settings import Settings
from tests.chatml_vocabulary import make_tiny_chatml

FAMILIES = {
    "qwen3.5": [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"),
        *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    ],
    "kimi-k2": [
        *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[EOS]"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
    ],
    "llama-3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
}
FUNCTION = {
    "name": "bash",
    "description": "Run a command",
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": FUNCTION}]
TASK = {"role": "user", "content": "Count the files."}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    root = tmp_path_factory.mktemp("families")
    make_tiny_chatml(root / "tiny", added=FAMILIES[request.param])
    return load_chat_model("tiny", request.param, settings=Settings(tokenizer_roots=[root]))


def answer(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "functions.bash:0", "name": "bash", "content": text}


def turn_with(model: ChatModel, name: str, arguments: dict[str, Any]) -> list[int]:
    """The ids of a turn with one call, as the family's own template writes it."""
    call = {"id": f"functions.{name}:0", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    history = model.prompt([TASK, {"role": "assistant", "content": "", "tool_calls": [call]}, answer("x")], TOOLS)
    prompt = model.prompt([TASK], TOOLS)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, history, strict=False)))
    turn = history[common:]
    end = next(index for index, token in enumerate(turn) if token in model.stop_token_ids)
    return turn[: end + 1]


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        pytest.param("bash", {"cmd": "ls"}, None, id="good"),
        pytest.param("python", {"cmd": "ls"}, "unknown_tool", id="case-014"),
        pytest.param("bash", {}, "missing_argument", id="case-013"),
    ],
)
def test_one_rule_for_all(model: ChatModel, name: str, arguments: dict[str, Any], error: str | None) -> None:
    (call,) = model.parse(turn_with(model, name, arguments), TOOLS, cut=False).calls
    assert (call.error or "").partition(":")[0] == (error or "")
    assert call.arguments == (None if error else arguments)


def test_no_reply_raises(model: ChatModel) -> None:
    dice = random.Random(7)
    markers = model.tokenizer.known_ids(*model.plain.markers)
    prompt = model.prompt([TASK], TOOLS)
    for _ in range(500):
        ids = [dice.choice(markers) if dice.random() < 0.5 else dice.randrange(model.vocab_size) for _ in range(dice.randrange(30))]
        for call in model.parse(ids, TOOLS, cut=dice.random() < 0.5).calls:
            assert (call.error is None) is (call.arguments is not None)
        model.extend(array("i", prompt + ids), len(prompt), [answer("x")], TOOLS)


def test_markers_in_observations_stay_text(model: ChatModel) -> None:
    """case-083"""
    prompt, turn = model.prompt([TASK], TOOLS), turn_with(model, "bash", {"cmd": "ls"})
    hostile = "".join(sorted(model.plain.markers))
    suffixes = [model.extend(array("i", prompt + turn), len(prompt), [answer(text)], TOOLS) for text in ("ok", hostile)]
    controls = set(model.tokenizer.known_ids(*model.plain.markers))
    tame, marked = ([token for token in suffix or [] if token in controls] for suffix in suffixes)
    assert tame == marked
    assert hostile in model.decode(suffixes[1] or [])
    assert model.tail_only
