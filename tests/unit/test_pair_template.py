"""Templates of rerankers: the prompt of a pair, and where its document is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfg_core.errors import ConfigError
from cfg_core.prefill_only.models.pair_template import (
    QWEN3_RERANKER,
    PairTemplate,
    from_chat_template,
)


@given(st.text(), st.text(), st.text())
def test_texts_are_put_in_as_they_are(query, document, instruction):
    """Also those that look like fields."""
    template = PairTemplate(text="{instruction}|{query}|{document}.", instruction="usual")
    pair = template.render(query, document, instruction)
    assert pair.text == f"{instruction or 'usual'}|{query}|{document}."
    assert pair.text[pair.start : pair.end] == document
    braces = template.render("{document}", "{query}", "{query}")
    assert braces.text == "{query}|{document}|{query}."


def test_a_template_without_an_instruction():
    template = PairTemplate(text="{document} for {query}")
    assert not template.takes_instruction
    pair = template.render("q", "d")
    assert (pair.text, pair.start, pair.end) == ("d for q", 0, 1)


@pytest.mark.parametrize("text", ["{query}", "{document}", "{query}{document}{query}"])
def test_a_template_has_each_field_once(text):
    with pytest.raises(ConfigError, match="each of the fields"):
        PairTemplate(text=text)


def test_a_template_with_an_instruction_needs_a_default():
    with pytest.raises(ConfigError, match="set `instruction`"):
        PairTemplate(text="{instruction}{query}{document}")


def test_a_query_that_holds_the_prompt_already():
    begun = "<|im_start|>system\nJudge whether the Document meets the requirements"
    rendered = QWEN3_RERANKER.render("q", "d").text
    assert rendered.startswith(begun)
    assert QWEN3_RERANKER.is_in(rendered)
    assert not QWEN3_RERANKER.is_in("Judge whether")
    assert not PairTemplate(text="{query} {document}").is_in("q")


def content(messages, role):
    return next((message["content"] for message in messages if message["role"] == role), None)


def test_the_template_of_a_chat_template():
    def render(messages):
        asked = content(messages, "system")
        first = "" if asked is None else f"[{asked}] "
        return f"{first}Q{content(messages, 'query')}\nD{content(messages, 'document')}!"

    template = from_chat_template(render)
    assert template.takes_instruction
    assert template.render("q", "d").text == "Qq\nDd!"
    assert template.render("q", "d", "i").text == "[i] Qq\nDd!"


def test_a_chat_template_for_conversations_is_none():
    assert from_chat_template(lambda messages: "<user>") is None

    def raises(messages):
        raise ValueError("unknown role")

    assert from_chat_template(raises) is None


def test_a_chat_template_that_strips_a_text_is_refused():
    def render(messages):
        return f"{content(messages, 'query').strip()} {content(messages, 'document')}"

    with pytest.raises(ConfigError, match="changes the query"):
        from_chat_template(render)
