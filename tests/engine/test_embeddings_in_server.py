"""Prompts as embeddings through vLLM's serving classes, as in a replica."""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cfg_core.errors import RequestError
from tests.engine.in_process_server import Server
from tests.engine.test_embeddings import NEW_TOKENS, Bench, bench

__all__ = ["bench"]  # a fixture

SHOWN: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": NEW_TOKENS,
    "ignore_eos": True,
    "return_token_ids": True,
}
TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% else %}<prompt_embeds>{% endif %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(bench: Bench) -> Iterator[Server]:
    frontend = {"chat_template": TEMPLATE}
    server = Server(bench.folder, frontend, enable_prompt_embeds=True)
    yield server
    server.close()


def text_of(embeds: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(embeds.clone(), file)
    return base64.b64encode(file.getvalue()).decode()


def body_of(bench: Bench, name: str) -> dict[str, Any]:
    """A request of test_embeddings.py, as a body of /v1/completions."""
    case = bench.cases[name]
    fields = dict(case.fields)
    if "negative_prompt_embeds" in fields:
        fields["negative_prompt_embeds"] = text_of(fields["negative_prompt_embeds"])
    if "guidance_streams" in fields:
        fields["guidance_streams"] = [
            {**s, "prompt_embeds": text_of(s["prompt_embeds"])} if "prompt_embeds" in s else s
            for s in fields["guidance_streams"]
        ]
    embeds = case.prompt.get("prompt_embeds")
    if embeds is not None:
        return {"prompt_embeds": text_of(embeds), **fields, **SHOWN}
    return {"prompt": case.prompt["prompt_token_ids"], **fields, **SHOWN}


COMPLETIONS = ["the leader", "the follower", "both", "Chatterbox", "three streams"]


@pytest.mark.parametrize("name", [*COMPLETIONS, "the leader's own"])
def test_completions(server: Server, bench: Bench, name: str) -> None:
    answer = server.answer(body_of(bench, name))
    assert list(answer["choices"][0]["token_ids"]) == bench.want[name]
    streams = bench.cases[name].streams
    assert answer["usage"]["prompt_tokens"] == len(streams[0])
    if len(streams) == 2 and "own" not in name:
        assert answer["guidance"]["negative_prompt_tokens"] == len(streams[1])
    assert answer["guidance"]["guided_tokens"] == NEW_TOKENS


def test_a_negative_of_text(server: Server, bench: Bench) -> None:
    a = bench.model.drawn(11, 80)
    ids = tuple(server.vllm._engine.renderer.get_tokenizer().encode("nothing"))
    body = {"prompt_embeds": text_of(a), "guidance_scale": 2, **SHOWN}
    answer = server.answer({**body, "negative_prompt": "nothing"})
    want = bench.model.generate([a, bench.model.of(ids)], [2.0, -1.0])
    assert list(answer["choices"][0]["token_ids"]) == want
    assert answer["guidance"]["negative_prompt_tokens"] == len(ids)
    with pytest.raises(RequestError, match="no last token"):
        server.answer(body)


def test_conversations_with_parts_of_embeddings(server: Server, bench: Bench) -> None:
    """vLLM's chat API takes embeddings as parts of messages; a negative conversation, too."""

    def chat(seed: int) -> list[dict[str, Any]]:
        embeds = text_of(bench.model.drawn(9, seed))
        part = {"type": "prompt_embeds", "data": embeds}
        return [{"role": "user", "content": [part, {"type": "text", "text": "and?"}]}]

    body = {"messages": chat(70), "negative_messages": chat(71), "guidance_scale": 2, **SHOWN}
    answer = server.answer(body)
    tokenizer = server.vllm._engine.renderer.get_tokenizer()
    rest = tuple(tokenizer.encode("and?", add_special_tokens=False))
    streams = [torch.cat([bench.model.drawn(9, seed), bench.model.of(rest)]) for seed in (70, 71)]
    assert list(answer["choices"][0]["token_ids"]) == bench.model.generate(streams, [2.0, -1.0])


def compressed() -> str:
    """A small file that becomes a large one."""
    file = io.BytesIO()
    torch.save(torch.zeros(20_000, 64), file)
    out = io.BytesIO()
    with zipfile.ZipFile(file) as stored, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as small:
        for entry in stored.infolist():
            small.writestr(entry.filename, stored.read(entry))
    assert len(out.getvalue()) < 50_000
    return base64.b64encode(out.getvalue()).decode()


def of_a_later_format() -> str:
    """A file that says that it needs a later reader of zip files."""
    data = bytearray(base64.b64decode(text_of(torch.zeros(3, 64))))
    data[data.index(b"PK\x01\x02") + 6] = 99
    return base64.b64encode(data).decode()


REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "no base64": (lambda: "!!", "must be the base64"),
    "no file of torch": (lambda: "AAAA", "must be the base64"),
    "compressed": (compressed, "is compressed"),
    "a later format": (of_a_later_format, "must be the base64"),
    "another width": (lambda: text_of(torch.zeros(3, 5)), "hidden_size 5 does not match"),
    "too long": (lambda: text_of(torch.zeros(300, 64)), "the context is 256"),
    "no tensor": (lambda: text_of_object({"a": 1}), "cannot be read|of shape"),
}


def text_of_object(value: object) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(server: Server, name: str) -> None:
    made, sentence = REFUSED[name]
    body = {"prompt": [5, 6, 7], "guidance_scale": 2, "negative_prompt_embeds": made(), **SHOWN}
    with pytest.raises(RequestError, match=sentence) as error:
        server.answer(body)
    assert error.value.param == "negative_prompt_embeds"


def test_no_embeddings_may_be_compressed(server: Server) -> None:
    messages = [{"role": "user", "content": [{"type": "prompt_embeds", "data": compressed()}]}]
    good = [{"role": "user", "content": "and?"}]
    bodies: list[dict[str, Any]] = [
        {"prompt_embeds": compressed()},
        {"messages": messages},
        {"messages": good, "guidance_scale": 2, "negative_messages": messages},
    ]
    for body in bodies:
        with pytest.raises(RequestError, match="is compressed"):
            server.answer({**body, **SHOWN})
