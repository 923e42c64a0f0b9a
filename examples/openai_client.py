"""Guidance with the openai client: a chat, a stream, log-probabilities of both streams, an error.

python examples/openai_client.py
"""

from __future__ import annotations

import os
from typing import Any

import openai

URL = os.environ.get("CFG_SERVE_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("CFG_SERVE_MODEL", "SmolLM2-135M-Instruct")
GUIDANCE = {"guidance_scale": 1.5, "negative_prompt": "You are a helpful assistant."}

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
chat: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "How do I make tea?"},
    ],
    "max_tokens": 40,
    "temperature": 0,
}

plain = client.chat.completions.create(**chat)
print("plain: ", plain.choices[0].message.content)

# extra_body takes fields that openai does not know. `guidance` in the answer is such a field, too.
guided = client.chat.completions.create(**chat, extra_body=GUIDANCE)
print("guided:", guided.choices[0].message.content)
print("guidance:", guided.to_dict()["guidance"])

# A stream has the guidance object in its last chunk.
print("stream:", end=" ")
for chunk in client.chat.completions.create(**chat, stream=True, extra_body=GUIDANCE):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if told := chunk.to_dict().get("guidance"):
        print("\nguidance of the stream:", told)

# What each stream thought of each token, and how far the blend is from the conditional stream.
answer = client.chat.completions.create(
    **chat | {"max_tokens": 5}, logprobs=True, extra_body={**GUIDANCE, "guidance_logprobs": True}
).to_dict()
choice: Any = answer["choices"]
for token in choice[0]["logprobs"]["content"]:
    conditional, (negative,) = token["conditional_logprob"], token["negative_logprobs"]
    print(
        f"{token['token']!r:12} guided {token['logprob']:7.3f}  conditional {conditional:7.3f}"
        f"  negative {negative:7.3f}  KL {token['guidance_kl']:.3f}"
    )

# A field that is misspelt or out of range is refused, never ignored.
try:
    client.chat.completions.create(**chat, extra_body={"guidance_scael": 1.5})
except openai.BadRequestError as error:
    print(f"refused, param {error.param}: {error.body['message']}")  # type: ignore[index]
