"""The stand-in's parts: ids that decode to their text however they are cut, turns found in prompts, seeded choices, spans."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.errors import InvalidError
from service.standin.cuts import VARIANTS, Cutter
from service.standin.engine import Engine
from service.standin.policy import Candidate, Policy, Rule, load_policy
from service.standin.sampler import NothingToSayError, Sampler
from service.standin.template import packed
from tests.standin_stack import chatml, tiny_model

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l /work"}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("standin") / "tiny"


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return tiny_model(folder)


def sampler(model: Any, policy: Policy, *, seed: int = 0) -> Sampler:
    return Sampler(*model, policy, seed=seed)


@given(text=st.text(max_size=200), variant=st.integers(0, VARIANTS - 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_cut_ids_decode_to_their_text(model: Any, text: str, variant: int) -> None:
    tokenizer, template = model
    *ids, last = Cutter(tokenizer, template.end_id, seed=0).cut(text, variant)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert last == template.end_id


def test_cuts_differ_from_the_tokenizers_own_and_markers_stay_whole(model: Any) -> None:
    tokenizer, template = model
    text = f"Count the files.<|im_start|>{CALL}"
    cuts = {Cutter(tokenizer, template.end_id, seed=0).cut(text, variant) for variant in range(VARIANTS)}
    own = (*tokenizer.encode(text, add_special_tokens=False).ids, template.end_id)
    assert len(cuts - {own}) > VARIANTS // 2
    start = tokenizer.token_to_id("<|im_start|>")
    assert {ids.count(start) for ids in cuts} == {1}


@pytest.mark.parametrize("variant", range(4))
def test_a_cut_turn_goes_on_from_its_own_ids(model: Any, variant: int) -> None:
    tokenizer, template = model
    cutter = Cutter(tokenizer, template.end_id, seed=0)
    text = "Zażółć 漢字 and so on"
    whole = cutter.cut(text, variant)
    for length in range(1, len(whole)):
        rest = cutter.resume(text, whole[:length], 0)
        assert tokenizer.decode(whole[:length] + rest, skip_special_tokens=False) == f"{text}<|im_end|>"


def test_the_template_is_learned_and_counts_turns(model: Any) -> None:
    tokenizer, template = model
    user, assistant = {"role": "user", "content": "assistant\nassistant\n"}, {"role": "assistant", "content": "It is done."}
    asked = chatml(tokenizer, [user])
    assert template.read(packed(asked)).turn == 0
    assert template.read(packed(chatml(tokenizer, [user, assistant, user, assistant, user]))).turn == 2
    begun = tokenizer.encode("It is", add_special_tokens=False).ids
    reading = template.read(packed(asked + begun))
    assert (reading.turn, reading.begun) == (0, begun)


def test_turns_follow_the_policy_and_the_last_one_repeats(model: Any) -> None:
    tokenizer, _ = model
    rules = [Rule(match="folder", turns=[[Candidate("first")], [Candidate("second")]])]
    speaker = sampler(model, Policy(rules=rules, default=[[Candidate("what?")]]))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Count the folder"}]
    said = []
    for _ in range(3):
        plan = speaker.plan(array("i", chatml(tokenizer, messages)), {}, max_tokens=100)
        said.append(tokenizer.decode(plan.ids))
        messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "Go on"}]
    assert said == ["first", "second", "second"]
    other = speaker.plan(array("i", chatml(tokenizer, [{"role": "user", "content": "x"}])), {}, max_tokens=100)
    assert tokenizer.decode(other.ids) == "what?"


def test_members_of_a_group_differ_and_a_seed_repeats_them(model: Any) -> None:
    tokenizer, _ = model
    policy = Policy(default=[[Candidate(f"answer {number}") for number in range(8)]])
    prompts = [array("i", chatml(tokenizer, [{"role": "user", "content": text}])) for text in ("a", "b")]

    def said(order: list[int], seed: int) -> dict[int, list[list[int]]]:
        speaker = sampler(model, policy, seed=seed)
        found: dict[int, list[list[int]]] = {0: [], 1: []}
        for which in order:
            found[which].append(speaker.plan(prompts[which], {}, max_tokens=100).ids)
        return found

    first = said([0, 0, 0, 0, 1, 1, 1, 1], 1)
    assert len({tuple(ids) for ids in first[0]}) > 1
    assert said([1, 0, 1, 0, 0, 1, 0, 1], 1) == first
    assert said([0, 0, 0, 0, 1, 1, 1, 1], 2) != first


def test_what_ends_a_reply(model: Any) -> None:
    tokenizer, template = model
    speaker = sampler(model, Policy(default=[[Candidate("Count the files in the folder and submit")]]))
    prompt = array("i", chatml(tokenizer, [{"role": "user", "content": "x"}]))
    whole = speaker.plan(prompt, {"temperature": 0}, max_tokens=1000)
    assert whole.stopped_by == whole.ids[-1] == template.end_id
    assert len(whole.logprobs) == len(whole.ids)
    assert all(value <= 0 for value in whole.logprobs)
    assert speaker.plan(prompt, {"temperature": 0}, max_tokens=3).stopped_by is None
    assert speaker.plan(prompt, {"temperature": 0, "stop_token_ids": [whole.ids[1]]}, max_tokens=9).ids == whole.ids[:2]
    stopped = speaker.plan(prompt, {"temperature": 0, "stop": ["the folder"]}, max_tokens=1000)
    assert stopped.stopped_by == "the folder"
    assert "the folder" in tokenizer.decode(stopped.ids)
    assert "the folder" not in tokenizer.decode(stopped.ids[:-1])


def test_guided_replies_are_those_that_match(model: Any) -> None:
    tokenizer, _ = model
    speaker = sampler(model, Policy(default=[[Candidate("42"), Candidate("no number")]]))
    prompt = array("i", chatml(tokenizer, [{"role": "user", "content": "x"}]))
    assert {tokenizer.decode(speaker.plan(prompt, {"regex": r"\d+"}, max_tokens=9).ids) for _ in range(8)} == {"42"}
    with pytest.raises(NothingToSayError):
        speaker.plan(prompt, {"regex": "[a-c]"}, max_tokens=9)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("{", id="no-json"),
        pytest.param(json.dumps({"rule": []}), id="unknown-key"),
        pytest.param(json.dumps({"default": [[]]}), id="a-turn-without-candidates"),
        pytest.param(json.dumps({"default": [[{"text": "x", "weight": 0}]]}), id="no-weight"),
        pytest.param(json.dumps({"default": [[{"text": 1}]]}), id="wrong-type"),
    ],
)
def test_a_bad_policy_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(content)
    with pytest.raises(InvalidError, match=r"policy\.json"):
        load_policy(path)


async def test_the_spans_of_a_paced_request_cover_it() -> None:
    engine = Engine(label="1", tokens_per_s=100_000.0)
    running = await engine.run("r", 50)
    assert [(span.version, span.start, span.end) for span in running.spans] == [("1", 0, 50)]
    assert not engine.running
