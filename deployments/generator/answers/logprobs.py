"""Logprobs in answers over HTTP: those of each stream, and texts of tokens that are kept.

With `guidance_logprobs`, each stream's logprob of a token stands beside vLLM's own, with the
divergence of the blend from the conditional stream. If the request asks for top logprobs, those of
each stream stand there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from starlette.datastructures import State

from cfg_core.vllm_plugin.frontend.logprobs import GuidedLogprob, Ranking


def show_stream_logprobs(state: State) -> None:
    """Make vLLM's serving classes add what `guidance_logprobs` asked for to their own logprobs."""
    completion, chat = state.openai_serving_completion, state.openai_serving_chat
    completion._create_completion_logprobs = _with(
        completion._create_completion_logprobs, partial(_add_to_completion, completion)
    )
    chat._create_chat_logprobs = _with(chat._create_chat_logprobs, partial(_add_to_chat, chat))


def _with(
    make: Callable[..., Any], add: Callable[[Any, Mapping[str, Any]], None]
) -> Callable[..., Any]:
    """`make`, whose answer `add` completes from the fields that it was made of."""

    def made(**fields: Any) -> Any:
        answer = make(**fields)
        add(answer, fields)
        return answer

    return made


def _add_to_completion(serving: Any, answer: Any, fields: Mapping[str, Any]) -> None:
    entries = _guided_logprobs(fields)
    if not any(entries):
        return
    answer.conditional_logprobs = [e and _finite(e.conditional) for e in entries]
    answer.negative_logprobs = [e and [*map(_finite, e.negatives)] for e in entries]
    answer.guidance_kl = [e and e.kl for e in entries]
    answer.guidance_strength = [e and e.strength for e in entries]
    if any(e and e.rankings for e in entries):
        shown = [e and [_by_text(serving, r, fields) for r in e.rankings] for e in entries]
        answer.conditional_top_logprobs = [streams and streams[0] for streams in shown]
        answer.negative_top_logprobs = [streams and streams[1:] for streams in shown]


def _add_to_chat(serving: Any, answer: Any, fields: Mapping[str, Any]) -> None:
    for token, entry in zip(answer.content, _guided_logprobs(fields), strict=True):
        if entry is None:
            continue
        token.conditional_logprob = _finite(entry.conditional)
        token.negative_logprobs = [*map(_finite, entry.negatives)]
        token.guidance_kl = entry.kl
        token.guidance_strength = entry.strength
        if entry.rankings:
            conditional, *negatives = (_as_list(serving, r, fields) for r in entry.rankings)
            token.conditional_top_logprobs = conditional
            token.negative_top_logprobs = negatives


def _as_list(chat: Any, ranking: Ranking, fields: Mapping[str, Any]) -> Any:
    """A stream's most likely tokens, in the shape of a chat's `top_logprobs`."""
    found = chat._get_top_logprobs(
        ranking, len(ranking), fields["tokenizer"], _shows_ids(chat, fields)
    )
    return [entry.model_dump() for entry in found]


def _by_text(completion: Any, ranking: Ranking, fields: Mapping[str, Any]) -> dict[str, float]:
    """A stream's most likely tokens, in the shape of a completion's `top_logprobs`."""
    ids, tokenizer = _shows_ids(completion, fields), fields["tokenizer"]
    text_of = completion._get_decoded_token
    texts: dict[str, float] = {}
    for token, entry in ranking.items():  # of tokens with one text, the most likely counts
        texts.setdefault(text_of(entry, token, tokenizer, ids), _finite(entry.logprob))
    return texts


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


Decode = Callable[[Any, list[int]], list[str]]


class TokenTexts:
    """Stands in for `convert_ids_list_to_tokens`, and decodes each token once.

    vLLM decodes every candidate of every token anew. With 20 logprobs this takes 0.35 ms a token,
    on the event loop of the replica. A token's text depends on the tokenizer alone. Where its bytes
    are not a whole character, vLLM corrects the text afterwards, by the tokens before it. The texts
    that are kept are one vocabulary at most.
    """

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._texts: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()

    def __call__(self, tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
        texts = self._texts.get(tokenizer)
        if texts is None:
            texts = self._texts[tokenizer] = {}
        missing = [token for token in token_ids if token not in texts]
        if missing:
            texts.update(zip(missing, self.decode(tokenizer, missing), strict=True))
        return [texts[token] for token in token_ids]  # a new list, because vLLM changes it
