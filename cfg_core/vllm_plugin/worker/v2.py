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
from cfg_core.vllm_plugin.worker.compact_v2 import (
    can_compact,
    has_one_row_each,
    leading_batch,
    spread,
)
from cfg_core.vllm_plugin.worker.drafter_v2 import guide_drafter
from cfg_core.vllm_plugin.worker.head import Head, merge
from cfg_core.vllm_plugin.worker.processors_v2 import ProcessorsV2
from cfg_core.vllm_plugin.worker.rows import Rows, StreamLogits, blended, widen
from cfg_core.vllm_plugin.worker.runner_guidance import RunnerGuidance
from cfg_core.vllm_plugin.worker.scoring import Scorer
from cfg_core.vllm_plugin.worker.staging import Stager, to_device
from cfg_core.vllm_plugin.worker.strengths import with_strengths


class GuidedRunnerV2(GPUModelRunner):
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
            first_row, device = input_batch.cu_num_logits_np, hidden_states.device
            affine = self._head is not None and self._head.affine
            rows = self._stager.stage(
                step.joint, input_batch.req_ids, first_row, device, affine=affine
            )
            self.guidance.rows = rows
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
        return output, num_sampled, num_rejected

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
            states = hidden_states[batch.logits_indices]
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

        def blended_logits(hidden_states: torch.Tensor) -> torch.Tensor:
            nonlocal stream_logits
            if merged is None:
                logits = compute_logits(hidden_states)
            else:
                logits = compute_logits(merge(hidden_states, merged))[merged.source]
            logits, stream_logits, self.guidance.strengths = blended(logits, rows)
            return logits

        with self._computing_logits(blended_logits):
            output, _, _ = super().sample(hidden_states, batch, grammar_output)
        for per_stream in (output.sampled_token_ids, output.num_sampled, output.num_rejected):
            rows.copy_to_followers(per_stream)
        _add_logprobs(output, rows, stream_logits)
        return output

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
