"""Malformed request bodies, and the check of the answers to them.

A malformed body has odd values in its fields, or its JSON text is damaged.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx

ODD: list[Any] = [None, True, False, 0, -1, 3, 1.5, -0.0, 1e308, 2**31, 2**63, 10**30]
ODD += ["", "x", "é😀", "\ud800", "\x00", " " * 999]
ODD += [[], {}, [[]], [None], ["a", 1], [{}], {"a": {"b": []}}, [1, "a", None], [-1], [2**40]]
ODD += [[[1, 2], [3]], {"": 0}]


def names(text: str) -> list[str]:
    """Return the words of `text`."""
    return text.split()


GENERATE_FIELDS = names(
    """prompt messages guidance_scale cfg_scale negative_prompt negative_messages stream n
negative_prompt_token_ids temperature top_p top_k min_p seed stop logprobs echo
logit_bias stream_options presence_penalty repetition_penalty min_tokens stop_token_ids
bad_words allowed_token_ids prompt_logprobs response_format structured_outputs tools
tool_choice vllm_xargs priority request_id cache_salt truncate_prompt_tokens model
top_logprobs ignore_eos add_special_tokens chat_template chat_template_kwargs suffix
add_generation_prompt continue_final_message documents user best_of max_tokens"""
)
ENCODE_FIELDS = names(
    """input inputs query documents texts text_1 text_2 dimensions encoding_format task truncate
truncate_prompt_tokens truncation_side prompt prompt_name normalize top_n return_documents
raw_scores use_activation messages guidance_scale model user tokens"""
)


def damaged(rng: random.Random, body: dict[str, Any], fields: list[str], odd: list[Any]) -> bytes:
    """Return `body` as JSON text, with 1 to 4 of `fields` set to values from `odd`.

    In two of five cases the text itself is damaged too, at 1 or 3 places.
    """
    body = body | {name: rng.choice(odd) for name in rng.sample(fields, rng.randint(1, 4))}
    text = json.dumps(body).encode()
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        at = rng.randrange(len(text))
        wrong = rng.choice([b"", b"\xff", b"{", b'"', b"NaN", b"1e999", b"\x00"])
        text = text[:at] + wrong + text[at + 1 :]
    return text


def assert_200_are_answered(
    http: httpx.Client, make: Callable[[random.Random], tuple[str, bytes]]
) -> None:
    """Send 200 bodies, and check the answers.

    Each status must be below 500. A refusal must have the shape of OpenAI's errors, and a stream
    must not contain an error event. More than half of the bodies must be refused.

    make: returns a path and a body.
    """
    rng = random.Random(20170622)
    refused = 0
    for _ in range(200):
        path, body = make(rng)
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (path, body, answer.text)
        if answer.status_code == 200:
            assert b"event: error" not in answer.content, (path, body)
            continue
        refused += 1
        fields = answer.json()["error"].keys()
        assert fields == {"message", "type", "param", "code"}, (path, body)
    assert refused > 100
