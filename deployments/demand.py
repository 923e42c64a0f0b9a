"""What a request for generated text asks of an engine, as the ingress can tell it: streams and tokens.

The ingress has no tokenizer. Tokens are estimates, good enough to share a queue by; engines count exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.prefixes import BYTES_PER_TOKEN
from deployments.protocol import Guidance

USUAL_OUTPUT_TOKENS = 256
"""Taken for a request that sets no limit: it may go on to the end of the context, and seldom does."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """streams: sequences that the engine holds at once, both streams of each guided one.

    tokens: prompts and outputs of all of them, estimated.
    """

    streams: int
    tokens: int


def demand_of(body: Mapping[str, Any], guidance: Guidance | None) -> Demand:
    """Never raises: whatever is wrong with the body is for the engine to say."""
    choices = count(body.get("n"), 1)
    prompts = _prompts(body)
    output = count(body.get("max_completion_tokens"), count(body.get("max_tokens"), USUAL_OUTPUT_TOKENS))
    streams = tokens = 0
    for prompt in prompts:
        lengths = [prompt, *([_negative(guidance, prompt)] if guidance and guidance.enabled else [])]
        streams += choices * len(lengths)
        tokens += sum(lengths) + choices * len(lengths) * output
    return Demand(streams=streams, tokens=tokens)


def _prompts(body: Mapping[str, Any]) -> list[int]:
    """The length of each prompt, in tokens."""
    prompt = body["messages"] if "messages" in body else body.get("prompt")
    if isinstance(prompt, list) and prompt and "messages" not in body and not isinstance(prompt[0], int):
        return [num_tokens(part) for part in prompt]
    return [num_tokens(prompt)]


def _negative(guidance: Guidance, prompt: int) -> int:
    """The length of the negative stream's prompt; in a chat it is the conversation with another system message."""
    params = guidance.params
    if params.negative_prompt_token_ids is not None:
        return len(params.negative_prompt_token_ids)
    if guidance.negative_messages is not None:
        return num_tokens(guidance.negative_messages)
    return prompt if params.negative_prompt is not None else 1


def num_tokens(content: Any) -> int:
    """Estimated tokens of a text, of token ids, or of all text in nested messages."""
    if isinstance(content, str):
        return math.ceil(len(content.encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN)
    if isinstance(content, list):
        return sum(1 if isinstance(item, int) else num_tokens(item) for item in content)
    if isinstance(content, Mapping):
        return sum(num_tokens(value) for value in content.values() if isinstance(value, str | list | Mapping))
    return 0


def count(value: object, default: int) -> int:
    """`value` if it is a positive integer, else `default`."""
    return value if type(value) is int and value > 0 else default
