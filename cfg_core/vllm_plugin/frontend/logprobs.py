"""Log-probabilities that vLLM does not know: of each stream, and of scored tokens of a prompt.

`guidance_logprobs` asks for the log-probabilities that each stream gave to a sampled token. They
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.logprobs import Logprob
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from cfg_core.params import SCORE_TOKENS, STREAM_LOGPROBS, STREAMS, is_guided
from cfg_core.vllm_plugin.wire import split_logprobs


@dataclass
class GuidedLogprob(Logprob):
    """vLLM's Logprob of a sampled token under the guided distribution, with the streams' own.

    conditional: the leader's log-probability.
    negatives: the followers' log-probabilities, in the order of the followers.
    kl: nats, the divergence KL(guided || conditional) of this token's distributions. The guided one
        is what cuts have left of the blend, before masks and penalties.
    """

    conditional: float = 0.0
    negatives: tuple[float, ...] = ()
    kl: float = 0.0


def from_new_request(stock: classmethod[Any, Any, Any]) -> Any:
    """Replaces `LogprobsProcessor.from_new_request`: notes who asked for the columns.

    It also puts None in the place of each token before the scored ones.
    """
    make = stock.__func__

    @functools.wraps(make)
    def from_new_request(cls: Any, tokenizer: Any, request: EngineCoreRequest) -> Any:
        made = make(cls, tokenizer, request)
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        made.stream_columns = 0
        if extra.get(STREAM_LOGPROBS):
            made.stream_columns = 1 + 1 + len(extra.get(STREAMS) or (None,))
        if extra.get(SCORE_TOKENS) and is_guided(extra):
            made.prompt_logprobs = [None] * (len(request.prompt_token_ids) - extra[SCORE_TOKENS])
        return made

    return classmethod(from_new_request)


def update_sample_logprobs(stock: Callable[..., None]) -> Callable[..., None]:
    """Replaces `LogprobsProcessor._update_sample_logprobs`: reads the columns."""

    @functools.wraps(stock)
    def update_sample_logprobs(self: LogprobsProcessor, logprobs_lists: LogprobsLists) -> None:
        columns = getattr(self, "stream_columns", 0)
        if not columns:
            stock(self, logprobs_lists)
            return
        own, streams = split_logprobs(logprobs_lists, columns)
        before = len(self.logprobs)
        stock(self, own)
        tokens = own.logprob_token_ids[:, 0].tolist()
        for i, (token, values) in enumerate(zip(tokens, streams.tolist(), strict=True)):
            divergence, conditional, *negatives = values
            if math.isnan(conditional):  # outside of the window
                continue
            known = self.logprobs[before + i][token]
            self.logprobs[before + i][token] = GuidedLogprob(
                known.logprob,
                known.rank,
                known.decoded_token,
                conditional,
                tuple(negatives),
                divergence,
            )

    return update_sample_logprobs
