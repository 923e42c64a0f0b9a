"""`guidance_logprobs` in answers over HTTP: each stream's logprob of a token.

They stand beside vLLM's own logprobs, with the divergence of the blend from the conditional stream.
If the request asks for top logprobs, those of each stream stand there, too.

Importing this module imports vllm, so only a replica does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import State

from cfg_core.vllm_plugin.frontend.logprobs import GuidedLogprob, Ranking


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
        if not any(entries):
            return answer
        answer.conditional_logprobs = [e and _finite(e.conditional) for e in entries]
        answer.negative_logprobs = [e and [*map(_finite, e.negatives)] for e in entries]
        answer.guidance_kl = [e and e.kl for e in entries]
        if any(e and e.rankings for e in entries):
            shown = [e and [_by_text(r, fields) for r in e.rankings] for e in entries]
            answer.conditional_top_logprobs = [streams and streams[0] for streams in shown]
            answer.negative_top_logprobs = [streams and streams[1:] for streams in shown]
        return answer

    def create_chat_logprobs(**fields: Any) -> Any:
        answer = chat_logprobs(**fields)
        for token, entry in zip(answer.content, _guided_logprobs(fields), strict=True):
            if entry is None:
                continue
            token.conditional_logprob = _finite(entry.conditional)
            token.negative_logprobs = [*map(_finite, entry.negatives)]
            token.guidance_kl = entry.kl
            if entry.rankings:
                conditional, *negatives = (_as_list(ranking, fields) for ranking in entry.rankings)
                token.conditional_top_logprobs = conditional
                token.negative_top_logprobs = negatives
        return answer

    def _as_list(ranking: Ranking, fields: Mapping[str, Any]) -> Any:
        """A stream's most likely tokens, in the shape of a chat's `top_logprobs`."""
        found = chat._get_top_logprobs(
            ranking, len(ranking), fields["tokenizer"], _shows_ids(chat, fields)
        )
        return [entry.model_dump() for entry in found]

    def _by_text(ranking: Ranking, fields: Mapping[str, Any]) -> dict[str, float]:
        """A stream's most likely tokens, in the shape of a completion's `top_logprobs`."""
        ids, tokenizer = _shows_ids(completion, fields), fields["tokenizer"]
        text_of = completion._get_decoded_token
        texts: dict[str, float] = {}
        for token, entry in ranking.items():  # of tokens with one text, the most likely counts
            texts.setdefault(text_of(entry, token, tokenizer, ids), _finite(entry.logprob))
        return texts

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


def _shows_ids(serving: Any, fields: Mapping[str, Any]) -> bool:
    """Whether texts of tokens are replaced by their ids (`return_tokens_as_token_ids`)."""
    asked = fields.get("return_as_token_id")
    return bool(serving.return_tokens_as_token_ids if asked is None else asked)
