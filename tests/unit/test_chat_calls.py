"""Replies in the Hermes form, read as text and checked against the tools: the cases by their right answers."""

import json
import string
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.calls import ParsedCall, ToolRules
from service.hermes import MAX_CALLS, read_reply


def tool(name: str, properties: Any, required: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = [tool("bash", {"cmd": {"type": "string"}}, ["cmd"]), tool("submit", {"answer": {"type": "string"}}, [])]


def read(text: str, *, cut: bool = False, tools: list[dict[str, Any]] | None = None) -> list[ParsedCall]:
    rules = ToolRules(TOOLS if tools is None else tools)
    return [rules.check_block(block, cut=cut) for block in read_reply(text).blocks]


def outcome(call: ParsedCall) -> Any:
    """The arguments of a good call, the code of a bad one."""
    return call.arguments if call.error is None else call.error.partition(":")[0]


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def bash(cmd: str) -> str:
    return block(json.dumps({"name": "bash", "arguments": {"cmd": cmd}}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(block('{"name": "bash", "arguments": {"cmd": "echo "hi" && ls"}}'), ["bad_json"], id="case-009"),
        pytest.param(block('{"name": "bash", "arguments": "{\\"cmd\\": \\"ls -l\\"}"}'), ["not_object"], id="case-010"),
        pytest.param(
            block('{"name": "bash", "arguments": {"cmd": "grep -rn \'</tool_call>\' src | head"}}') + "\n" + bash("pwd"),
            [{"cmd": "grep -rn '</tool_call>' src | head"}, {"cmd": "pwd"}],
            id="case-011",
        ),
        pytest.param(
            bash("echo 1") + "\n" + block('{"name": "bash", "arguments": {"cmd": "echo 2",,}}') + "\n" + bash("echo 3"),
            [{"cmd": "echo 1"}, "bad_json", {"cmd": "echo 3"}],
            id="case-012",
        ),
        pytest.param(
            "\n".join(
                map(
                    block,
                    [
                        '{"name": "bash", "arguments": ["ls"]}',
                        '{"name": "bash", "arguments": 5}',
                        '{"name": "submit", "arguments": {}}',
                        '{"name": "bash"}',
                        "5",
                    ],
                )
            ),
            ["not_object", "not_object", {}, "missing_argument", "not_a_call"],
            id="case-013",
        ),
        pytest.param(
            block('{"name": "bashbash", "arguments": {"cmd": "ls"}}') + "\n" + block('{"name": "python", "arguments": {"code": "1"}}'),
            ["unknown_tool", "unknown_tool"],
            id="case-014",
        ),
        pytest.param(block('{"name": "bash", "arguments": null}'), ["not_object"], id="null-arguments"),
        pytest.param(block('{"name": "bash", "arguments": {"cmd": 5}}'), ["missing_argument"], id="wrong-type"),
        pytest.param(block('{"name": ["bash"], "arguments": {}}'), ["not_a_call"], id="name-is-a-list"),
        pytest.param(block('{"name": "bash", "arguments": {"cmd": NaN}}'), ["bad_json"], id="not-a-number"),
        pytest.param(block('{"name": "bash", "arguments": {"cmd": "\\ud800"}}'), ["bad_json"], id="lone-surrogate"),
        pytest.param(block('{"name": "\\ud800", "arguments": {}}'), ["unknown_tool"], id="lone-surrogate-in-the-name"),
        pytest.param(block('{"name": "submit", "arguments": {"n": ' + "1" * 5000 + "}}"), ["bad_json"], id="endless-number"),
        pytest.param(block('{"name": "submit", "arguments": {"n": 1' + "0" * 30 + "}}"), ["bad_json"], id="number-past-64-bits"),
        pytest.param(block("[" * 5000), ["bad_json"], id="nested-too-deeply"),
        pytest.param(block('{"name": "submit", "arguments": {"n": ' + "[" * 600 + "]" * 600 + "}}"), ["bad_json"], id="deep-but-closed"),
        pytest.param('<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool_call>', [{"cmd": "ls"}], id="on-one-line"),
        pytest.param('<tool_call>\n{"name": "bash"\n' + bash("ls"), ["bad_json", {"cmd": "ls"}], id="a-new-call-ends-a-broken-one"),
        pytest.param("<tool_call>\n" + bash("ls"), ["bad_json", {"cmd": "ls"}], id="opened-twice"),
        pytest.param(bash("echo '<tool_call>'"), [{"cmd": "echo '<tool_call>'"}], id="opening-tag-in-a-string"),
        pytest.param(block('{"name": "submit", "arguments": {}} trailing'), ["bad_json"], id="text-after-the-json"),
        pytest.param(block(""), ["bad_json"], id="empty"),
        pytest.param("no calls", [], id="none"),
    ],
)
def test_calls_in_their_places(text: str, expected: list[Any]) -> None:
    assert [outcome(call) for call in read(text)] == expected


def test_content_and_order_around_calls() -> None:
    """case-015: the whole text."""
    text = "First.\n" + bash('echo "{a}" > é.txt') + "\n" + bash("cat é.txt")
    assert read_reply(text).content == "First."
    assert [call.arguments for call in read(text)] == [{"cmd": 'echo "{a}" > é.txt'}, {"cmd": "cat é.txt"}]


@pytest.mark.parametrize(
    ("text", "cut", "code"),
    [
        pytest.param('<tool_call>\n{"name": "bash", "argu', True, "truncated", id="cut-in-the-json"),
        pytest.param('<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}', True, "truncated", id="cut-before-the-end-tag"),
        pytest.param('<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}', False, "bad_json", id="ended-by-the-model"),
    ],
)
def test_a_call_without_its_end_never_runs(text: str, cut: bool, code: str) -> None:
    calls = read(bash("pwd") + "\n" + text, cut=cut)
    assert [outcome(call) for call in calls] == [{"cmd": "pwd"}, code]


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        pytest.param("<think>\nhm\n</think>\n\nok", "ok", "hm", 0, id="reasoned"),
        pytest.param("<think>\nhm", "", "hm", 0, id="still-reasoning"),
        pytest.param("<think>\n" + bash("ls") + "</think>done", "done", bash("ls"), 0, id="a-draft-in-the-reasoning"),
        pytest.param("<think>\nhm\n" + bash("ls"), "", "hm", 1, id="a-call-ends-the-reasoning"),
        pytest.param("<think>\n\n</think>\n\nok", "ok", None, 0, id="empty"),
        pytest.param("say <think> aloud", "say <think> aloud", None, 0, id="not-at-the-start"),
    ],
)
def test_reasoning(text: str, content: str, reasoning: str | None, calls: int) -> None:
    reply = read_reply(text)
    assert (reply.content, reply.reasoning, len(reply.blocks)) == (content, reasoning, calls)


def test_more_calls_than_anyone_answers_are_not_read() -> None:
    reply = read_reply("\n".join([bash("ls")] * (MAX_CALLS + 1)))
    assert len(reply.blocks) == MAX_CALLS
    assert reply.rest


@pytest.mark.parametrize(
    ("schema", "value", "good"),
    [
        pytest.param({"type": "integer"}, 3, True, id="integer"),
        pytest.param({"type": "integer"}, 3.0, True, id="whole-float"),
        pytest.param({"type": "integer"}, True, False, id="true-is-no-integer"),
        pytest.param({"type": "number"}, 3, True, id="number"),
        pytest.param({"type": ["string", "null"]}, None, True, id="one-of-two-types"),
        pytest.param({"type": "boolean"}, 0, False, id="zero-is-no-boolean"),
        pytest.param({"type": "array"}, {}, False, id="object-for-array"),
        pytest.param({"enum": ["a", "b"]}, "c", False, id="not-in-the-enum"),
        pytest.param({"type": "elephant", "enum": 5}, "c", True, id="odd-schema-asks-nothing"),
        pytest.param("odd", "c", True, id="no-schema"),
    ],
)
def test_top_level_types(schema: Any, value: Any, good: bool) -> None:
    call = ToolRules([tool("t", {"x": schema}, "odd")]).check("t", {"x": value}, "")
    assert (call.error is None) is good


def test_an_error_is_short_and_says_the_name() -> None:
    (call,) = read(block(json.dumps({"name": "x" * 9999, "arguments": {}})))
    assert call.error is not None
    assert call.error.startswith("unknown_tool: 'xxx")
    assert len(call.error) < 1000


scraps = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "\n",
        '{"name": "bash", "arguments": ',
        '{"cmd": "',
        '"}',
        "}",
        "[",
        ",",
        "\\",
        "5",
        "é",
        " ",
    ]
)
anything = st.one_of(st.text(max_size=30), st.lists(st.one_of(scraps, st.text(string.printable, max_size=3)), max_size=40).map("".join))


@given(text=anything, cut=st.booleans())
def test_nothing_a_model_writes_raises_or_cannot_be_stored(text: str, cut: bool) -> None:
    for call in read(text, cut=cut):
        assert (call.arguments is None) is (call.error is not None)
        orjson.dumps([call.name, call.arguments, call.error])


@given(
    commands=st.lists(st.one_of(anything, st.text(max_size=50)), min_size=1, max_size=4), content=st.text(string.ascii_letters, max_size=20)
)
def test_well_formed_calls_are_read_as_written(commands: list[str], content: str) -> None:
    text = content + "\n" + "\n".join(bash(command) for command in commands)
    assert [call.arguments for call in read(text)] == [{"cmd": command} for command in commands]
    assert read_reply(text).content == content
