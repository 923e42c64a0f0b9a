"""What models/real_size.py makes has the sizes that it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from models.real_size import (
    LARGEST_VOCABULARY,
    POSITIONS,
    SPECIAL,
    TAGS,
    VOCABULARY,
    real_size_model,
)

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("vocabulary", [VOCABULARY, LARGEST_VOCABULARY])
def test_model_and_tokenizer_have_exactly_so_many_tokens(vocabulary: int) -> None:
    folder = real_size_model(vocabulary)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == len(AutoTokenizer.from_pretrained(folder)) == vocabulary
    assert config["max_position_embeddings"] == POSITIONS


def test_tags_of_tool_calls_are_tokens_that_stay_in_the_text(model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    for tag in TAGS:
        (token,) = tokenizer.encode(tag, add_special_tokens=False)
        assert tokenizer.decode([token], skip_special_tokens=True) == tag
    assert not tokenizer.decode(range(len(SPECIAL)), skip_special_tokens=True)


def test_the_template_shows_tools_and_calls(model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    call = {"type": "function", "function": {"name": "find", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "There."},
    ]
    options = {"tokenize": False, "add_generation_prompt": True}
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], **options)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '<tool_call>\n{"name": "find", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert text.endswith("\nThere.\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert "<tools>" not in tokenizer.apply_chat_template(messages[:2], **options)
