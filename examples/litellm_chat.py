"""Guidance through litellm: the fields go into `extra_body`, the provider is `openai`.

    pip install litellm
    python examples/litellm_chat.py

With the provider `hosted_vllm`, litellm drops the guidance object from streams.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a list of prices

import litellm

URL = os.environ.get("CFG_SERVE_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("CFG_SERVE_MODEL", "SmolLM2-135M-Instruct")
GUIDANCE = {"guidance_scale": 1.5, "negative_prompt": "You are a helpful assistant."}

chat: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "messages": [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "How do I make tea?"},
    ],
    "max_tokens": 40,
    "temperature": 0,
}
print("plain: ", litellm.completion(**chat).choices[0].message.content)

answer = litellm.completion(**chat, extra_body=GUIDANCE)
print("guided:", answer.choices[0].message.content)
print("guidance:", answer.guidance)

print("stream:", end=" ")
for chunk in litellm.completion(**chat, stream=True, extra_body=GUIDANCE):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
    if told := getattr(chunk, "guidance", None):
        print("\nguidance of the stream:", told)
