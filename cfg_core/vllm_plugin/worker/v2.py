"""vLLM's Model Runner V2 with guidance.

Seeds need no special handling: V2 derives its noise from the position of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from typing_extensions import override
from vllm.distributed import get_pp_group
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from cfg_core.blend import kernel, rules
from cfg_core.logits_processors.registry import Registry
from cfg_core.vllm_plugin.config import check_overrides
from cfg_core.vllm_plugin.wire import StepGuidance
from cfg_core.vllm_plugin.worker.adapters import AdaptersOfRows
from cfg_core.vllm_plugin.worker.compact_v2 import (
    can_compact,
    has_one_row_each,
    leading_batch,
    spread,
)
from cfg_core.vllm_plugin.worker.drafter_v2 import guide_drafter
from cfg_core.vllm_plugin.worker.gates import drop_open
from cfg_core.vllm_plugin.worker.head import Head, merge
from cfg_core.vllm_plugin.worker.processors_v2 import ProcessorsV2
from cfg_core.vllm_plugin.worker.rows import Rows, StreamLogits, blended, widen
from cfg_core.vllm_plugin.worker.runner_guidance import RunnerGuidance
from cfg_core.vllm_plugin.worker.scoring import Scorer
from cfg_core.vllm_plugin.worker.staging import Stager, to_device
from cfg_core.vllm_plugin.worker.strengths import with_strengths
from cfg_core.vllm_plugin.worker.suffixes import SuffixStager


class GuidedRunnerV2(AdaptersOfRows, GPUModelRunner):
    """vLLM's Model Runner V2: blends the rows of joint groups, and runs logits processors.

    `prepare` must be called once, after `__init__` and before the model is loaded.
    """

    model: Any

    def prepare(self, registry: Registry) -> None:
        """Make what guidance needs.

        Raises CompatibilityError if this vLLM cannot be guided, and ConfigError if a rule of an
        installed package cannot be loaded.
        """
        check_overrides(type(self))
        rules.load_all()
        self.guidance = RunnerGuidance()
        self._stager = Stager()
        self._suffix_stager = SuffixStager()
        self._scorer = Scorer()
        self.processors = ProcessorsV2(self, self.guidance, registry)

    @override
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Call vLLM's method, then extend the sampler and the drafter that it made.

        Raises CompatibilityError if the drafter cannot be guided.
        """
        super().load_model(*args, **kwargs)
        self._head = Head(self.model, self.vllm_config) if get_pp_group().is_last_rank else None
        kernel.check(self.device)
        self.processors.attach()
        self._add_scores()
        guide_drafter(self, self.guidance)

    @override
    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Keep the step's guidance for `sample`, then call vLLM's method."""
        self.processors.begin(scheduler_output)
        self.guidance.clear()
        self._scorer.forget(scheduler_output.finished_req_ids)
        self.guidance.step = StepGuidance.of(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    @override
    def prepare_inputs(
        self, scheduler_output: SchedulerOutput, batch_req_state: Any, *args: Any, **kwargs: Any
    ) -> InputBatch:
        """Call vLLM's method, then put suffixes behind the leaders' tokens."""
        batch: InputBatch = super().prepare_inputs(
            scheduler_output, batch_req_state, *args, **kwargs
        )
        guidance = self.guidance
        if guidance.step is None:
            return batch
        if guidance.step.suffixes:
            suffixes = self._suffix_stager.stage(
                guidance.step, batch.req_ids, batch.cu_num_logits_np, self.device
            )
            guidance.suffixes = suffixes
            self._write_suffixes(guidance.step, batch)
            rows = suffixes.rows(batch.logits_indices)
            batch.logits_indices = rows[: suffixes.num_rows]
            guidance.suffix_rows = rows[suffixes.num_rows :]
        self._write_newest(guidance.step, batch)
        return batch

    def _write_suffixes(self, step: StepGuidance, batch: InputBatch) -> None:
        """Write the suffixes into the input ids, at the ends of their leaders."""
        ends = batch.query_start_loc_np[1 : batch.num_reqs + 1]
        place_of = {stream: place for place, stream in enumerate(batch.req_ids)}
        ids = [token for _, tokens in step.suffixes for token in tokens]
        at = np.concatenate(
            [ends[place_of[leader]] - np.arange(len(t), 0, -1) for leader, t in step.suffixes]
        )
        batch.input_ids[to_device(at, np.int64, self.device)] = to_device(
            ids, np.int32, self.device
        )

    def _write_newest(self, step: StepGuidance, batch: InputBatch) -> None:
        """Write the tokens with which decoding leaders of suffixes begin into the input ids.

        vLLM writes the newest token to the end of a request, which is not in front of a suffix. And
        behind a probe whose gate is open, the host may believe that the prompt has ended where the
        device reads the last token of it again, which vLLM then writes nowhere.
        """
        leaders = {leader for leader, _ in step.suffixes}
        leaders.update(row.streams[0] for row in step.joint if row.probe)
        decoding = [
            place
            for place, name in enumerate(batch.req_ids)
            if name in leaders and not batch.is_prefilling_np[place]
        ]
        if not decoding:
            return
        at, slots = (
            to_device(array[decoding], np.int64, self.device)
            for array in (batch.query_start_loc_np, batch.idx_mapping_np)
        )
        known = self.req_states.all_token_ids.gpu[slots, batch.positions[at]]
        batch.input_ids[at] = known.to(torch.int32)

    @override
    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Call vLLM's method, and report strengths and failed logits processors in its output."""
        output = super().sample_tokens(*args, **kwargs)
        return self.processors.report(with_strengths(output, self.guidance))

    @override
    def sample(
        self,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        grammar_output: GrammarOutput | None,
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """Call vLLM's method on blended logits.

        Returns the output, and how many tokens were sampled and how many rejected, both [batch].
        """
        step = self.guidance.step
        with self.processors.sampling(input_batch):
            if step is None:
                stock: tuple[SamplerOutput, torch.Tensor, torch.Tensor] = super().sample(
                    hidden_states, input_batch, grammar_output
                )
                return stock
            device, suffixes = hidden_states.device, self.guidance.suffixes
            self.guidance.rows = rows = self._stage(step, input_batch, device)
            if rows is not None and self._can_compact(rows, input_batch, grammar_output):
                output = self._sample_leading(hidden_states, input_batch, rows)
            else:
                output = self._sample_all(hidden_states, input_batch, grammar_output, rows)
        num_sampled, num_rejected = output.num_sampled, output.num_rejected
        if step.solo:
            place_of = {stream: place for place, stream in enumerate(input_batch.req_ids)}
            solo = to_device([place_of[stream] for stream in step.solo], np.int64, device)
            num_rejected[solo] += num_sampled[solo]  # V2's worker must take its tokens back too
            num_sampled[solo] = 0
        drop_open(
            step,
            input_batch.req_ids,
            input_batch.cu_num_logits_np,
            self.guidance.strengths,
            num_sampled,
            num_rejected,
        )
        if suffixes is not None:
            num_rejected += suffixes.counts_there.to(num_rejected.dtype)
        return output, num_sampled, num_rejected

    def _stage(self, step: StepGuidance, batch: InputBatch, device: torch.device) -> Rows | None:
        names, first_row = batch.req_ids, batch.cu_num_logits_np
        suffixes = self.guidance.suffixes
        if suffixes is not None:
            names, first_row = suffixes.all_names(names), suffixes.first_row
        return self._stager.stage(
            step.joint,
            names,
            first_row,
            device,
            affine=self._head is not None and self._head.affine,
            suffixes=0 if suffixes is None else len(suffixes.names),
        )

    def _add_scores(self) -> None:
        """Let vLLM's log-probabilities of prompts have those of scored groups, too.

        Only the last pipeline stage has any.
        """
        worker = self.prompt_logprobs_worker
        if worker is None:
            return
        stock = worker.compute_prompt_logprobs

        def compute_prompt_logprobs(
            logits_fn: Any, hidden_states: torch.Tensor, input_batch: InputBatch, *args: Any
        ) -> dict[str, LogprobsTensors]:
            found = stock(logits_fn, hidden_states, input_batch, *args)
            place_of = {stream: place for place, stream in enumerate(input_batch.req_ids)}
            starts = input_batch.query_start_loc_np
            scores = self._scorer.step(
                self.guidance.step,
                hidden_states,
                lambda stream: int(starts[place_of[stream]]),
                self._head,
            )
            return {**found, **scores}

        worker.compute_prompt_logprobs = compute_prompt_logprobs

    def _can_compact(
        self, rows: Rows, batch: InputBatch, grammar_output: GrammarOutput | None
    ) -> bool:
        """Whether this step can be sampled without the followers' rows."""
        return (
            grammar_output is None
            and not self.processors.asking
            and can_compact(batch, rows, self.sampler)
        )

    def _sample_leading(
        self, hidden_states: torch.Tensor, batch: InputBatch, rows: Rows
    ) -> SamplerOutput:
        """What vLLM's `sample` does, without the followers' rows."""
        assert rows.merged is not None
        states = hidden_states
        if not has_one_row_each(batch):
            states = self._with_suffixes(hidden_states[batch.logits_indices], hidden_states)
        merged, compute_logits = merge(states, rows.merged), self.model.compute_logits

        def of_merged(hidden_states: torch.Tensor) -> torch.Tensor:
            assert len(hidden_states) == len(merged), "rows are not where they should be"
            logits: torch.Tensor = compute_logits(merged)
            return logits

        with self._computing_logits(of_merged):
            output, _, _ = super().sample(hidden_states, leading_batch(batch, rows), None)
        return spread(output, rows)

    def _sample_all(
        self,
        hidden_states: torch.Tensor,
        batch: InputBatch,
        grammar_output: GrammarOutput | None,
        rows: Rows | None,
    ) -> SamplerOutput:
        """What vLLM's `sample` does, with blended rows, and samples copied to the followers."""
        if rows is None:
            output, _, _ = super().sample(hidden_states, batch, grammar_output)
            return output
        compute_logits, merged = self.model.compute_logits, rows.merged
        stream_logits: StreamLogits | None = None

        def blended_logits(of_batch: torch.Tensor) -> torch.Tensor:
            nonlocal stream_logits
            states = self._with_suffixes(of_batch, hidden_states)
            if merged is None:
                logits = compute_logits(states)
            else:
                logits = compute_logits(merge(states, merged))[merged.source]
            logits, stream_logits, self.guidance.strengths = blended(logits, rows)
            return logits[: len(of_batch)]

        with self._computing_logits(blended_logits):
            output, _, _ = super().sample(hidden_states, batch, grammar_output)
        for per_stream in (output.sampled_token_ids, output.num_sampled, output.num_rejected):
            rows.copy_to_followers(per_stream)
        _add_logprobs(output, rows, stream_logits)
        return output

    def _with_suffixes(self, of_batch: torch.Tensor, all_states: torch.Tensor) -> torch.Tensor:
        """The batch's rows of hidden states, and those of the suffixes behind them.

        all_states: of all tokens of the step.
        """
        rows = self.guidance.suffix_rows
        return of_batch if rows is None else torch.cat([of_batch, all_states[rows]])

    @contextmanager
    def _computing_logits(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Context in which vLLM's `sample` has another `model.compute_logits`.

        compute: [rows, hidden size] -> [rows, vocabulary].
        """
        model, self.model = self.model, SimpleNamespace(compute_logits=compute)
        try:
            yield
        finally:
            self.model = model


def _add_logprobs(output: SamplerOutput, rows: Rows, stream_logits: StreamLogits | None) -> None:
    """Add the streams' own log-probabilities for the groups that asked for them."""
    shown = rows.logprob_rows
    if shown is not None and stream_logits is not None and output.logprobs_tensors is not None:
        sampled = output.sampled_token_ids[shown.places, shown.offsets]
        at = rows.of_logits[0, shown.columns]
        output.logprobs_tensors = widen(
            output.logprobs_tensors, stream_logits, sampled, at, shown.top
        )


class GuidedCPURunnerV2(GuidedRunnerV2, CPUModelRunner):
    """GuidedRunnerV2 on a CPU."""
