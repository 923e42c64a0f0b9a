"""Guidance through LlamaIndex: the fields go into `extra_body` of OpenAILike.

pip install llama-index-llms-openai-like
python examples/llama_index_chat.py
"""

from __future__ import annotations

import os
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL = os.environ.get("CFG_SERVE_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("CFG_SERVE_MODEL", "SmolLM2-135M-Instruct")
GUIDANCE = {"guidance_scale": 1.5, "negative_prompt": "You are a helpful assistant."}


def model(extra_body: dict[str, Any]) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{URL}/v1",
        api_key="none",
        is_chat_model=True,
        temperature=0,
        max_tokens=40,
        additional_kwargs={"extra_body": extra_body},
    )


chat = [
    ChatMessage(role="system", content="You are a pirate."),
    ChatMessage(role="user", content="How do I make tea?"),
]
print("plain: ", model({}).chat(chat).message.content)

answer = model(GUIDANCE).chat(chat)
print("guided:", answer.message.content)
print("guidance:", answer.raw.guidance)  # raw is the answer as the openai client gave it

print("stream:", end=" ")
for piece in model(GUIDANCE).stream_chat(chat):
    print(piece.delta, end="", flush=True)
    if told := getattr(piece.raw, "guidance", None):
        print("\nguidance of the stream:", told)
