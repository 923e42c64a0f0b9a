"""Sampling on vLLM's Model Runner V2 without the followers' rows.

As compact_v1.py. The smaller batch has the fields that vLLM itself makes for a part of a batch (its
batch-sharded sampling, worker/gpu/sample/batch_shard.py).
"""

from __future__ import annotations

from dataclasses import replace

from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from cfg_core.vllm_plugin.worker.rows import Rows


def can_compact(batch: InputBatch, rows: Rows, sampler: Sampler | None) -> bool:
    """Whether the rows that lead can be sampled alone.

    All groups must be blended before the head, and each stream must have one row of logits. Masks
    of kept tokens and traces to replay have rows of their own, and are left to vLLM.
    """
    return (
        rows.merged is not None
        and not rows.logit_blends
        and batch.num_draft_tokens == 0
        and sampler is not None
        and not sampler.compute_nans
        and not sampler.return_sampling_mask
        and sampler.trace_replay_state is None
    )


def has_one_row_each(batch: InputBatch) -> bool:
    """Whether each request has one token in this step, so that its row of logits is its place."""
    same: bool = batch.num_tokens == batch.num_reqs
    return same


def leading_batch(batch: InputBatch, rows: Rows) -> InputBatch:
    """The rows of `batch` that are no followers', as V2's sampler reads them.

    Each operation of the device costs the host some microseconds, so there are few.
    """
    places, index = rows.leading, rows.leading_index
    num_reqs = len(places)
    slots = batch.idx_mapping.index_select(0, index)
    if has_one_row_each(batch):
        logits_indices = index
    else:
        logits_indices = batch.logits_indices.index_select(0, index)
    return replace(
        batch,
        req_ids=[batch.req_ids[place] for place in places],
        num_reqs=num_reqs,
        idx_mapping=slots,
        idx_mapping_np=batch.idx_mapping_np[places],
        expanded_idx_mapping=slots,
        expanded_local_pos=batch.expanded_local_pos[:num_reqs],  # all are 0 without drafts
        seq_lens=batch.seq_lens.index_select(0, index),
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[places],
        logits_indices=logits_indices,
        cu_num_logits=batch.cu_num_logits[: num_reqs + 1],  # counts up by one without drafts
        cu_num_logits_np=batch.cu_num_logits_np[: num_reqs + 1],
    )


def spread(output: SamplerOutput, rows: Rows) -> SamplerOutput:
    """The output of the rows that lead, as one of the whole batch: followers have their leader's.

    This makes new tensors and leaves the given ones.
    """
    leader_of = rows.leader_of
    logprobs = output.logprobs_tensors
    if logprobs is not None:
        parts = (tensor.index_select(0, leader_of) for tensor in logprobs[:3])
        logprobs = LogprobsTensors(*parts)
    return replace(
        output,
        sampled_token_ids=output.sampled_token_ids.index_select(0, leader_of),
        logprobs_tensors=logprobs,
        num_sampled=output.num_sampled.index_select(0, leader_of),
        num_rejected=output.num_rejected.index_select(0, leader_of),
    )
