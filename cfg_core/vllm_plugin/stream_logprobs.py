"""`guidance_logprobs`: with the log-probability of a sampled token, those that each stream of its group gave it.

They travel as further columns of vLLM's own logprobs, behind all others: the worker adds them, for the whole batch as
soon as one request asks; the scheduler takes them away from those that did not; the frontend puts them into a
`GuidedLogprob`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.logprobs import Logprob
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from cfg_core.params import STREAM_LOGPROBS

PRIVATE_NAMES = (
    "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
    "vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request",
    "vllm.v1.engine.logprobs:LogprobsProcessor.logprobs",
    "vllm.v1.outputs:LogprobsLists.logprob_token_ids",
    "vllm.v1.outputs:LogprobsLists.logprobs",
    "vllm.v1.outputs:LogprobsTensors.logprob_token_ids",
    "vllm.v1.outputs:LogprobsTensors.logprobs",
)

NUM_STREAMS = 2


@dataclass
class GuidedLogprob(Logprob):
    """vLLM's Logprob of a sampled token, of the guided distribution; and what the single streams say.

    conditional: the leader's log-probability. negatives: the followers', in their order.
    """

    conditional: float = 0.0
    negatives: tuple[float, ...] = ()


# -- in the worker


class Asked(NamedTuple):
    """Where the tokens of the groups that ask are, n of them; each [n] int64.

    columns: of `Rows.logits`. places: in the batch. offsets: among the tokens of their request.
    """

    columns: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor


def keep(logits: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """The rows of `streams` [streams, n] before they are blended: [streams, n, vocabulary] float32."""
    return logits[streams].float()


def widen(tensors: Any, kept: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> Any:
    """vLLM's LogprobsTensors with one more column per stream, filled in `rows` [n] for `tokens` [n]."""
    tokens = tokens.long().clamp(min=0).expand(kept.shape[0], -1)  # rejected ones are -1
    values = kept.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - kept.logsumexp(-1)  # [streams, n]
    columns = tensors.logprobs.new_zeros(tensors.logprobs.shape[0], kept.shape[0])
    columns[rows] = values.T.to(columns.dtype)
    ids = tensors.logprob_token_ids
    return tensors._replace(
        logprob_token_ids=torch.cat([ids, ids[:, :1].expand(-1, kept.shape[0])], 1),
        logprobs=torch.cat([tensors.logprobs, columns], 1),
    )


# -- in the scheduler


def narrow(outputs: Iterable[Any], asked: Collection[str]) -> None:
    """Take the columns away from the outputs of requests that did not ask."""
    for output in outputs:
        if output.new_logprobs is not None and output.request_id not in asked:
            output.new_logprobs = _split(output.new_logprobs)[0]


def _split(lists: LogprobsLists) -> tuple[LogprobsLists, Any]:
    """vLLM's own columns, and ours [tokens, streams]."""
    ids, values = lists.logprob_token_ids, lists.logprobs
    own = lists._replace(logprob_token_ids=ids[:, :-NUM_STREAMS], logprobs=values[:, :-NUM_STREAMS])
    return own, values[:, -NUM_STREAMS:]


# -- in the frontend


def install() -> None:
    """Let vLLM's LogprobsProcessor read the columns, once per process."""
    if getattr(LogprobsProcessor._update_sample_logprobs, "guided", False):
        return
    make, update = LogprobsProcessor.from_new_request.__func__, LogprobsProcessor._update_sample_logprobs

    @functools.wraps(make)
    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        made = make(cls, tokenizer, request)
        made.reads_streams = bool((request.sampling_params.extra_args or {}).get(STREAM_LOGPROBS))
        return made

    @functools.wraps(update)
    def update_sample_logprobs(self: Any, lists: LogprobsLists) -> None:
        if not getattr(self, "reads_streams", False):
            update(self, lists)
            return
        own, streams = _split(lists)
        before = len(self.logprobs)
        update(self, own)
        for i, (token, values) in enumerate(zip(own.logprob_token_ids[:, 0].tolist(), streams.tolist(), strict=True)):
            known = self.logprobs[before + i][token]
            self.logprobs[before + i][token] = GuidedLogprob(
                known.logprob, known.rank, known.decoded_token, values[0], tuple(values[1:])
            )

    update_sample_logprobs.guided = True  # type: ignore[attr-defined]
    LogprobsProcessor.from_new_request = classmethod(from_new_request)
    LogprobsProcessor._update_sample_logprobs = update_sample_logprobs
