"""Scores of known texts under guidance, offline.

    from vllm import LLM
    from cfg_core.vllm_plugin import guided_engine_args
    from cfg_core.vllm_plugin.scoring import score

    llm = LLM(model, **guided_engine_args())
    (one,) = score(llm, [("The capital of France is", "The capital is", " Paris.")], scale=1.5)
    one.total       # the log-probability of " Paris."

Over HTTP, `guidance_score_tokens` does the same (docs/evaluation.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm import LLM, RequestOutput, SamplingParams

from cfg_core.params import GuidanceParams

Text: TypeAlias = str | Sequence[int]
"""A text, or token ids."""


@dataclass(frozen=True)
class Score:
    """The guided log-probability of each token of a continuation, in nats.

    token_ids: the continuation.
    greedy: whether each token is the most likely one there.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    greedy: bool

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation."""
        return sum(self.log_probs)


def score(
    llm: LLM, items: Sequence[tuple[Text, Text | None, Text]], scale: float = 1.5, **fields: Any
) -> list[Score]:
    """The score of each (context, negative, continuation), in their order.

    The continuation follows the context in the conditional stream, and the negative in the negative
    stream. Without a negative (None), the negative stream begins at the context's last token. If
    context and continuation are both texts, the scored tokens are those of the whole text from the
    first one on that the context alone does not have: with `"is "` and `"Paris"`, `" Paris"`.

    scale: 1 scores under the conditional stream alone.
    fields: further fields of GuidanceParams, such as `top_k`.

    Raises ValueError for an empty context or continuation, and for what admission refuses.
    """
    prompts, params = [], []
    for context, negative, continuation in items:
        before, scored = tokens_of(llm, context, continuation)
        guidance = GuidanceParams(
            scale=scale,
            negative_prompt=negative if isinstance(negative, str) else None,
            negative_prompt_token_ids=None if isinstance(negative, str | None) else tuple(negative),
            score_tokens=len(scored),
            **fields,
        )
        prompts.append({"prompt_token_ids": [*before, *scored]})
        params.append(
            SamplingParams(
                max_tokens=1,
                temperature=0,
                prompt_logprobs=1,
                detokenize=False,
                extra_args=guidance.to_extra_args(),
            )
        )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        _score(output, one.extra_args["guidance_score_tokens"])
        for output, one in zip(outputs, params, strict=True)
    ]


def tokens_of(llm: LLM, context: Text, continuation: Text) -> tuple[list[int], list[int]]:
    """The token ids of both.

    Raises ValueError if one of them is empty.
    """
    before = _encode(llm, context)
    if isinstance(context, str) and isinstance(continuation, str):
        whole = _encode(llm, context + continuation)
        pairs = zip(before, whole, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        before, scored = whole[:shared], whole[shared:]
    else:
        scored = _encode(llm, continuation, special=False)
    if not before or not scored:
        raise ValueError(
            "A context and a continuation need at least one token each: begin an empty context with"
            " the token that begins a text."
        )
    return before, scored


def _encode(llm: LLM, text: Text, *, special: bool = True) -> list[int]:
    if not isinstance(text, str):
        return list(text)
    ids: list[int] = llm.get_tokenizer().encode(text, add_special_tokens=special)
    return ids


def _score(output: RequestOutput, count: int) -> Score:
    token_ids = tuple(output.prompt_token_ids[-count:])
    entries = [
        row[token] for token, row in zip(token_ids, output.prompt_logprobs[-count:], strict=True)
    ]
    return Score(
        token_ids,
        tuple(entry.logprob for entry in entries),
        all(entry.rank == 1 for entry in entries),
    )
