"""Reasoning under guidance: parser, budget of thinking tokens, and a grammar after the reasoning.

The model is the one of configs/cfg.yaml with markers of reasoning (examples/thinker.py). Expected
texts come from `cfg_core.reference` in float32.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from cfg_core.reference import FORBIDDEN, Formula, weighted_generate
from examples import thinker
from tests.docs.snippets import ROOT, snippets_of
from tests.engine.in_process_server import Server, events
from tests.support.remembering import Reference

RECIPE = ROOT / "docs/recipes/thinking.md"

BUDGET = 10
"""The newline of the template counts, so the model thinks for one token less."""
NEW_TOKENS = 24
HELPFUL = "You are a helpful assistant."
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "How do I make tea?"},
    ],
    "temperature": 0,
    "max_tokens": NEW_TOKENS,
    "thinking_token_budget": BUDGET,
}
GUIDANCE = {"guidance_scale": 1.5, "negative_prompt": HELPFUL}
STEP = r"Step [1-9]: [a-z]{2,6} the tea"


@pytest.fixture(scope="module")
def reasoner(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat model with `<think>`, `</think>` and a template that opens the reasoning."""
    folder = tmp_path_factory.mktemp("reasoner") / "reasoner"
    thinker.make(chat_model, folder)
    return folder


@pytest.fixture(scope="module")
def server(reasoner: Path) -> Iterator[Server]:
    server = Server(reasoner, reasoning_parser="deepseek_r1", kv_cache_memory_bytes=128 << 20)
    yield server
    server.close()


@pytest.fixture
def idle(server: Server) -> Iterator[Server]:
    yield server
    server.assert_idle()


@functools.lru_cache(maxsize=4)
def expected_ids(folder: Path, part: str | None = None) -> list[int]:
    """The guided greedy tokens, with `</think>` forced where the budget is spent.

    part: only this part is guided.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    start, end = map(tokenizer.convert_tokens_to_ids, ("<think>", "</think>"))
    between = {None: None, "thinking": (start, end), "answer": (end, start)}[part]

    def close(scores: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
        if len(output) != BUDGET - 1:
            return scores
        forced = torch.full_like(scores, FORBIDDEN)
        forced[end] = scores[end]
        return forced

    def ids(system: str) -> list[int]:
        chat = [{"role": "system", "content": system}, CHAT["messages"][1]]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert text.endswith(thinker.OPENED)
        found: list[int] = tokenizer(text).input_ids
        return found

    text = weighted_generate(
        Reference(folder),
        ids("You are a pirate."),
        [ids(HELPFUL)],
        Formula(scales=((0, 1.5),), between=between),
        max_new_tokens=NEW_TOKENS,
        processors=[close],
    )
    return text.token_ids


def test_reasoning_and_answer_are_guided(idle: Server, reasoner: Path) -> None:
    body = {**CHAT, **GUIDANCE, "return_token_ids": True}
    answer = idle.answer(body)
    assert answer["choices"][0]["token_ids"] == expected_ids(reasoner)
    assert answer["guidance"]["guided_tokens"] == NEW_TOKENS
    message = answer["choices"][0]["message"]
    assert message["reasoning"]
    assert message["content"]
    assert idle.answer(CHAT)["choices"][0]["message"] != message


@pytest.mark.parametrize(
    ("part", "guided"), [("thinking", BUDGET), ("answer", NEW_TOKENS - BUDGET)]
)
def test_one_part_is_guided(idle: Server, reasoner: Path, part: str, guided: int) -> None:
    """The token that ends the thinking belongs to it."""
    answer = idle.answer({**CHAT, **GUIDANCE, "guidance_in": part, "return_token_ids": True})
    assert answer["choices"][0]["token_ids"] == expected_ids(reasoner, part)
    assert answer["guidance"]["guided_tokens"] == guided
    assert answer["guidance"]["gate_closed_tokens"] == NEW_TOKENS - guided
    assert expected_ids(reasoner, "thinking") != expected_ids(reasoner, "answer")


def test_the_recipe(idle: Server) -> None:
    """The request of docs/recipes/thinking.md: its thought is guided, and its answer is not."""
    (request,) = [x.text for x in snippets_of(RECIPE) if x.kind == "curl"]
    body = json.loads(request[request.index("'{") + 1 : request.rindex("'")])
    del body["model"]
    answer = idle.answer(body)
    thought = body["thinking_token_budget"]
    after = answer["usage"]["completion_tokens"] - thought
    assert answer["guidance"]["guided_tokens"] == thought
    assert answer["guidance"]["gate_closed_tokens"] == after > 0


def test_a_stream_tells_reasoning_from_content(idle: Server) -> None:
    whole = idle.answer({**CHAT, **GUIDANCE})["choices"][0]["message"]
    deltas = [
        choice["delta"]
        for event in events(idle.ask({**CHAT, **GUIDANCE, "stream": True}))
        for choice in event["choices"]
    ]
    for key in ("reasoning", "content"):
        assert "".join(delta.get(key) or "" for delta in deltas) == whole[key]


def test_a_grammar_begins_after_the_reasoning(idle: Server) -> None:
    body = {**CHAT, **GUIDANCE, "max_tokens": 60, "structured_outputs": {"regex": STEP}}
    message = idle.answer(body)["choices"][0]["message"]
    assert re.fullmatch(STEP, message["content"])
    free = idle.answer({**CHAT, **GUIDANCE})["choices"][0]["message"]
    assert message["reasoning"] == free["reasoning"]
