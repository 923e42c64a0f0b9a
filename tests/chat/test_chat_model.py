"""The shipped configs/cfg.yaml, with the model that set-up fetched: instructions and guidance."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tools.serving.process import Json, ServeProcess

MODEL = "SmolLM2-135M-Instruct"
HELPFUL = "You are a helpful assistant."
GUIDANCE: Json = {"guidance_scale": 1.5, "negative_prompt": HELPFUL}
CHAT: Json = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "How do I make tea?"},
    ],
    "max_tokens": 20,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def chat_client(chat_server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{chat_server.url}/v1", api_key="unused", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="module")
def guided(chat_client: openai.OpenAI) -> Json:
    """The answer of a guided chat."""
    return chat_client.chat.completions.create(**CHAT, extra_body=GUIDANCE).to_dict()


def text_of(answer: Json) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_models(chat_client: openai.OpenAI) -> None:
    cards = [card.to_dict() for card in chat_client.models.list().data]
    assert [card["id"] for card in cards] == [MODEL, "all-MiniLM-L6-v2"]
    assert cards[0]["max_model_len"] == 2048


def test_the_whole_server_is_small(chat_server: ServeProcess, guided: Json) -> None:
    """Everything together used 3.8 GiB when it was measured. Shared pages are counted once."""
    assert chat_server.memory_bytes() < 4.5 * 2**30


def test_guidance_changes_a_chat(chat_client: openai.OpenAI, guided: Json) -> None:
    plain = chat_client.chat.completions.create(**CHAT).to_dict()
    assert text_of(plain) != text_of(guided)
    assert "guidance" not in plain
    used = guided["usage"]["completion_tokens"]
    negative = guided["guidance"].pop("negative_prompt_tokens")
    assert guided["guidance"] == {"scale": 1.5, "streams": 2, "guided_tokens": used}
    assert negative > len(HELPFUL.split())


def test_the_negative_is_a_system_message(chat_client: openai.OpenAI, guided: Json) -> None:
    """`negative_prompt` says the same as a whole negative conversation."""
    messages = [{"role": "system", "content": HELPFUL}, CHAT["messages"][1]]
    other = {"guidance_scale": 1.5, "negative_messages": messages}
    answer = chat_client.chat.completions.create(**CHAT, extra_body=other).to_dict()
    assert text_of(answer) == text_of(guided)


def test_a_stream_has_the_same_text(chat_client: openai.OpenAI, guided: Json) -> None:
    chunks = list(chat_client.chat.completions.create(**CHAT, stream=True, extra_body=GUIDANCE))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text_of(guided)
    assert len(pieces) > 10


def test_a_completion_without_a_template(chat_client: openai.OpenAI) -> None:
    answer = chat_client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0
    )
    assert "Paris" in answer.choices[0].text


def test_an_embedding(chat_client: openai.OpenAI) -> None:
    (item,) = chat_client.embeddings.create(model="all-MiniLM-L6-v2", input="A text.").data
    assert len(item.embedding) == 384
    assert sum(x * x for x in item.embedding) == pytest.approx(1, abs=1e-3)
