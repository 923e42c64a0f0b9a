"""Named formulas of papers, as the guidance fields that compute them.

    from cfg_core import recipes

    without = recipes.cad("Who wrote it?", alpha=0.5)
    SamplingParams(extra_args=without.to_extra_args())         # offline
    client.completions.create(..., extra_body=without.to_extra_args())

Each returns a `GuidanceParams`. In the formulas, c is the log-probability under the request's own
prompt. A prompt is a text, or token ids. An adapter is vLLM's LoRARequest offline, and a served
name over HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from cfg_core.params import FollowerParams, GuidanceParams, Rule

Prompt: TypeAlias = str | Sequence[int]


def cfg(negative: Prompt | None = None, scale: float = 1.5) -> GuidanceParams:
    """Classifier-free guidance: `u + scale * (c - u)`.

    negative: the prompt of u; None: the last token of the request's prompt.
    Source: Sanchez et al., arXiv 2306.17806.
    """
    if negative is None:
        return GuidanceParams(scale=scale)
    if isinstance(negative, str):
        return GuidanceParams(scale=scale, negative_prompt=negative)
    return GuidanceParams(scale=scale, negative_prompt_token_ids=tuple(negative))


def cad(question: Prompt, alpha: float = 0.5) -> GuidanceParams:
    """Context-aware decoding: `(1 + alpha) * c - alpha * u`.

    The request's prompt is the context and the question. u reads the question alone, so that the
    answer relies on the context and not on what the model remembers.

    Source: Shi et al., arXiv 2305.14739.
    """
    return GuidanceParams(streams=(_stream(-alpha, question),))


def adacad(question: Prompt, offset: float = 0.0) -> GuidanceParams:
    """As `cad`, with `alpha = JSD(c, u) + offset` for each token: more where the passage matters.

    Source: Wang et al., arXiv 2409.07394.
    """
    return _ruled(question, Rule("adacad", (("offset", offset),)))


def arr(question: Prompt) -> GuidanceParams:
    """As `cad`, with `alpha = d` where c is surer of its token than u, else `-d`; d = JSD / log 2.

    Source: Jiang et al., arXiv 2606.10298.
    """
    return _ruled(question, Rule("arr"))


def preadd(prefixed: Prompt, alpha: float) -> GuidanceParams:
    """Prefix-adaptive decoding: `c + alpha * (p - c)`.

    prefixed: the prompt of p: a prefix that provokes the attribute, and the request's prompt.
    alpha: below 0 to suppress the attribute, above 0 to strengthen it.
    Source: Pei et al., arXiv 2307.03214.
    """
    return GuidanceParams(streams=(_stream(alpha, prefixed),))


def dexperts(expert: Any, antiexpert: Any, alpha: float = 1.0) -> GuidanceParams:
    """Decoding with experts: `c + alpha * (e - a)`, all three with the request's prompt.

    expert, antiexpert: the adapters of e and a; False is the base model. Proxy tuning is the same
    formula with a tuned and an untuned small model (arXiv 2401.08565).
    Source: Liu et al., arXiv 2105.03023.
    """
    return GuidanceParams(
        streams=(
            FollowerParams(weight=alpha, lora=expert),
            FollowerParams(weight=-alpha, lora=antiexpert),
        )
    )


def _ruled(negative: Prompt, rule: Rule) -> GuidanceParams:
    if isinstance(negative, str):
        return GuidanceParams(rule=rule, negative_prompt=negative)
    return GuidanceParams(rule=rule, negative_prompt_token_ids=tuple(negative))


def _stream(weight: float, prompt: Prompt) -> FollowerParams:
    if isinstance(prompt, str):
        return FollowerParams(weight=weight, prompt=prompt)
    return FollowerParams(weight=weight, token_ids=tuple(prompt))
