"""Requests that have begun elsewhere (core/begun.py), on vLLM's V1 model runner.

The scheduler sends prompt and output of a new request as `prefill_token_ids`, which V1 does not
read. V2 does, and needs nothing: it derives the noise of a seed from the position of a token. V1
draws it from a generator of the request, which is advanced here by the draws of these tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler


def begun_of(scheduler_output: SchedulerOutput) -> dict[str, list[int]]:
    """The output of each new request that has any."""
    return {
        new.req_id: new.prefill_token_ids[new.prompt_len :]
        for new in scheduler_output.scheduled_new_reqs
        if new.prefill_token_ids is not None
    }


@contextmanager
def adding(
    batch: InputBatch, begun: Mapping[str, list[int]], sampler: TopKTopPSampler, drafts: int
) -> Iterator[None]:
    """While open, each request that is added to the batch has the output that it has begun with.

    drafts: of a step, at most.
    """
    add = batch.add_request

    def add_request(request: CachedRequestState) -> int:
        if request.req_id in begun and not request.output_token_ids:
            request.output_token_ids = list(begun[request.req_id])
            if request.generator is not None:
                advance(request.generator, request, batch.vocab_size, sampler, drafts)
        place: int = add(request)
        return place

    batch.add_request = add_request
    try:
        yield
    finally:
        del batch.add_request


def advance(
    generator: torch.Generator,
    request: CachedRequestState,
    vocab_size: int,
    sampler: TopKTopPSampler,
    drafts: int,
) -> None:
    """Bring a request's generator to where it was after the request's output.

    The sampler itself draws for each token, from a row that says nothing. A CUDA generator counts
    its draws, so there the second draw is the last.

    With speculation, the number of draws is not known. The generator then gets a seed that no
    earlier token depends on: the text goes on from the same distribution, not with the same tokens.
    """
    tokens = len(request.output_token_ids)
    if drafts:
        generator.manual_seed(hash((generator.initial_seed(), tokens)) & (2**63 - 1))
        return
    logits = torch.zeros(1, vocab_size, device=generator.device)

    def draw() -> None:
        sampler(logits.clone(), {0: generator}, None, None)

    if generator.device.type != "cuda":
        for _ in range(tokens):
            draw()
        return
    before = generator.get_offset()
    draw()
    generator.set_offset(before + tokens * (generator.get_offset() - before))
