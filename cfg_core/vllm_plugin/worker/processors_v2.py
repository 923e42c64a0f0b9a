"""Logits processors per sequence on vLLM's Model Runner V2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from typing_extensions import override
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsProcessor as SlotLogitsProcessor,
)
from vllm.v1.worker.gpu.states import RequestState

from cfg_core.logits_processors.registry import Registry
from cfg_core.vllm_plugin.worker.processors import StepProcessors, asked_of
from cfg_core.vllm_plugin.worker.runner_guidance import RunnerGuidance

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class ProcessorsV2(StepProcessors):
    """The processors of one runner. V2's sampler calls them like one of vLLM's processors."""

    def __init__(
        self, runner: GPUModelRunner, guidance: RunnerGuidance, registry: Registry
    ) -> None:
        super().__init__(registry)
        self._runner, self._guidance = runner, guidance
        self._batch: InputBatch | None = None

    def attach(self) -> None:
        """Add the processors to the runner's sampler. Call it once the sampler exists."""
        if self._runner.sampler is not None:
            self._runner.sampler.logits_processors.append(_SlotProcessor(self))

    @contextmanager
    def sampling(self, batch: InputBatch) -> Iterator[None]:
        """Context around vLLM's `sample`, in which the batch, with the requests' ids, is known."""
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    def process_slots(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        """Process `logits` [rows, vocabulary] in place.

        ctx: whole requests, in the batch's order. A big batch comes in several parts.

        Rows of solo streams are not processed: they are not blended, and their sample is dropped.
        """
        batch, states = self._batch, self._runner.req_states
        if batch is None or not self.asking:
            return
        place_of = {int(slot): place for place, slot in enumerate(batch.idx_mapping_np)}
        row = 0
        for i, slot in enumerate(map(int, ctx.idx_mapping_np)):
            place = place_of[slot]
            end = row + int(batch.cu_num_logits_np[place + 1] - batch.cu_num_logits_np[place])
            name = batch.req_ids[place]
            past_prompt = ctx.seq_lens_upper_bound_np[i] >= states.prefill_len.np[slot]
            if name in self.asking and past_prompt and name not in self._guidance.solo:
                drafts = valid_drafts(ctx.input_ids[row + 1 : end].tolist())
                rows = list(logits[row : row + 1 + len(drafts)])
                self.process(name, output_of(states, slot), rows, drafts=drafts)
            row = end


class _SlotProcessor(SlotLogitsProcessor):
    """The logits processor that V2's sampler calls for each part of a batch."""

    def __init__(self, processors: ProcessorsV2) -> None:
        self._processors = processors

    @override
    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return bool(asked_of(sampling_params))

    @override
    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        self._processors.process_slots(logits, ctx)
        return logits


def output_of(states: RequestState, slot: int) -> list[int]:
    """The tokens that a request has so far.

    They are on the device, so the call waits for the last step.
    """
    start, end = int(states.prompt_len.np[slot]), int(states.total_len.gpu[slot])
    output: list[int] = states.all_token_ids.gpu[slot, start:end].tolist()
    return output


def valid_drafts(drafts: list[int]) -> list[int]:
    """Drafts up to the first placeholder (-1), which is never accepted."""
    return drafts[: drafts.index(-1)] if -1 in drafts else drafts
