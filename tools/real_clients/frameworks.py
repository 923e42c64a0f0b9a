"""The ways into LangChain, LlamaIndex, litellm and instructor."""

from __future__ import annotations

from typing import Any

from tools.real_clients.asking import (
    CHAT,
    ENCODER,
    KEY,
    MODEL,
    MOST_OBJECT_TOKENS,
    MOST_TOKENS,
    OBJECT_CHAT,
    PROMPT,
    QUESTION,
    TIMEOUT_S,
    Answer,
    Ask,
    Client,
    guidance_of,
    load,
    vector_text,
)
from tools.real_clients.libraries import chat_answer, completion_answer, openai_client, sampling

# LangChain


def langchain_answer(model: Any, question: Any, streamed: bool) -> Answer:
    """Of a chat model, whose answers are messages, or of a model of completions."""
    replies = model.stream(question) if streamed else [model.invoke(question)]
    return Answer.of_pieces(
        (reply if isinstance(reply, str) else str(reply.text), guidance_of(reply))
        for reply in replies
    )


def langchain_model(ask: Ask, kind: str, **options: Any) -> Any:
    """extra_body stays out of a plain request."""
    if ask.guided:
        options["extra_body"] = ask.extra
    return getattr(load("langchain_openai"), kind)(
        model=MODEL,
        base_url=ask.v1,
        api_key=KEY,
        temperature=0,
        max_tokens=MOST_TOKENS,
        max_retries=0,
        timeout=TIMEOUT_S,
        **options,
    )


def langchain_chat(ask: Ask) -> Answer:
    return langchain_answer(langchain_model(ask, "ChatOpenAI"), CHAT, ask.streamed)


def langchain_responses(ask: Ask) -> Answer:
    model = langchain_model(ask, "ChatOpenAI", use_responses_api=True)
    return langchain_answer(model, CHAT, ask.streamed)


def langchain_completions(ask: Ask) -> Answer:
    return langchain_answer(langchain_model(ask, "OpenAI"), PROMPT, ask.streamed)


def langchain_embeddings(ask: Ask) -> Answer:
    """check_embedding_ctx_length would send the tokens of an OpenAI model, which is not here."""
    model = load("langchain_openai").OpenAIEmbeddings(
        model=ENCODER, base_url=ask.v1, api_key=KEY, check_embedding_ctx_length=False
    )
    return Answer(vector_text(model.embed_query(QUESTION)))


# LlamaIndex


def llama_model(ask: Ask, is_chat: bool) -> Any:
    return load("llama_index.llms.openai_like").OpenAILike(
        model=MODEL,
        api_base=ask.v1,
        api_key=KEY,
        is_chat_model=is_chat,
        temperature=0,
        max_tokens=MOST_TOKENS,
        max_retries=0,
        timeout=TIMEOUT_S,
        additional_kwargs={"extra_body": ask.extra},
    )


def llama_chat(ask: Ask) -> Answer:
    model = llama_model(ask, is_chat=True)
    message = load("llama_index.core.llms").ChatMessage
    chat = [message(role=m["role"], content=m["content"]) for m in CHAT]
    if not ask.streamed:
        reply = model.chat(chat)
        return Answer(reply.message.content, guidance_of(reply.raw))
    return Answer.of_pieces(
        (reply.delta, guidance_of(reply.raw)) for reply in model.stream_chat(chat)
    )


def llama_completions(ask: Ask) -> Answer:
    model = llama_model(ask, is_chat=False)
    if not ask.streamed:
        reply = model.complete(PROMPT)
        return Answer(reply.text, guidance_of(reply.raw))
    return Answer.of_pieces(
        (reply.delta, guidance_of(reply.raw)) for reply in model.stream_complete(PROMPT)
    )


# litellm


def litellm_options(ask: Ask) -> dict[str, Any]:
    own = {"api_base": ask.v1, "api_key": KEY, "max_retries": 0, "timeout": TIMEOUT_S}
    return {**sampling(ask), **own}


def litellm_chat(ask: Ask, provider: str = "openai") -> Answer:
    reply = load("litellm").completion(
        messages=CHAT, **{**litellm_options(ask), "model": f"{provider}/{MODEL}"}
    )
    return chat_answer(reply, ask.streamed)


def litellm_hosted_vllm(ask: Ask) -> Answer:
    return litellm_chat(ask, "hosted_vllm")


def litellm_completions(ask: Ask) -> Answer:
    reply = load("litellm").text_completion(
        prompt=PROMPT, **{**litellm_options(ask), "model": f"text-completion-openai/{MODEL}"}
    )
    return completion_answer(reply, ask.streamed)


def litellm_embeddings(ask: Ask) -> Answer:
    reply = load("litellm").embedding(
        model=f"openai/{ENCODER}", input=[QUESTION], api_base=ask.v1, api_key=KEY
    )
    return Answer(vector_text(reply.data[0]["embedding"]))


# instructor


def instructor_answer(ask: Ask, mode: str) -> Answer:
    """The object as JSON; streamed, it comes again and again, each time with more in it.

    The conversation has such objects, to show a small model what to write. The string is bounded,
    because the model may go on for ever in it.
    """
    instructor, pydantic = load("instructor"), load("pydantic")
    answer = (str, pydantic.Field(max_length=80))
    model = pydantic.create_model("Reply", answer=answer)
    client = instructor.from_openai(openai_client(ask), mode=instructor.Mode[mode])
    body = {
        "model": MODEL,
        "messages": OBJECT_CHAT,
        "response_model": model,
        "max_tokens": MOST_OBJECT_TOKENS,
        "max_retries": 0,
        "temperature": 0,
        "extra_body": ask.extra,
    }
    if not ask.streamed:
        made, reply = client.chat.completions.create_with_completion(**body)
        return Answer(made.model_dump_json(), guidance_of(reply))
    parts = [part.model_dump_json() for part in client.chat.completions.create_partial(**body)]
    return Answer(parts[-1], pieces=len(parts))


def instructor_json(ask: Ask) -> Answer:
    return instructor_answer(ask, "JSON")


def instructor_json_schema(ask: Ask) -> Answer:
    return instructor_answer(ask, "JSON_SCHEMA")


def instructor_tools(ask: Ask) -> Answer:
    return instructor_answer(ask, "TOOLS")


LANGCHAIN = "keeps only the fields it knows, of answers and of chunks"
PARTIAL = "gives the objects of a stream, without its chunks"
LITELLM = (
    "makes chunks of its own for the streams of hosted_vllm and of completions, and, if asked for"
    " stream_options, of openai"
)
CLIENTS = [
    Client("ChatOpenAI", "langchain-openai", langchain_chat, dropped="all", note=LANGCHAIN),
    Client(
        "ChatOpenAI responses",
        "langchain-openai",
        langchain_responses,
        dropped="all",
        note=LANGCHAIN,
    ),
    Client("OpenAI", "langchain-openai", langchain_completions, dropped="all", note=LANGCHAIN),
    Client("OpenAIEmbeddings", "langchain-openai", langchain_embeddings, generates=False),
    Client("OpenAILike chat", "llama-index-llms-openai-like", llama_chat),
    Client("OpenAILike completions", "llama-index-llms-openai-like", llama_completions),
    Client("litellm chat", "litellm", litellm_chat),
    Client("litellm hosted_vllm", "litellm", litellm_hosted_vllm, dropped="streams", note=LITELLM),
    Client("litellm completions", "litellm", litellm_completions, dropped="streams", note=LITELLM),
    Client("litellm embeddings", "litellm", litellm_embeddings, generates=False),
    Client("instructor JSON", "instructor", instructor_json, dropped="streams", note=PARTIAL),
    Client(
        "instructor JSON_SCHEMA",
        "instructor",
        instructor_json_schema,
        dropped="streams",
        note=PARTIAL,
    ),
    Client("instructor TOOLS", "instructor", instructor_tools, dropped="streams", note=PARTIAL),
]
