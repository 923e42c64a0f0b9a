"""Estimate how many streams and tokens a request for generated text needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cfg_core.errors import RequestError
from deployments.requests.body import json_type
from deployments.requests.endpoints import BODY_FIELDS, Endpoint
from deployments.requests.guidance_fields import Guidance
from deployments.requests.shape import number_of
from deployments.requests.streams import Groups, num_prompts, num_tokens, prompts_of

USUAL_OUTPUT_TOKENS = 256
"""Estimate of a choice's output tokens if the request sets no limit.

Such a choice may run to the end of the context, but seldom does.
"""

COMPLETION_TOKENS = 16
"""Default of `max_tokens` for completions, at OpenAI and in vLLM."""

MOST_OUTPUT_TOKENS = 2**20
"""Upper bound of the estimate.

No context is longer; an engine refuses more than its own.
"""

MAX_REQUEST_ID_CHARS = 128
"""Maximum length of a request's name, as in the header `X-Request-Id`."""

TOKEN_BYTES, LOGPROB_BYTES = 8, 80
"""Estimated bytes of JSON text for a token, and for each of its logprobs."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The streams and tokens that one request needs.

    streams: all sequences of the request; a guided choice has one more for each follower.
    tokens: prompts and outputs of all streams, and suffixes, estimated. The engine's own count is
        in usage.py.
    """

    streams: int
    tokens: int


def demand_of(
    endpoint: Endpoint, body: Mapping[str, Any], guidance: Guidance | None, groups: Groups
) -> Demand:
    """The demand of a request, with the body read as the engine will read it.

    Raises RequestError for a count that is no integer. vLLM itself would accept "40", 40.0 and
    true as numbers.

    groups: its streams.
    """
    choices = max(1, read_count(body, "n") or 1)
    output = output_tokens(endpoint, body)
    streams = choices * sum(map(len, groups))
    prompts = sum(stream.num_tokens for group in groups for stream in group)
    leaders = choices * len(groups)
    guided = min(output, guidance.params.end or output) if guidance is not None else output
    outputs = leaders * output + (streams - leaders + leaders * _suffix_of(guidance)) * guided
    return Demand(streams=streams, tokens=prompts + outputs)


def _suffix_of(guidance: Guidance | None) -> int:
    """Tokens of the suffix that is computed for each guided token, estimated if it is text."""
    if guidance is None or not guidance.enabled:
        return 0
    params = guidance.params
    return num_tokens(params.negative_suffix) or len(params.negative_suffix_token_ids or ())


def copies_of(endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[int, str]:
    """How often vLLM copies the parameters of a request, and for what.

    Called before the body is checked: a number of choices that is no integer counts as 1.
    """
    prompts = num_prompts(endpoint, body)
    choices = number_of(body.get("n")) * prompts
    return choices, "choices" if prompts == 1 else "choices of all prompts"


def output_tokens(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """The most output tokens of one choice, or USUAL_OUTPUT_TOKENS if the body sets no limit."""
    if endpoint == "scoring":
        return 1
    limits = [read_count(body, name) for name in BODY_FIELDS[endpoint].max_tokens]
    limit = next((limit for limit in limits if limit is not None), None)
    if limit is None and endpoint == "completion" and "max_tokens" not in body:
        limit = COMPLETION_TOKENS
    return USUAL_OUTPUT_TOKENS if limit is None else min(max(0, limit), MOST_OUTPUT_TOKENS)


def check_streams(demand: Demand, most: int) -> None:
    """Raise RequestError if one request asks for more than `most` streams."""
    if demand.streams > most:
        raise RequestError(
            f"The request has {demand.streams} streams (a guided choice has two or more), and one"
            f" request may have {most}: ask for fewer choices or prompts, or send several"
            " requests.",
            "n",
        )


def check_context(endpoint: Endpoint, body: Mapping[str, Any], context_tokens: int) -> None:
    """Raise RequestError if a prompt given as token ids is longer than the context.

    Called before the request is sent to a replica. vLLM itself refuses a text that is too long,
    before it tokenizes it.

    context_tokens: the model's maximum context length. If it is not known, 0: nothing is checked.
    """
    if (
        not context_tokens
        or endpoint != "completion"
        or body.get("truncate_prompt_tokens") is not None
    ):
        return
    for ids in prompts_of(body):
        if isinstance(ids, list) and len(ids) > context_tokens:
            raise RequestError(
                f"The prompt has {len(ids)} tokens, and this model's maximum context length is"
                f" {context_tokens}: send a shorter one.",
                "prompt",
            )


def check_answer_size(
    endpoint: Endpoint,
    body: Mapping[str, Any],
    groups: Groups,
    most_bytes: int,
    shown_streams: int = 0,
) -> None:
    """Raise RequestError if an answer that is not streamed would be larger than `most_bytes`.

    The size is estimated, so that the check comes before the answer is computed.

    groups: the request's streams.
    shown_streams: the number of streams that `guidance_logprobs` shows.
    """
    if body.get("stream"):
        return
    choices = max(1, read_count(body, "n") or 1) * len(groups)
    logprobs = _logprobs(endpoint, body)
    is_asked = logprobs > 0 or shown_streams > 0
    entries = (1 + max(0, logprobs)) * (1 + shown_streams) if is_asked else 0
    size = choices * output_tokens(endpoint, body) * (TOKEN_BYTES + entries * LOGPROB_BYTES)
    size += max(1, read_count(body, "n") or 1) * _prompt_logprob_bytes(endpoint, body, groups)
    if size > most_bytes:
        raise RequestError(
            f"The answer would have about {size // 2**20} MiB, and one that is not streamed may"
            f" have {most_bytes // 2**20}: set stream to true, or ask for fewer choices, tokens or"
            " logprobs.",
            "stream",
        )


def _prompt_logprob_bytes(endpoint: Endpoint, body: Mapping[str, Any], groups: Groups) -> int:
    """Estimated bytes of the log-probabilities of all prompts, if the body asks for them.

    With `echo`, vLLM writes them twice.
    """
    logprobs = read_count(body, "prompt_logprobs")
    echoed = bool(body.get("echo")) and body.get(BODY_FIELDS[endpoint].logprobs or "") is not None
    if logprobs is None and echoed:
        logprobs = _logprobs(endpoint, body)
    if logprobs is None:
        return 0
    tokens = sum(group[0].num_tokens for group in groups)
    return tokens * (1 + max(0, logprobs)) * LOGPROB_BYTES * (2 if echoed else 1)


def _logprobs(endpoint: Endpoint, body: Mapping[str, Any]) -> int:
    """The number of logprobs per token that the body asks for; -1 means the whole vocabulary.

    Raises RequestError, as `read_count`.
    """
    name = BODY_FIELDS[endpoint].logprobs
    if name is None:
        return 0
    if isinstance(body.get(name), bool):  # vLLM reads true as 1, and false as 0
        return int(body[name])
    return read_count(body, name) or 0


def check_request_id(body: Mapping[str, Any]) -> None:
    """Raise RequestError if the body names its request at length.

    vLLM puts the name in front of each choice's own, in several tables.
    """
    name = body.get("request_id")
    if isinstance(name, str) and len(name) > MAX_REQUEST_ID_CHARS:
        raise RequestError(
            f"request_id has {len(name)} characters: send at most {MAX_REQUEST_ID_CHARS}.",
            "request_id",
        )


def read_count(body: Mapping[str, Any], name: str) -> int | None:
    """The value of an integer field; None if it is missing.

    Raises RequestError if it is no integer.
    """
    value = body.get(name)
    if value is not None and type(value) is not int:
        raise RequestError(f"{name} is {json_type(value)}: send an integer.", name)
    return value
