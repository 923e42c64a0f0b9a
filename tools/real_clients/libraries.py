"""The ways into the libraries of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

from tools.real_clients.asking import (
    CHAT,
    ENCODER,
    KEY,
    MODEL,
    MOST_TOKENS,
    PROMPT,
    QUESTION,
    SYSTEM,
    TIMEOUT_S,
    Answer,
    Ask,
    Client,
    guidance_of,
    load,
    vector_text,
)

# openai


def openai_client(ask: Ask) -> Any:
    return load("openai").OpenAI(base_url=ask.v1, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)


def sampling(ask: Ask) -> dict[str, Any]:
    """The arguments that chats and completions of openai's shape have in common."""
    return {
        "model": MODEL,
        "max_tokens": MOST_TOKENS,
        "temperature": 0,
        "stream": ask.streamed,
        "extra_body": ask.extra,
    }


def chat_answer(reply: Any, streamed: bool) -> Answer:
    """Of a chat completion of openai's shape, or of its chunks."""
    if not streamed:
        return Answer(reply.choices[0].message.content, guidance_of(reply))
    return Answer.of_pieces(
        (chunk.choices[0].delta.content if chunk.choices else None, guidance_of(chunk))
        for chunk in reply
    )


def completion_answer(reply: Any, streamed: bool) -> Answer:
    """Of a completion of openai's shape, or of its chunks."""
    return Answer.of_pieces(
        (chunk.choices[0].text if chunk.choices else None, guidance_of(chunk))
        for chunk in (reply if streamed else [reply])
    )


def openai_chat(ask: Ask) -> Answer:
    reply = openai_client(ask).chat.completions.create(messages=CHAT, **sampling(ask))
    return chat_answer(reply, ask.streamed)


def openai_completions(ask: Ask) -> Answer:
    reply = openai_client(ask).completions.create(prompt=PROMPT, **sampling(ask))
    return completion_answer(reply, ask.streamed)


def openai_responses(ask: Ask) -> Answer:
    reply = openai_client(ask).responses.create(
        model=MODEL,
        instructions=SYSTEM,
        input=QUESTION,
        max_output_tokens=MOST_TOKENS,
        temperature=0,
        stream=ask.streamed,
        extra_body=ask.extra,
    )
    if not ask.streamed:
        return Answer(reply.output_text, guidance_of(reply))
    return Answer.of_pieces(
        (
            event.delta if event.type == "response.output_text.delta" else None,
            guidance_of(getattr(event, "response", None)),
        )
        for event in reply
    )


def openai_embeddings(ask: Ask) -> Answer:
    reply = openai_client(ask).embeddings.create(model=ENCODER, input=[QUESTION])
    return Answer(vector_text(reply.data[0].embedding))


# anthropic


def anthropic_client(ask: Ask) -> Any:
    return load("anthropic").Anthropic(
        base_url=ask.url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S
    )


def anthropic_messages(ask: Ask) -> Answer:
    body = {
        "model": MODEL,
        "system": SYSTEM,
        "messages": CHAT[1:],
        "max_tokens": MOST_TOKENS,
        "extra_body": {"temperature": 0, **ask.extra},  # version 2 has no `temperature`
    }
    messages = anthropic_client(ask).messages
    if not ask.streamed:
        reply = messages.create(**body)
        return Answer(reply.content[0].text, guidance_of(reply))
    with messages.stream(**body) as stream:
        return Answer.of_pieces(
            (event.text if event.type == "text" else None, guidance_of(event)) for event in stream
        )


def anthropic_count_tokens(ask: Ask) -> Answer:
    reply = anthropic_client(ask).messages.count_tokens(
        model=MODEL, system=SYSTEM, messages=CHAT[1:]
    )
    return Answer(str(reply.input_tokens or ""))


CLIENTS = [
    Client("openai chat", "openai", openai_chat),
    Client("openai completions", "openai", openai_completions),
    Client("openai responses", "openai", openai_responses),
    Client("openai embeddings", "openai", openai_embeddings, generates=False),
    Client("anthropic messages", "anthropic", anthropic_messages),
    Client("anthropic count_tokens", "anthropic", anthropic_count_tokens, generates=False),
]
