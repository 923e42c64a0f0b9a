"""`guidance_logprobs` in answers over HTTP: each stream's logprob of a token.

They stand beside vLLM's own logprobs, with the divergence of the blend from the conditional stream.

Importing this module imports vllm, so only a replica does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import State

from cfg_core.vllm_plugin.frontend.logprobs import GuidedLogprob


def show_stream_logprobs(state: State) -> None:
    """Make vLLM's serving classes add what `guidance_logprobs` asked for to their own logprobs."""
    completion, chat = state.openai_serving_completion, state.openai_serving_chat
    completion_logprobs, chat_logprobs = (
        completion._create_completion_logprobs,
        chat._create_chat_logprobs,
    )

    def create_completion_logprobs(**fields: Any) -> Any:
        answer = completion_logprobs(**fields)
        entries = _guided_logprobs(fields)
        if any(entries):
            answer.conditional_logprobs = [e and _finite(e.conditional) for e in entries]
            answer.negative_logprobs = [e and [*map(_finite, e.negatives)] for e in entries]
            answer.guidance_kl = [e and e.kl for e in entries]
        return answer

    def create_chat_logprobs(**fields: Any) -> Any:
        answer = chat_logprobs(**fields)
        for token, entry in zip(answer.content, _guided_logprobs(fields), strict=True):
            if entry is not None:
                token.conditional_logprob = _finite(entry.conditional)
                token.negative_logprobs = [*map(_finite, entry.negatives)]
                token.guidance_kl = entry.kl
        return answer

    completion._create_completion_logprobs = create_completion_logprobs
    chat._create_chat_logprobs = create_chat_logprobs


def _guided_logprobs(fields: Mapping[str, Any]) -> list[GuidedLogprob | None]:
    """The streams' logprobs of each token; None for a token not sampled under guidance (`echo`)."""
    found = (
        row and row.get(token)
        for token, row in zip(fields["token_ids"], fields["top_logprobs"], strict=False)
    )
    return [entry if isinstance(entry, GuidedLogprob) else None for entry in found]


def _finite(logprob: float) -> float:
    """Bound a logprob as vLLM does, because JSON has no infinity."""
    return max(logprob, -9999.0)
