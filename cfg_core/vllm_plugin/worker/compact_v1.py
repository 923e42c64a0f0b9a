"""Sampling on vLLM's V1 runner without the followers' rows.

A follower's sample is replaced by its leader's, so nothing needs to be computed for it. vLLM's
sampler works on whole batches: penalties, sorting for top-p, random numbers and log-probabilities
are computed for each row. So it gets a batch without followers, and its output is spread over the
whole batch afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_input_batch import InputBatch

from cfg_core.vllm_plugin.worker.rows import Rows

T = TypeVar("T")

_KEPT = "cfg_serve_compacted"


def can_compact(metadata: SamplingMetadata) -> bool:
    """Whether nothing in `metadata` keeps a state by places in the batch."""
    holder = metadata.thinking_budget_state_holder
    return (
        all(is_idle(processor) for processor in metadata.logitsprocs.all)
        and not (holder is not None and holder.has_tracked_requests())
        and metadata.max_num_logprobs != -1  # the whole vocabulary, in tensors of other shapes
    )


def is_idle(processor: Any) -> bool:
    """Whether one of vLLM's own logits processors has no request. Unknown ones count as busy."""
    if isinstance(processor, MinPLogitsProcessor):
        return not processor.min_p_count
    if isinstance(processor, LogitBiasLogitsProcessor):
        return not processor.biases
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    return False


def leaders_metadata(batch: InputBatch, rows: Rows) -> SamplingMetadata:
    """The sampling metadata of the rows that lead; the same object while nothing changes.

    vLLM makes new metadata whenever the batch changes, and writes only into the lists of output
    tokens, which both share. So the result is kept with vLLM's object, and goes with it. Seeded
    generators come and go by themselves, so nothing is kept then.
    """
    full = batch.sampling_metadata
    if full.generators:
        return compacted(batch, rows.leading, rows.leading_index)
    kept_rows, made = getattr(full, _KEPT, (None, None))
    if made is None or kept_rows is not rows:
        made = compacted(batch, rows.leading, rows.leading_index)
        setattr(full, _KEPT, (rows, made))
    return made


def compacted(batch: InputBatch, kept: Sequence[int], index: torch.Tensor) -> SamplingMetadata:
    """The sampling metadata of the rows `kept` of `batch`, in that order.

    index: `kept` as a tensor on the device.
    """
    full = batch.sampling_metadata
    names = [batch.req_ids[place] for place in kept]
    is_random = [name in batch.random_reqs for name in names]
    place_of = {place: i for i, place in enumerate(kept)}

    def rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[index]

    def moved(by_place: Mapping[int, T]) -> dict[int, T]:
        return {place_of[p]: value for p, value in by_place.items() if p in place_of}

    with_penalties: dict[str, Any] = {}
    if not full.no_penalties:
        fields = ("frequency_penalties", "presence_penalties", "repetition_penalties")
        with_penalties = {field: rows(getattr(full, field)) for field in fields}
    ids = full.logprob_token_ids
    return replace(
        full,
        temperature=rows(full.temperature) if any(is_random) else None,
        all_greedy=not any(is_random),
        all_random=all(is_random),
        top_p=rows(full.top_p),
        top_k=rows(full.top_k),
        generators=moved(full.generators),
        prompt_token_ids=rows(full.prompt_token_ids),
        output_token_ids=[full.output_token_ids[p] for p in kept] if full.output_token_ids else [],
        allowed_token_ids_mask=rows(full.allowed_token_ids_mask),
        bad_words_token_ids=moved(full.bad_words_token_ids),
        logprob_token_ids=moved(ids) if ids is not None else None,
        **with_penalties,
    )


def spread(output: SamplerOutput, index: torch.Tensor, num_reqs: int) -> SamplerOutput:
    """The output of the rows at `index`, as one of `num_reqs` rows. The other rows are 0."""
    logprobs = output.logprobs_tensors
    if logprobs is not None:
        logprobs = LogprobsTensors(*(_spread(t, index, num_reqs) for t in logprobs[:3]))
    tokens = _spread(output.sampled_token_ids, index, num_reqs)
    return replace(output, sampled_token_ids=tokens, logprobs_tensors=logprobs)


def _spread(rows: torch.Tensor, index: torch.Tensor, num_reqs: int) -> torch.Tensor:
    full = rows.new_zeros((num_reqs, *rows.shape[1:]))
    full[index] = rows
    return full
