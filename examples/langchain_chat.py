"""Guidance through LangChain: the fields go into `extra_body` of ChatOpenAI.

    pip install langchain-openai
    python examples/langchain_chat.py

LangChain keeps only the fields of an answer that it knows, so the guidance object is not shown.
"""

from __future__ import annotations

import os

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

URL = os.environ.get("CFG_SERVE_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("CFG_SERVE_MODEL", "SmolLM2-135M-Instruct")
GUIDANCE = {"guidance_scale": 1.5, "negative_prompt": "You are a helpful assistant."}

prompt = ChatPromptTemplate([("system", "You are a pirate."), ("user", "{question}")])
plain = ChatOpenAI(
    model=MODEL,
    base_url=f"{URL}/v1",
    api_key=SecretStr("none"),
    temperature=0,
    max_completion_tokens=40,
)
guided = plain.model_copy(update={"extra_body": GUIDANCE})

question = {"question": "How do I make tea?"}
print("plain: ", (prompt | plain).invoke(question).text)
print("guided:", (prompt | guided).invoke(question).text)
print("stream:", end=" ")
for piece in (prompt | guided).stream(question):
    print(piece.text, end="", flush=True)
print()
