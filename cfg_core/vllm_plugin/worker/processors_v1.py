"""Logits processors per sequence on vLLM's V1 model runner.

Under speculation, vLLM first processes the row after all drafts (`Sampler`), and then the rows
before each draft (`RejectionSampler`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import InputBatch

from cfg_core.logits_processors.registry import Registry
from cfg_core.vllm_plugin.worker.processors import StepProcessors

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class ProcessorsV1(StepProcessors):
    """The processors of one runner. vLLM's samplers call them after vLLM's own processors."""

    def __init__(self, runner: GPUModelRunner, registry: Registry) -> None:
        super().__init__(registry)
        self._runner = runner
        self._stock_needs_tokens = bool(self._batch.logitsprocs_need_output_token_ids)
        self._rows: tuple[tuple[int, str], ...] = ()
        self._drafts: SpecDecodeMetadata | None = None
        process_after(runner.sampler, self._process_last_rows)
        if getattr(runner, "rejection_sampler", None) is not None:
            process_after(runner.rejection_sampler, self._process_draft_rows)

    @property
    def _batch(self) -> InputBatch:
        """The runner's batch. vLLM may make another one when it knows the KV cache."""
        return self._runner.input_batch

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """Do what StepProcessors does, and ask vLLM for sampled tokens if they are needed.

        While a request has processors, the sampled tokens must be known on the host.
        """
        super().begin(scheduler_output)
        batch = self._batch
        batch.logitsprocs_need_output_token_ids = self._stock_needs_tokens or bool(self.asking)

    @contextmanager
    def sampling(self, spec_decode_metadata: SpecDecodeMetadata | None) -> Iterator[None]:
        """Context around vLLM's `_sample`: in it, the rows of requests that asked are processed."""
        if self.asking:
            dropped = self._runner.discard_request_mask.np
            self._rows = tuple(
                (place, request_id)
                for place, request_id in enumerate(self._batch.req_ids)
                if request_id in self.asking and not dropped[place]
            )
            self._drafts = spec_decode_metadata
        try:
            yield
        finally:
            self._rows, self._drafts = (), None

    def _own_drafts(self) -> Iterator[tuple[str, int, int, list[int]]]:
        """Yield (id, place, start, drafts) of each request whose rows are processed.

        place: its place in the batch.
        start: the index of its first draft among the drafts of all requests.
        """
        if not self._rows:
            return
        drafts, counts = [], [0] * self._batch.num_reqs
        if self._drafts is not None:
            drafts, counts = self._drafts.draft_token_ids.tolist(), self._drafts.num_draft_tokens
        for place, request_id in self._rows:
            start = sum(counts[:place])
            yield request_id, place, start, drafts[start : start + counts[place]]

    def _process_last_rows(self, logits: torch.Tensor, outputs: list[list[int]]) -> None:
        """Process the row of each request that follows all its drafts.

        logits: [batch, vocabulary].
        outputs: the tokens of each request so far.
        """
        for request_id, place, _, own in self._own_drafts():
            rows = [logits[place]]
            self.process(request_id, outputs[place], rows, drafts=own, first=len(own))

    def _process_draft_rows(self, logits: torch.Tensor, outputs: list[list[int]]) -> None:
        """Process the rows before each draft.

        logits: [drafts, vocabulary].
        outputs: the tokens of each request so far.
        """
        for request_id, place, start, own in self._own_drafts():
            if own:
                rows = list(logits[start : start + len(own)])
                self.process(request_id, outputs[place], rows, drafts=own)


def process_after(
    sampler: Sampler | RejectionSampler,
    process: Callable[[torch.Tensor, list[list[int]]], None],
) -> None:
    """Call `process(logits, tokens of each request)` after the sampler's own processors."""
    stock = sampler.apply_logits_processors

    def apply_logits_processors(
        logits: torch.Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        logits = stock(logits, sampling_metadata, *args, **kwargs)
        process(logits, sampling_metadata.output_token_ids)
        return logits

    sampler.apply_logits_processors = apply_logits_processors
