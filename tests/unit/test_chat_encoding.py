"""Which vocabularies tiktoken may encode, and that it then gives the same ids."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from service.tiktoken_encoder import tiktoken_encoder

CORPUS = ["def add(a, b):\n    return a + b  # naïve", "The quick brown fox doesn't jump over 1234 lazy dogs."] * 3
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLIT = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|\s+(?!\S)|\s+|[^\s\p{L}\p{N}]+"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)
END = AddedToken("<|end|>", normalized=False, special=True)


def vocabulary(pre_tokenizer: Any = BYTES, *, normalizer: Any = None, added: AddedToken = END) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([added])
    return tokenizer


BY_BYTES, BY_SPLIT, BY_NFC = vocabulary(), vocabulary(SPLIT), vocabulary(normalizer=normalizers.NFC())


@settings(deadline=None)
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(["<|end|>", "<|", " ", "\n", "fox", "doesn't", "12"])).map("".join)))
@pytest.mark.parametrize("tokenizer", [BY_BYTES, BY_SPLIT, BY_NFC], ids=["bytes", "split", "nfc"])
def test_the_same_ids(tokenizer: Tokenizer, text: str) -> None:
    encode = tiktoken_encoder(tokenizer)
    assert encode is not None
    assert encode(text) in (None, tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_row_of_blanks_that_overflows_the_regex_is_left_to_the_other_encoder() -> None:
    """A command can print it."""
    encode = tiktoken_encoder(BY_SPLIT)
    assert encode is not None
    assert encode(" " * 1_000_000) is None
    assert encode(" " * 1000) == BY_SPLIT.encode(" " * 1000, add_special_tokens=False).ids


def test_text_that_must_be_normalised_first_is_left_to_the_other_encoder() -> None:
    encode = tiktoken_encoder(BY_NFC)
    assert encode is not None
    assert encode("e\u0301") is None
    assert encode("\u00e9") is not None


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(vocabulary(pre_tokenizers.Whitespace()), id="other-cuts"),
        pytest.param(vocabulary(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])), id="digits-first"),
        pytest.param(vocabulary(normalizer=normalizers.Lowercase()), id="other-normalizer"),
        pytest.param(vocabulary(added=AddedToken("<|end|>", lstrip=True, normalized=False)), id="token-that-eats-space"),
        pytest.param(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), id="no-bpe"),
    ],
)
def test_vocabularies_of_other_kinds_are_refused(tokenizer: Tokenizer) -> None:
    assert tiktoken_encoder(tokenizer) is None
