"""Ask a running server with the real client libraries, plain and guided, whole and streamed.

    make serve    # in another terminal
    CLIENTS/bin/python tools/real_clients.py --url http://127.0.0.1:8000 [--only NAME ...]

The libraries do not fit this project's pins, so CLIENTS is a virtual environment of their own:

    python3 -m venv CLIENTS
    CLIENTS/bin/pip install openai anthropic langchain-openai litellm instructor \\
        llama-index-llms-openai-like

litellm holds openai at version 2: for a later one, install openai alone, and say --only openai.

instructor's mode TOOLS names a tool that must be called. vLLM refuses that without a parser of tool
calls, and lets the model write other arguments than the tool's if the tool is not strict. So the
server's YAML needs this under `args`, which configs/cfg.yaml has not:

    frontend:
      {enable_auto_tool_choice: true, tool_call_parser: hermes, tool_strict_level: parameter}

Every request is for temperature 0. An answer must have text, and a stream more than one piece. A
guided answer must have a `guidance` object with guided_tokens > 0, as the library shows it. Where
a library drops fields that it does not know, the guided text must differ from the plain one
instead: those cells say `differs`, and the notes below the table say what is dropped. The exit
status is 1 if a cell failed.

pytest does not collect this file. test_clients.py replays bodies of these libraries in the
project's own environment.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MODEL, ENCODER = "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"
KEY = "none"
SYSTEM, QUESTION = "You are a pirate.", "How do I make tea?"
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
OBJECT_CHAT = [
    CHAT[0],
    {"role": "user", "content": "What is your favourite food?"},
    {"role": "assistant", "content": '{"answer": "Bread with cheese."}'},
    {"role": "user", "content": "What is your favourite animal?"},
    {"role": "assistant", "content": '{"answer": "A little dog."}'},
    {"role": "user", "content": "What is your favourite drink?"},
]
PROMPT = "You are a pirate. This is how you make tea:"
GUIDANCE = {"guidance_scale": 1.5, "negative_prompt": "You are a helpful assistant."}
MOST_TOKENS, MOST_OBJECT_TOKENS = 24, 120
TIMEOUT_S = 120.0
MODES = [(guided, streamed) for streamed in (False, True) for guided in (False, True)]
HEADS = ["client", "version", "plain", "guided", "streamed", "streamed guided"]
Guidance = dict[str, Any] | None


@dataclass(frozen=True)
class Ask:
    """One request: where it goes, and in which mode."""

    url: str
    guided: bool
    streamed: bool

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def extra(self) -> dict[str, Any]:
        """The fields that the server has beyond the library's own."""
        return dict(GUIDANCE) if self.guided else {}


@dataclass
class Answer:
    """What the library gave back: a text, in so many pieces, and the guidance object if shown."""

    text: str = ""
    guidance: Guidance = None
    pieces: int = 1

    @classmethod
    def of_pieces(cls, pieces: Iterable[tuple[str | None, Guidance]]) -> Answer:
        """Pieces without text, such as one that ends a stream, do not count."""
        answer = cls(pieces=0)
        for text, guidance in pieces:
            answer.text += text or ""
            answer.pieces += bool(text)
            answer.guidance = guidance or answer.guidance
        return answer


@dataclass(frozen=True)
class Client:
    """One way into one library.

    generates: false for embeddings and counts, which have neither guidance nor streams.
    dropped: where the library drops the guidance object: "", "streams" or "all".
    note: says how, below the table.
    """

    name: str
    package: str
    ask: Callable[[Ask], Answer]
    generates: bool = True
    dropped: str = ""
    note: str = ""

    def drops(self, streamed: bool) -> bool:
        return self.dropped == "all" or (self.dropped == "streams" and streamed)

    def has(self, guided: bool, streamed: bool) -> bool:
        return self.generates or not (guided or streamed)


def load(module: str) -> Any:
    """A client library: imported late, so that one that is missing fails its own rows alone."""
    return importlib.import_module(module)


def guidance_of(answer: Any) -> Guidance:
    """The guidance object among the fields that a pydantic model of a library does not know."""
    found: Guidance = (getattr(answer, "model_extra", None) or {}).get("guidance")
    return found


def vector_text(vector: Iterable[float]) -> str:
    """A vector as a text, empty if it has no number other than 0."""
    numbers = list(vector)
    return json.dumps(numbers) if any(numbers) else ""


# openai


def openai_client(ask: Ask) -> Any:
    return load("openai").OpenAI(base_url=ask.v1, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)


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
    reply = openai_client(ask).chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=MOST_TOKENS,
        temperature=0,
        stream=ask.streamed,
        extra_body=ask.extra,
    )
    return chat_answer(reply, ask.streamed)


def openai_completions(ask: Ask) -> Answer:
    reply = openai_client(ask).completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=MOST_TOKENS,
        temperature=0,
        stream=ask.streamed,
        extra_body=ask.extra,
    )
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
    return {
        "api_base": ask.v1,
        "api_key": KEY,
        "temperature": 0,
        "max_tokens": MOST_TOKENS,
        "max_retries": 0,
        "timeout": TIMEOUT_S,
        "stream": ask.streamed,
        "extra_body": ask.extra,
    }


def litellm_chat(ask: Ask, provider: str = "openai") -> Answer:
    reply = load("litellm").completion(
        model=f"{provider}/{MODEL}", messages=CHAT, **litellm_options(ask)
    )
    return chat_answer(reply, ask.streamed)


def litellm_hosted_vllm(ask: Ask) -> Answer:
    return litellm_chat(ask, "hosted_vllm")


def litellm_completions(ask: Ask) -> Answer:
    reply = load("litellm").text_completion(
        model=f"text-completion-openai/{MODEL}", prompt=PROMPT, **litellm_options(ask)
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
    Client("openai chat", "openai", openai_chat),
    Client("openai completions", "openai", openai_completions),
    Client("openai responses", "openai", openai_responses),
    Client("openai embeddings", "openai", openai_embeddings, generates=False),
    Client("anthropic messages", "anthropic", anthropic_messages),
    Client("anthropic count_tokens", "anthropic", anthropic_count_tokens, generates=False),
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


def judged(client: Client, answer: Answer, ask: Ask, plain: Answer | None) -> str:
    """The cell of an answer. Raises AssertionError with what is wrong."""
    assert answer.text.strip(), "no text"
    assert not ask.streamed or answer.pieces > 1, f"in one piece: {answer.text!r}"
    if not ask.guided:
        assert not answer.guidance, f"a plain answer with {answer.guidance}"
        return "ok"
    if client.drops(ask.streamed):
        assert not answer.guidance, (
            "the library shows the guidance object; the table says it drops it"
        )
        assert plain is not None, "no plain answer to compare with"
        assert answer.text != plain.text, f"the text of the plain one: {answer.text!r}"
        return "differs"
    assert answer.guidance, "no guidance object"
    tokens = answer.guidance["guided_tokens"]
    assert tokens > 0, f"not guided: {answer.guidance}"
    return f"ok, {tokens} tokens"


def row_of(client: Client, url: str, faults: list[str]) -> list[str]:
    """The line of the table; what is wrong goes to `faults`."""
    answers: dict[bool, Answer] = {}  # the plain ones
    cells = []
    for guided, streamed in MODES:
        if not client.has(guided, streamed):
            cells.append("-")
            continue
        ask = Ask(url, guided, streamed)
        try:
            answer = client.ask(ask)
            if not guided:
                answers[streamed] = answer
            cells.append(judged(client, answer, ask, answers.get(streamed)))
        except Exception as error:  # every library has its own kinds
            cells.append("FAIL")
            mode = f"{'streamed ' * streamed}{'guided' if guided else 'plain'}"
            faults.append(f"{client.name}, {mode}: {type(error).__name__}: {error}")
    return [client.name, version_of(client.package), *cells]


def version_of(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package}: not installed"


def show(rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [HEADS, *rows]) for i in range(len(HEADS))]
    for row in [HEADS, ["-" * width for width in widths], *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print(f"| {' | '.join(cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of clients")
    chosen = parser.parse_args()
    clients = [c for c in CLIENTS if any(part in c.name for part in chosen.only)]
    faults: list[str] = []
    show([row_of(client, chosen.url.rstrip("/"), faults) for client in clients])
    dropped = {f"{c.package} {c.note}" for c in clients if c.dropped}
    for line in [*sorted(dropped), *faults]:
        print(line)
    return 1 if faults or not clients else 0


if __name__ == "__main__":
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm else fetches a list
    sys.exit(main())
