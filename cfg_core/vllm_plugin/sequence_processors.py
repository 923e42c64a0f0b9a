"""Logits processors per sequence (cfg_core.logits_processors) on vLLM's model runners, V1 and V2.

They stand behind everything that vLLM does to the logits before temperature, guided or not. Tokens and drafts are
read from vLLM's own records in each step, so preemption, resumption and rejected drafts need no care here. A request
whose processor failed is named in the step's output; the scheduler ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SlotLogitsProcessor

from cfg_core.logits_processors import EngineInfo, Failure, ProcessorTable, SequenceInfo
from cfg_core.processor_config import FIELD
from cfg_core.processor_registry import Registry
from cfg_core.vllm_plugin.step import StepGuidance, attach_failures

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.sampling_params import SamplingParams

_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
PRIVATE_NAMES = (
    f"{_V1}.execute_model",
    f"{_V1}.rejection_sampler",
    f"{_V1}.sampler",
    "vllm.v1.worker.gpu_input_batch:InputBatch.logitsprocs_need_output_token_ids",
    "vllm.v1.worker.gpu_input_batch:InputBatch.req_ids",
    "vllm.v1.sample.sampler:Sampler.apply_logits_processors",
    "vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors",
    "vllm.v1.sample.metadata:SamplingMetadata.output_token_ids",
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata.draft_token_ids",
    f"{_V2}.sample_tokens",
    f"{_V2}.sampler",
    f"{_V2}.req_states",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.logits_processors",
    "vllm.v1.worker.gpu.states:RequestState.all_token_ids",
    "vllm.v1.worker.gpu.states:RequestState.prefill_len",
    "vllm.v1.worker.gpu.states:RequestState.prompt_len",
    "vllm.v1.worker.gpu.states:RequestState.total_len",
    "vllm.v1.worker.gpu.input_batch:InputBatch.idx_mapping_np",
    "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsContext.seq_lens_upper_bound_np",
)


def engine_info(model: ModelConfig) -> EngineInfo:
    """What factories may know of the engine of this model."""

    def tokenizer() -> Any:
        from vllm.tokenizers import cached_tokenizer_from_config

        found = cached_tokenizer_from_config(model)
        if found is None:
            raise ValueError("this engine has no tokenizer (skip_tokenizer_init)")
        return found

    ends: set[int] = set()
    for config in (model.hf_text_config.to_dict(), model.try_get_generation_config()):
        end = config.get("eos_token_id")
        ends.update([end] if isinstance(end, int) else end or [])
    return EngineInfo(model.get_vocab_size(), tokenizer, tuple(sorted(ends)))


def asked_of(params: SamplingParams | None) -> Sequence[Any]:
    """The entries of a request's `logits_processors`; empty if there are none."""
    extra = None if params is None else params.extra_args
    return (extra or {}).get(FIELD) or ()


class StepProcessors:
    """What the two runners share: the processors of this worker's sequences, and who asked for which."""

    def __init__(self, registry: Registry) -> None:
        self.table = ProcessorTable(registry.make)
        self.asking: dict[str, tuple[SequenceInfo, Sequence[Any]]] = {}

    def begin(self, scheduler_output: Any) -> None:
        """Before a step: requests end and begin. A resumed one may begin again, and goes on with what it has."""
        finished = scheduler_output.finished_req_ids
        self.table.forget(finished)
        for request_id in finished:
            self.asking.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._note(
                new.req_id, SequenceInfo(new.req_id, tuple(new.prompt_token_ids or ())), asked_of(new.sampling_params)
            )

    def _note(self, request_id: str, sequence: SequenceInfo, asked: Sequence[Any]) -> None:
        before = self.asking.pop(request_id, None)
        if asked:
            self.asking[request_id] = (sequence, asked)
        if before is not None and before != (sequence, asked):  # a streaming-input session that goes on otherwise
            self.table.forget([request_id])

    def process(self, request_id: str, output: Sequence[int], rows: Sequence[torch.Tensor], **drafts: Any) -> None:
        """`ProcessorTable.process` for a request that asked."""
        sequence, asked = self.asking[request_id]
        self.table.process(sequence, asked, output, rows, **drafts)

    def report(self, output: Any) -> Any:
        """`output` of a step, with the failures in it."""
        failures = self.table.take_failures()
        if not failures:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _OutputWithFailures(output, failures)
        attach_failures(output, failures)
        return output


class _OutputWithFailures(AsyncModelRunnerOutput):
    def __init__(self, inner: AsyncModelRunnerOutput, failures: dict[str, Failure]) -> None:
        self._inner, self._failures = inner, failures

    def get_output(self) -> Any:
        output = self._inner.get_output()
        attach_failures(output, self._failures)
        return output


class ProcessorsV1:
    """Mixin in front of the V1 model runner's class.

    Under speculation vLLM processes the row behind all drafts first (`Sampler`), then those before each draft
    (`RejectionSampler`).
    """

    HOOKS = ("execute_model", "sample_tokens", "_sample")
    processors: StepProcessors
    _sampling_rows: tuple[tuple[int, str], ...] = ()
    _spec_metadata: Any = None

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `execute_model`. While somebody asks, vLLM must know the sampled tokens on the host."""
        self.processors.begin(scheduler_output)
        self.input_batch.logitsprocs_need_output_token_ids = self._stock_needs_tokens or bool(self.processors.asking)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `sample_tokens`, with the failures in its output."""
        return self.processors.report(super().sample_tokens(*args, **kwargs))  # type: ignore[misc]

    def _sample(self: Any, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        """vLLM's `_sample`; keeps which rows are to be processed."""
        if self.processors.asking:
            dropped = self.discard_request_mask.np
            self._sampling_rows = tuple(
                (row, request_id)
                for row, request_id in enumerate(self.input_batch.req_ids)
                if request_id in self.processors.asking and not dropped[row]
            )
            self._spec_metadata = spec_decode_metadata
        try:
            return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        finally:
            self._sampling_rows, self._spec_metadata = (), None

    def _own_drafts(self: Any) -> Iterator[tuple[str, int, int, list[int]]]:
        """Of each row to process: request id, place in the batch, first of its drafts among all, and its drafts."""
        if not self._sampling_rows:
            return
        drafts, counts = [], [0] * self.input_batch.num_reqs
        if self._spec_metadata is not None:
            drafts, counts = self._spec_metadata.draft_token_ids.tolist(), self._spec_metadata.num_draft_tokens
        for place, request_id in self._sampling_rows:
            start = sum(counts[:place])
            yield request_id, place, start, drafts[start : start + counts[place]]

    def _process_last_rows(self: Any, logits: torch.Tensor, outputs: list[list[int]]) -> None:
        """logits: [batch, vocabulary], the row of each request behind all its drafts."""
        for request_id, place, _, own in self._own_drafts():
            self.processors.process(request_id, outputs[place], [logits[place]], drafts=own, first=len(own))

    def _process_draft_rows(self: Any, logits: torch.Tensor, outputs: list[list[int]]) -> None:
        """logits: [drafts, vocabulary], the rows before each draft."""
        for request_id, place, start, own in self._own_drafts():
            if own:
                rows = list(logits[start : start + len(own)])
                self.processors.process(request_id, outputs[place], rows, drafts=own)


class ProcessorsV2:
    """Mixin in front of Model Runner V2's class. The rows are met in a logits processor of vLLM's own kind."""

    HOOKS = ("execute_model", "sample", "sample_tokens")
    processors: StepProcessors
    _batch: Any = None
    _solo: tuple[str, ...] = ()

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `execute_model`; keeps which samples are dropped: their rows are not blended, and not processed."""
        self.processors.begin(scheduler_output)
        guidance = StepGuidance.of(scheduler_output)
        self._solo = guidance.solo if guidance is not None else ()
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `sample_tokens`, with the failures in its output."""
        return self.processors.report(super().sample_tokens(*args, **kwargs))  # type: ignore[misc]

    def sample(self: Any, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """vLLM's `sample`; keeps the batch, which knows the requests' ids."""
        self._batch = input_batch
        try:
            return super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]
        finally:
            self._batch = None


class _SlotProcessor(SlotLogitsProcessor):
    """Meets the rows of V2: `ctx` has whole requests, in the batch's order; a big batch comes in several parts."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return bool(asked_of(sampling_params))

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        batch, processors = self._runner._batch, self._runner.processors
        if batch is None or not processors.asking:
            return logits
        place_of = {int(slot): place for place, slot in enumerate(batch.idx_mapping_np)}
        row = 0
        for i, slot in enumerate(map(int, ctx.idx_mapping_np)):
            place = place_of[slot]
            end = row + int(batch.cu_num_logits_np[place + 1] - batch.cu_num_logits_np[place])
            request_id = batch.req_ids[place]
            past_prompt = ctx.seq_lens_upper_bound_np[i] >= self._runner.req_states.prefill_len.np[slot]
            if request_id in processors.asking and past_prompt and request_id not in self._runner._solo:
                drafts = _valid(ctx.input_ids[row + 1 : end].tolist())
                rows = list(logits[row : row + 1 + len(drafts)])
                processors.process(request_id, self._output(slot), rows, drafts=drafts)
            row = end
        return logits

    def _output(self, slot: int) -> list[int]:
        """The tokens that a request has so far, from the device: this waits for the step before."""
        states = self._runner.req_states
        start, end = int(states.prompt_len.np[slot]), int(states.total_len.gpu[slot])
        output: list[int] = states.all_token_ids.gpu[slot, start:end].tolist()
        return output


def _valid(drafts: list[int]) -> list[int]:
    """Drafts up to the first placeholder, which is never accepted."""
    return drafts[: drafts.index(-1)] if -1 in drafts else drafts


def install(runner: Any, registry: Registry, *, v2: bool) -> type[ProcessorsV1 | ProcessorsV2]:
    """Prepare this runner instance; returns the mixin that belongs in front of its class."""
    runner.processors = StepProcessors(registry)
    if v2:
        if runner.sampler is not None:
            runner.sampler.logits_processors.append(_SlotProcessor(runner))
        return ProcessorsV2
    runner._stock_needs_tokens = runner.input_batch.logitsprocs_need_output_token_ids
    _append(runner.sampler, lambda logits, outputs: runner._process_last_rows(logits, outputs))
    if getattr(runner, "rejection_sampler", None) is not None:
        _append(runner.rejection_sampler, lambda logits, outputs: runner._process_draft_rows(logits, outputs))
    return ProcessorsV1


def _append(sampler: Any, process: Callable[[torch.Tensor, list[list[int]]], None]) -> None:
    """Let `process(logits, tokens of each request)` follow a sampler's own processors."""
    original = sampler.apply_logits_processors

    def apply_logits_processors(logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        logits = original(logits, sampling_metadata, *args, **kwargs)
        process(logits, sampling_metadata.output_token_ids)
        return logits

    sampler.apply_logits_processors = apply_logits_processors
