"""Read the bodies of /tokenize and /detokenize for encoders, and the count in an answer.

Imports neither ray nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cfg_core.errors import RequestError
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from deployments.requests.body import json_type
from deployments.requests.encode.field_checks import read_flag

_COUNT = re.compile(r'"count":\s*(\d+)')


@dataclass(frozen=True, kw_only=True)
class TokenizeRequest:
    """A request to /tokenize."""

    text: str
    add_special_tokens: bool
    with_strings: bool


def read_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """The request in a body of /tokenize for an encoder, in vLLM's format."""
    if body.get("messages") is not None:
        raise RequestError("messages are for chat models: send the text as prompt.", "messages")
    text = body.get("prompt")
    if not isinstance(text, str):
        raise RequestError(
            f"prompt is {'missing' if text is None else json_type(text)}: send a text.", "prompt"
        )
    return TokenizeRequest(
        text=text,
        add_special_tokens=read_flag(body, "add_special_tokens", default=True),
        with_strings=read_flag(body, "return_token_strs"),
    )


def read_detokenize(body: Mapping[str, Any], info: ModelInfo) -> list[int]:
    """The token ids in a body of /detokenize for an encoder."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise RequestError("tokens must be a list of token ids: whole numbers.", "tokens")
    for token in tokens:
        if not 0 <= token < info.vocab_size:
            hint = f"this model knows 0 to {info.vocab_size - 1}"
            raise RequestError(f"tokens holds the token id {token}: {hint}.", "tokens")
    return tokens


def count_of(tokenize_answer: str) -> int:
    """Find the `count` in an answer of /tokenize, which may hold a million tokens.

    The answer is not parsed. Quotes inside its texts are escaped, so no text can match the pattern.
    """
    found = _COUNT.search(tokenize_answer)
    assert found is not None, "every answer of /tokenize has a count"
    return int(found[1])
