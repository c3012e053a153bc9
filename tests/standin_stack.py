"""The stand-in generator in this process, on a tiny ChatML vocabulary: milliseconds to start, no transformers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer

from service.standin import create_standin
from service.standin.policy import Candidate, Policy
from service.standin.template import Template
from tests.chatml_vocabulary import make_tiny_chatml

LONG = Policy(default=[[Candidate("Count the files in the folder. " * 200)]])


def tiny_model(folder: Path) -> tuple[Tokenizer, Template]:
    """The tokenizer in `folder` (made if it is not there) and its ChatML template as the stand-in learns it."""
    if not folder.exists():
        make_tiny_chatml(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    markers = tokenizer.get_added_tokens_decoder().keys()
    end = tokenizer.token_to_id("<|im_end|>")
    return tokenizer, Template.learn(lambda messages: chatml(tokenizer, messages), markers=markers, stop_token_ids=[end])


def chatml(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    ids: list[int] = tokenizer.encode(f"{text}<|im_start|>assistant\n", add_special_tokens=False).ids
    return ids


@asynccontextmanager
async def standin(folder: Path, policy: Policy = LONG, **options: Any) -> AsyncIterator[str]:
    """Its URL."""
    tokenizer, template = tiny_model(folder / "tiny")
    server = TestServer(create_standin(tokenizer=tokenizer, template=template, policy=policy, **options))
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()
