"""`guidance_logprobs`: the log-probabilities that each stream gave to a sampled token.

They are additional columns of vLLM's own logprobs, after all others. The workers add them for the
whole batch if one request asks for them (worker/rows.py). The scheduler removes them from the
outputs of requests that did not ask (core/outcome.py). The frontend puts them into a
`GuidedLogprob`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.logprobs import Logprob
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from cfg_core.params import STREAM_LOGPROBS
from cfg_core.vllm_plugin.wire import split_logprobs


@dataclass
class GuidedLogprob(Logprob):
    """vLLM's Logprob of a sampled token under the guided distribution, with the streams' own.

    conditional: the leader's log-probability.
    negatives: the followers' log-probabilities, in the order of the followers.
    """

    conditional: float = 0.0
    negatives: tuple[float, ...] = ()


def from_new_request(stock: classmethod[Any, Any, Any]) -> Any:
    """Replaces `LogprobsProcessor.from_new_request`: notes who asked for the columns."""
    make = stock.__func__

    @functools.wraps(make)
    def from_new_request(cls: Any, tokenizer: Any, request: EngineCoreRequest) -> Any:
        made = make(cls, tokenizer, request)
        params = request.sampling_params
        extra = (params.extra_args if params is not None else None) or {}
        made.reads_streams = bool(extra.get(STREAM_LOGPROBS))
        return made

    return classmethod(from_new_request)


def update_sample_logprobs(stock: Callable[..., None]) -> Callable[..., None]:
    """Replaces `LogprobsProcessor._update_sample_logprobs`: reads the columns."""

    @functools.wraps(stock)
    def update_sample_logprobs(self: LogprobsProcessor, logprobs_lists: LogprobsLists) -> None:
        if not getattr(self, "reads_streams", False):
            stock(self, logprobs_lists)
            return
        own, streams = split_logprobs(logprobs_lists)
        before = len(self.logprobs)
        stock(self, own)
        tokens = own.logprob_token_ids[:, 0].tolist()
        for i, (token, values) in enumerate(zip(tokens, streams.tolist(), strict=True)):
            known = self.logprobs[before + i][token]
            self.logprobs[before + i][token] = GuidedLogprob(
                known.logprob, known.rank, known.decoded_token, values[0], tuple(values[1:])
            )

    return update_sample_logprobs
