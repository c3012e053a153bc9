"""What a model asked for, checked against the tools it was given: one rule for every renderer. Pure.

Nothing is guessed: arguments that are a string holding JSON are not an object, a name that is no tool's is not mended, and no call runs
with empty arguments in place of broken ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from service.hermes import Block

SHOWN_CHARS = 200
"""How much of what the model wrote an error repeats."""

MAX_RAW_CHARS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """One call. `arguments` is an object that JSON can hold, or None with `error`.

    error: a code, then `: detail`. `bad_json`, `not_object`, `missing_argument` (or one of a wrong type), `unknown_tool`, `not_a_call`,
    `truncated` (the turn was cut inside the call).
    `raw`: what the model wrote, for people.
    """

    name: str
    arguments: dict[str, Any] | None
    error: str | None
    raw: str


class ToolRules:
    """The tools of one task (OpenAI dicts), by name, with what they ask of their arguments. Odd schemas ask for nothing."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [_object(tool.get("function")) for tool in tools]
        self._parameters = {str(function.get("name")): _object(function.get("parameters")) for function in functions}

    def knows(self, name: str) -> bool:
        return name in self._parameters

    def check(self, name: object, arguments: object, raw: str) -> ParsedCall:
        """The call as it may run, or with the first thing that is wrong with it."""
        if not isinstance(name, str) or not name:
            return failed_call("not_a_call", 'a call is an object with "name" and "arguments"', raw)
        if name not in self._parameters:
            return failed_call("unknown_tool", f"{shown(name)} is not one of the tools", raw, name=name)
        if not isinstance(arguments, dict):
            return failed_call("not_object", f"the arguments must be a JSON object, not {_kind(arguments)}", raw, name=name)
        problem = _storable(arguments) or self._problem(self._parameters[name], arguments)
        if problem:
            code, detail = problem
            return failed_call(code, detail, raw, name=name)
        return ParsedCall(name=name, arguments=arguments, error=None, raw=raw[:MAX_RAW_CHARS])

    def check_block(self, block: Block, *, cut: bool) -> ParsedCall:
        """The call in one Hermes block of a turn that was `cut` or ended by itself."""
        if not block.closed:
            return failed_call("truncated" if cut else "bad_json", "the call has no end tag", block.raw)
        if block.problem is not None:
            return failed_call("bad_json", block.problem, block.raw)
        call = _object(block.value)
        return self.check(call.get("name"), call.get("arguments", {}), block.raw)

    def _problem(self, parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[str, str] | None:
        required = parameters.get("required")
        missing = [name for name in _strings(required) if name not in arguments]
        if missing:
            return "missing_argument", f"{', '.join(map(shown, missing))} must be given"
        properties = _object(parameters.get("properties"))
        for name, value in arguments.items():
            detail = _mismatch(_object(properties.get(name)), value)
            if detail:
                return "missing_argument", f"{shown(name)} {detail}"
        return None


def failed_call(code: str, detail: str, raw: str, *, name: str = "") -> ParsedCall:
    """A call that must not run. What it repeats of the model's text is valid Unicode: JSON escapes can hold lone surrogates."""
    name = name[:SHOWN_CHARS].encode(errors="replace").decode()
    return ParsedCall(name=name, arguments=None, error=f"{code}: {detail}", raw=raw[:MAX_RAW_CHARS])


def shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "...")


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _strings(value: object) -> Iterable[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else ()


def _storable(arguments: dict[str, Any]) -> tuple[str, str] | None:
    """The journal and the sandbox get the arguments as strict JSON: no lone surrogates, 64-bit integers, bounded depth."""
    try:
        orjson.dumps(arguments)
    except orjson.JSONEncodeError as error:
        return "bad_json", str(error)
    return None


_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "object": (dict,),
    "array": (list,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, types in _KINDS.items() if isinstance(value, types)), type(value).__name__)


def _mismatch(schema: Mapping[str, Any], value: object) -> str | None:
    """What top-level `type` and `enum` of a JSON schema say against `value`."""
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else list(_strings(kind))
    known = [name for name in kinds if name in _KINDS]
    if known and not any(_is_kind(name, value) for name in known):
        return f"must be {' or '.join(known)}, not {_kind(value)}"
    choices = schema.get("enum")
    if isinstance(choices, list) and value not in choices:
        return f"must be one of {shown(', '.join(map(str, choices)))}"
    return None


def _is_kind(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS[name])
