"""Log-probabilities that vLLM does not know: of each stream, and of scored tokens of a prompt.

`guidance_logprobs` asks for the log-probabilities that each stream gave to a sampled token, and to
as many of its own most likely tokens as the request has `logprobs`. They
are additional columns of vLLM's own logprobs, after all others. The workers add them for the whole
batch if one request asks for them (worker/rows.py). The scheduler removes them from the
outputs of requests that did not ask (core/outcome.py). The frontend puts them into a
`GuidedLogprob`.

`guidance_score_tokens` asks for the blend's log-probabilities of the last tokens of the prompt. The
workers send them as vLLM sends those of a whole prompt. The tokens before have none (None), because
they are no part of what is guided.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vllm.logprobs import Logprob
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import logprobs as stock_logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from cfg_core.params import ResolvedGuidance
from cfg_core.vllm_plugin.wire import StreamColumns, narrowed

Ranking: TypeAlias = dict[int, Logprob]
"""A stream's most likely tokens, in descending order, by token id."""


@dataclass
class GuidedLogprob(Logprob):
    """vLLM's Logprob of a sampled token under the guided distribution, with the streams' own.

    conditional: the leader's log-probability.
    negatives: the followers' log-probabilities, in the order of the followers.
    kl: nats, the divergence KL(guided || conditional) of this token's distributions. The guided one
        is what cuts have left of the blend, before masks and penalties.
    strength: how much of the blend's push the token got. It is 1 without a trust region or a gate.
        With a rule, it is the scale that the token got.
    rankings: what each stream itself finds most likely, the leader's first. They are as long as the
        request's `logprobs`, and empty if it asked for the whole vocabulary (-1).
    """

    conditional: float = 0.0
    negatives: tuple[float, ...] = ()
    kl: float = 0.0
    strength: float = 1.0
    rankings: tuple[Ranking, ...] = field(default=())


def from_new_request(stock: classmethod[Any, Any, Any]) -> Any:
    """Replaces `LogprobsProcessor.from_new_request`: notes who asked for the columns.

    It also puts None in the place of each token before the scored ones.
    """
    make = stock.__func__

    @functools.wraps(make)
    def from_new_request(cls: Any, tokenizer: Any, request: EngineCoreRequest) -> Any:
        made = make(cls, tokenizer, request)
        params = request.sampling_params
        made.stream_columns = StreamColumns()
        guidance = ResolvedGuidance.from_extra_args(params.extra_args if params else None)
        if guidance is not None and guidance.logprobs:
            top = max(0, params.logprobs or 0)
            made.stream_columns = StreamColumns(len(guidance.weights), top)
        if guidance is not None and guidance.scored is not None:
            before = len(request.prompt_token_ids) - guidance.scored.tokens
            made.prompt_logprobs = [None] * before
        return made

    return classmethod(from_new_request)


def update_sample_logprobs(stock: Callable[..., None]) -> Callable[..., None]:
    """Replaces `LogprobsProcessor._update_sample_logprobs`: reads the columns."""

    @functools.wraps(stock)
    def update_sample_logprobs(self: LogprobsProcessor, logprobs_lists: LogprobsLists) -> None:
        columns: StreamColumns = getattr(self, "stream_columns", StreamColumns())
        if not columns.streams:
            stock(self, logprobs_lists)
            return
        width = logprobs_lists.logprobs.shape[1] - columns.width
        before = len(self.logprobs)
        stock(self, narrowed(logprobs_lists, width))
        ids, values = logprobs_lists.logprob_token_ids, logprobs_lists.logprobs
        rows = zip(ids[:, width:].tolist(), values[:, width:].tolist(), strict=True)
        for place, (token, row) in enumerate(zip(ids[:, 0].tolist(), rows, strict=True), before):
            if math.isnan(row[1][columns.block(0)[0]]):  # outside of the window
                continue
            rankings = [
                _ranking(self, place, *ranked) for ranked in _ranked(columns, *row) if ranked[0]
            ]
            known = self.logprobs[place][token]
            self.logprobs[place][token] = _guided(known, columns, row[1], rankings)

    return update_sample_logprobs


def _guided(
    known: Logprob, columns: StreamColumns, values: Sequence[float], rankings: Sequence[Ranking]
) -> GuidedLogprob:
    """vLLM's logprob of a sampled token, with what our columns hold."""
    conditional, *negatives = (
        values[columns.block(stream)[0]] for stream in range(columns.streams)
    )
    return GuidedLogprob(
        known.logprob,
        known.rank,
        known.decoded_token,
        conditional,
        tuple(negatives),
        values[0],
        values[1],
        tuple(rankings),
    )


def _ranked(
    columns: StreamColumns, ids: Sequence[int], values: Sequence[float]
) -> Iterator[tuple[list[int], list[float]]]:
    """For each stream its most likely tokens, and their log-probabilities."""
    for stream in range(columns.streams):
        places = columns.block(stream)[1:]
        yield [ids[place] for place in places], [values[place] for place in places]


def _ranking(
    processor: LogprobsProcessor, place: int, ids: list[int], values: list[float]
) -> Ranking:
    """Tokens with their texts. A part of a character has the text that it ends, as vLLM's have."""
    texts: Sequence[str | None] = [None] * len(ids)
    if processor.tokenizer is not None:
        before = processor._get_sampled_context_ids(processor.logprobs[max(0, place - 8) : place])
        alone = stock_logprobs.convert_ids_list_to_tokens(processor.tokenizer, ids)
        texts = processor._verify_tokens(alone, ids, before)
    return {
        token: Logprob(value, rank, text)
        for rank, (token, value, text) in enumerate(zip(ids, values, texts, strict=True), 1)
    }
