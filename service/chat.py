"""Loading a `ChatModel`: which tokenizer and renderer a job may name, and what must hold before either is trusted.

Names come from clients, so: only directories under the operator's roots and hub ids the operator listed; never remote code; no network
for a directory.
"""

import hashlib
import json
import re
import threading
from array import array
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

from service.calls import ParsedCall
from service.chat_model import RENDERER_ERRORS, TAIL_IDS, ChatModel, Parsed
from service.chatml import END, START, ChatmlRenderer
from service.errors import FieldProblem, InvalidError, TaskFaultError
from service.fast_tokenizer import FastTokenizer, markers_of
from service.plain_text import PlainText
from service.settings import Settings
from service.tokenizers import quiet_transformers

__all__ = ["ChatModel", "Parsed", "ParsedCall", "load_chat_model", "renderer_names"]


_loading = threading.Lock()
"""One load at a time: many first requests at once would each load the same model, and `transformers` cannot be imported by two threads."""


def load_chat_model(tokenizer: str, renderer: str, *, settings: Settings) -> ChatModel:
    """The model for a job's `model.tokenizer` and `model.renderer`. Blocking (about 2 s the first time), then cached per process.

    Raises:
        InvalidError: naming `model.tokenizer` or `model.renderer` and the cure.
    """
    roots = [root.resolve() for root in (*settings.tokenizer_roots, settings.data_dir / "tokenizers")]
    folder = _listed_folder(tokenizer, roots)
    if folder is None and tokenizer not in settings.tokenizers:
        raise _wrong(
            "model.tokenizer",
            f"{tokenizer!r} is no directory under a root of ROLLWAY_TOKENIZER_ROOTS (or the data directory's tokenizers/) "
            "and no hub id of ROLLWAY_TOKENIZERS; the operator can list it",
        )
    with _loading:
        return _load(str(folder) if folder else tokenizer, renderer)


def _listed_folder(name: str, roots: list[Path]) -> Path | None:
    """The directory that `name` means, by its path or by its name under a root; links that leave the roots do not count."""
    for root in roots:
        folder = (root / name).resolve()  # an absolute name stands for itself
        if folder.is_dir() and folder != root and folder.is_relative_to(root):
            return folder
    return None


MAX_PROBED_MARKERS = 2000
"""Some vocabularies have thousands of unused added tokens, all alike."""


@lru_cache(maxsize=64)
def _load(source: str, renderer: str) -> ChatModel:
    stock = _load_stock(source)
    plain = PlainText(markers_of(stock))
    tokenizer = FastTokenizer(stock, plain)
    name = _resolve(source, stock, plain) if renderer == "auto" else renderer
    made = _make_renderer(name, stock, tokenizer)
    parts = {"renderer": made, "tokenizer": tokenizer, "plain": plain, "name": name}
    parts |= {"vocab_size": _vocab_size(source, stock), "fingerprint": _fingerprint(source, stock, name)}
    try:
        model = ChatModel(**parts, tail_only=True)
        full = ChatModel(**parts, tail_only=False)
        _check_plain(model, tokenizer, plain)
        return model if _tail_suffices(model, full) else full
    except TaskFaultError as error:
        raise _wrong("model.renderer", f"{name!r} does not work with this tokenizer ({error})") from error


def _load_stock(source: str) -> Any:
    quiet_transformers()
    from transformers import AutoTokenizer  # seconds to import: only processes that need a tokenizer pay

    try:
        stock = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=Path(source).is_dir())
    except Exception as error:  # the tokenizers library raises bare Exception for a file it cannot read
        detail = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise _wrong("model.tokenizer", f"cannot be loaded ({detail}); it needs tokenizer.json and tokenizer_config.json") from error
    if not hasattr(stock, "backend_tokenizer"):
        raise _wrong("model.tokenizer", "has no tokenizer.json; convert it to a fast tokenizer")
    return stock


def _make_renderer(name: str, stock: Any, tokenizer: FastTokenizer) -> Any:
    from renderers import config_from_name, create_renderer

    if name not in renderer_names():
        raise _wrong("model.renderer", f"{name!r} is not known; use one of {', '.join(renderer_names())}")
    try:
        if name == "chatml":
            return ChatmlRenderer(tokenizer, default_system=_default_system(stock))
        return create_renderer(tokenizer, config_from_name(name))
    except (*RENDERER_ERRORS, ImportError) as error:
        detail = f"{type(error).__name__}: {error}"[:300]
        raise _wrong("model.renderer", f"{name!r} does not fit this tokenizer ({detail}); name the model's own renderer") from error


def renderer_names() -> list[str]:
    """Names that a job may give as its renderer, beside `auto`."""
    from renderers.base import MODEL_RENDERER_MAP

    return sorted({*MODEL_RENDERER_MAP.values(), "chatml"} - {"gpt-oss"})  # it encodes by a vocabulary of its own that it downloads


def _resolve(source: str, stock: Any, plain: PlainText) -> str:
    """`auto`: by a name that the tokenizer's files give, else ChatML by its markers; offline, and never by likeness."""
    from renderers.base import MODEL_RENDERER_MAP

    for model in _model_names(source):
        if MODEL_RENDERER_MAP.get(model) in renderer_names():
            return str(MODEL_RENDERER_MAP[model])
    template = stock.chat_template if isinstance(stock.chat_template, str) else START
    if {START, END} <= plain.markers and "<tool_call>" not in plain.markers and START in template:
        return "chatml"
    raise _wrong("model.renderer", f"cannot be found by the tokenizer's name; set it to one of {', '.join(renderer_names())}")


def _model_names(source: str) -> list[str]:
    """Hub names that a source goes by: itself, a hub cache's directory, what its files say."""
    folder = Path(source)
    names = [source]
    if match := re.search(r"models--([^/]+?)--([^/]+)/snapshots/", source + "/"):
        names.append(f"{match[1]}/{match[2]}")
    for file, key in (("tokenizer_config.json", "name_or_path"), ("config.json", "_name_or_path")):
        names.append(str(_read_json(folder / file).get(key)))
    return names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _vocab_size(source: str, stock: Any) -> int:
    """The model's own size where its config is at hand (it may be padded), else the tokenizer's."""
    size = _read_json(Path(source) / "config.json").get("vocab_size")
    return size if isinstance(size, int) and size > 0 else len(stock)


def _fingerprint(source: str, stock: Any, name: str) -> str:
    """sha256 of the tokenizer file and the renderer's name: equal where ids mean the same."""
    file = Path(source) / "tokenizer.json"
    data = file.read_bytes() if file.is_file() else stock.backend_tokenizer.to_str().encode()
    return hashlib.sha256(data + b"\0" + name.encode()).hexdigest()


def _default_system(stock: Any) -> str | None:
    """What the model's own template puts in the system message when none is given."""
    if not isinstance(stock.chat_template, str):
        return None
    text = stock.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    match = re.match(rf"{re.escape(START)}system\n(.*?){re.escape(END)}", text, re.DOTALL)
    return match[1] if match else None


_USER = {"role": "user", "content": "Count the files."}
_TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run it", "parameters": {"type": "object", "properties": {}}}}]
_CALLS = [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}]
_REPLIES: list[dict[str, Any]] = [
    {"role": "assistant", "content": "Let me see.", "tool_calls": _CALLS},
    {"role": "assistant", "content": "", "tool_calls": _CALLS},
    {"role": "assistant", "content": "Four.", "reasoning_content": "One, two, three, four."},
]
_ANSWER = {"role": "tool", "tool_call_id": "c1", "name": "bash", "content": "a b c d"}
_FOLLOWING: list[list[dict[str, Any]]] = [[_ANSWER], [_ANSWER, _ANSWER], [{"role": "user", "content": "Go on."}], [_ANSWER, _USER]]


def _tail_suffices(model: ChatModel, full: ChatModel) -> bool:
    """Whether extending the end of a history gives what extending the whole gives, on probe turns whole and cut."""
    prompt = full.prompt([{"role": "system", "content": "word " * 2 * TAIL_IDS}, _USER], _TOOLS)
    for turn in _probe_turns(full):
        ids = array("i", prompt + turn)
        for following in _FOLLOWING:
            if model.extend(ids, len(prompt), following, _TOOLS) != full.extend(ids, len(prompt), following, _TOOLS):
                return False
    return True


def _probe_turns(model: ChatModel) -> list[list[int]]:
    """Replies as this template writes them, each also cut short: before its end token and in its middle."""
    base = model.prompt([_USER], _TOOLS)
    turns = []
    for reply in _REPLIES:
        written = model.prompt([_USER, reply, _ANSWER if reply.get("tool_calls") else _USER], _TOOLS)[len(base) :]
        stop = next((index for index, token in enumerate(written) if token in model.stop_token_ids), len(written) - 1)
        turns += [written[: stop + 1], written[:stop], written[: stop // 2]]
    return turns


def _check_plain(model: ChatModel, tokenizer: FastTokenizer, plain: PlainText) -> None:
    """Refuse a renderer that would let text become control tokens, or that changes text so that the broken markers show."""
    controls = set(tokenizer.known_ids(*plain.markers))
    hostile = "".join(sorted(plain.markers)[:MAX_PROBED_MARKERS])
    tame, ids = (model.prompt([_USER | {"content": text}], _TOOLS) for text in ("hi", f"hi{hostile}"))
    forged = Counter(token for token in ids if token in controls) - Counter(tame)
    if forged or plain.sentinel in model.decode(ids):
        raise _wrong("model.renderer", f"{model.name!r} cannot keep text apart from control tokens with this tokenizer")


def _wrong(field: str, problem: str) -> InvalidError:
    return InvalidError(f"{field}: {problem}", fields=[FieldProblem(field=field, problem=problem)])
