"""vLLM's V1 model runner with guidance.

A guided step takes three turns here. When vLLM asks the model for logits, most groups are blended
before the head (`_compute_logits`). `sample_tokens` blends the others. `_sample` samples all rows
but the followers', and copies the tokens to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import vllm.envs as envs
from typing_extensions import override
from vllm.distributed import get_pp_group
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

from cfg_core.blend import kernel, rules
from cfg_core.logits_processors.registry import Registry
from cfg_core.vllm_plugin.config import check_overrides
from cfg_core.vllm_plugin.drafters import why_groups_rest
from cfg_core.vllm_plugin.wire import StepGuidance
from cfg_core.vllm_plugin.worker.adapters import AdaptersOfRows
from cfg_core.vllm_plugin.worker.begun_v1 import adding, begun_of
from cfg_core.vllm_plugin.worker.compact_v1 import can_compact, leaders_metadata, spread
from cfg_core.vllm_plugin.worker.drafter_v1 import guide_drafter
from cfg_core.vllm_plugin.worker.gates import blind_places, kept_by_v1
from cfg_core.vllm_plugin.worker.head import Head, merge
from cfg_core.vllm_plugin.worker.processors_v1 import ProcessorsV1
from cfg_core.vllm_plugin.worker.rows import Rows, blended, widen
from cfg_core.vllm_plugin.worker.runner_guidance import RunnerGuidance
from cfg_core.vllm_plugin.worker.scoring import Scorer, on_cpu
from cfg_core.vllm_plugin.worker.staging import Stager, first_rows
from cfg_core.vllm_plugin.worker.strengths import with_strengths
from cfg_core.vllm_plugin.worker.suffixes import SuffixStager

ANY_TOKEN = 0
"""What a blind probe reads, which has no token: what it computes is dropped."""


class GuidedRunnerV1(AdaptersOfRows, GPUModelRunner):
    """vLLM's V1 model runner: blends the rows of joint groups, and runs logits processors.

    `prepare` must be called once, after `__init__` and before the first step.
    """

    input_batch: InputBatch
    execute_model_state: ExecuteModelState | None

    def prepare(self, registry: Registry) -> None:
        """Make what guidance needs.

        Raises CompatibilityError if this vLLM cannot be guided, and ConfigError if a rule of an
        installed package cannot be loaded.
        """
        check_overrides(type(self))
        rules.load_all()
        self.guidance = RunnerGuidance()
        self.processors = ProcessorsV1(self, registry)
        self._awaits_logits: SchedulerOutput | None = None
        self._head: Head | None = None
        self._stager = Stager()
        self._suffix_stager = SuffixStager()
        self._scorer = Scorer()
        guide_drafter(self, self.guidance)
        self._groups_rest = why_groups_rest(self.vllm_config) is not None

    @override
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Call vLLM's method, then let the model's logits be computed by `_compute_logits`."""
        super().load_model(*args, **kwargs)
        if get_pp_group().is_last_rank and not self.broadcast_pp_output:
            model = self.get_model()
            self._head = Head(model, self.vllm_config)
            kernel.check(self.device)
            model.compute_logits = self._compute_logits

    @override
    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Call vLLM's method. The logits stay in `execute_model_state` until `sample_tokens`."""
        self.processors.begin(scheduler_output)
        self.guidance.clear()
        self._scorer.forget(scheduler_output.finished_req_ids)
        self._awaits_logits = scheduler_output
        try:
            return super().execute_model(scheduler_output, *args, **kwargs)
        finally:
            self._awaits_logits = None

    @override
    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[..., Any] | None:
        """Call vLLM's method, with the output of requests that have begun elsewhere."""
        stock: Callable[..., Any] | None
        begun = begun_of(scheduler_output)
        if not begun:
            stock = super()._update_states(scheduler_output)
            return stock
        sampler = self.sampler.topk_topp_sampler
        with adding(self.input_batch, begun, sampler, self.num_spec_tokens):
            stock = super()._update_states(scheduler_output)
            return stock

    @override
    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> tuple[torch.Tensor, SpecDecodeMetadata | None, int]:
        """Call vLLM's method for a batch with suffixes behind the leaders' tokens.

        num_scheduled_tokens: [batch]. The first part of the result is the rows that get logits:
        [rows of the batch + suffixes].
        """
        step, batch = StepGuidance.of(scheduler_output), self.input_batch
        if step is not None:
            computed, known = batch.num_computed_tokens_cpu, batch.num_tokens_no_spec
            self.guidance.blind = blind_places(step, batch.req_ids, computed, known)
            for place in self.guidance.blind:
                batch.token_ids_cpu[place, computed[place]] = ANY_TOKEN
        if step is None or not step.suffixes:
            stock: tuple[torch.Tensor, SpecDecodeMetadata | None, int] = super()._prepare_inputs(
                scheduler_output, num_scheduled_tokens
            )
            return stock
        first_row = first_rows(batch.req_ids, scheduler_output.scheduled_spec_decode_tokens)
        suffixes = self._suffix_stager.stage(step, batch.req_ids, first_row, self.device)
        self.guidance.suffixes = suffixes
        for leader, tokens in step.suffixes:
            place = batch.req_id_to_index[leader]
            end = batch.num_computed_tokens_cpu[place] + num_scheduled_tokens[place]
            batch.token_ids_cpu[place, end - len(tokens) : end] = tokens
            batch.is_token_ids[place, end - len(tokens) : end] = True
        indices, metadata, most = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        return suffixes.rows(indices), metadata, most

    @override
    def _prepare_input_ids(
        self,
        scheduler_output: SchedulerOutput,
        num_reqs: int,
        total_num_scheduled_tokens: int,
        cu_num_tokens: np.ndarray,
    ) -> None:
        """Call vLLM's method, which puts a token that only the device knows at the end of each
        request: in front of its suffix.

        cu_num_tokens: [batch], where each request ends.
        """
        suffixes = self.guidance.suffixes
        if suffixes is not None:
            cu_num_tokens = cu_num_tokens - suffixes.counts
        super()._prepare_input_ids(
            scheduler_output, num_reqs, total_num_scheduled_tokens, cu_num_tokens
        )

    def _compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, hidden size] -> [rows, vocabulary], or without the followers' rows.

        vLLM also calls this for prompts' log-probabilities and for profiling, outside of
        `execute_model` or after the step's own call.
        """
        head, guidance = self._head, self.guidance
        assert head is not None
        scheduler_output, self._awaits_logits = self._awaits_logits, None
        if scheduler_output is None or StepGuidance.of(scheduler_output) is None:
            return head.compute_logits(hidden_states)
        guidance.rows = rows = self._stage(scheduler_output, hidden_states.device, head)
        if rows is None or rows.merged is None:
            return head.compute_logits(hidden_states)
        assert len(rows.merged.source) == len(hidden_states), "rows are not where they should be"
        logits = head.compute_logits(merge(hidden_states, rows.merged))
        guidance.compact = (
            not rows.logit_blends
            and not scheduler_output.scheduled_spec_decode_tokens
            and not scheduler_output.has_structured_output_requests
            and self._can_compact()
        )
        return logits if guidance.compact or logits is None else logits[rows.merged.source]

    def _stage(
        self, scheduler_output: SchedulerOutput, device: torch.device, head: Head | None
    ) -> Rows | None:
        names, step = self.input_batch.req_ids, StepGuidance.of(scheduler_output)
        suffixes = self.guidance.suffixes
        if suffixes is None:
            first_row = first_rows(names, scheduler_output.scheduled_spec_decode_tokens)
        else:
            names, first_row = suffixes.all_names(names), suffixes.first_row
        return self._stager.stage(
            step.joint if step is not None else (),
            names,
            first_row,
            device,
            affine=head is not None and head.affine,
            suffixes=0 if suffixes is None else len(suffixes.names),
        )

    def _can_compact(self) -> bool:
        """Whether this step can be sampled without the followers' rows."""
        return (
            not self.processors.asking
            and not envs.VLLM_COMPUTE_NANS_IN_LOGITS
            and can_compact(self.input_batch.sampling_metadata)
        )

    @override
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Call vLLM's method on blended logits, and report failures of logits processors."""
        state = self.execute_model_state
        if state is None or state.logits is None:
            return self.processors.report(super().sample_tokens(grammar_output))
        self._blend(state)
        withheld = self._withhold_generators()
        try:
            output = with_strengths(super().sample_tokens(grammar_output), self.guidance)
        finally:
            self.input_batch.generators.update(withheld)
            self.guidance.clear()
        return self.processors.report(output)

    def _blend(self, state: ExecuteModelState) -> None:
        guidance = self.guidance
        guidance.step = StepGuidance.of(state.scheduler_output)
        if guidance.step is None:
            return
        names, place_of = self.input_batch.req_ids, self.input_batch.req_id_to_index
        self._discard([place_of[stream] for stream in guidance.solo])
        if guidance.rows is None:
            guidance.rows = self._stage(state.scheduler_output, state.logits.device, None)
        if guidance.rows is not None:
            logits, guidance.stream_logits, guidance.strengths = blended(
                state.logits, guidance.rows
            )
            states = state.sample_hidden_states
            if guidance.suffixes is not None:  # their rows are behind those of the batch
                own = guidance.suffixes.num_rows
                logits, states = logits[:own], states[:own]
            self.execute_model_state = state._replace(logits=logits, sample_hidden_states=states)
            if guidance.strengths is not None:
                drafts = state.scheduler_output.scheduled_spec_decode_tokens
                guidance.kept = kept_by_v1(
                    guidance.step,
                    names,
                    first_rows(names, drafts),
                    guidance.strengths,
                    guidance.blind,
                )
                self._discard(guidance.kept.none)

    @override
    def _sample(
        self, logits: torch.Tensor, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        """Call vLLM's method, then copy each leader's token to its followers."""
        if spec_decode_metadata is not None and not spec_decode_metadata.draft_token_ids.numel():
            # Stock vLLM uses its rejection sampler even if there are no drafts. With a top_k, on a
            # CPU, that ends the engine ("max(): Expected reduction dim"). Without drafts, the two
            # samplers compute the same.
            spec_decode_metadata = None
        guidance = self.guidance
        rows, stream_logits = guidance.rows, guidance.stream_logits
        if rows is not None and (
            guidance.compact or (spec_decode_metadata is None and self._can_compact())
        ):
            output = self._sample_leading(logits, rows)
        else:
            with self.processors.sampling(spec_decode_metadata):
                output = super()._sample(logits, spec_decode_metadata)
        if rows is None:
            return output
        tokens = output.sampled_token_ids  # [batch, 1 + drafts] int32
        if guidance.kept is not None and guidance.strengths is not None:
            guidance.kept.cut(tokens, guidance.strengths)
        rows.copy_to_followers(tokens)
        shown = rows.logprob_rows
        if shown is not None and stream_logits is not None and output.logprobs_tensors is not None:
            flat = shown.places * tokens.shape[1] + shown.offsets
            sampled = tokens[shown.places, shown.offsets]
            output.logprobs_tensors = widen(
                output.logprobs_tensors, stream_logits, sampled, flat, shown.top
            )
        return output

    @override
    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, LogprobsTensors | None]:
        """Call vLLM's method for plain requests, and add the scores of groups."""
        found = super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)
        place_of, starts = self.input_batch.req_id_to_index, self.query_start_loc.np
        scores = self._scorer.step(
            self.guidance.step,
            hidden_states,
            lambda stream: int(starts[place_of[stream]]),
            self._head,
        )
        on_host = {leader: on_cpu(tensors) for leader, tensors in scores.items()}
        return {**found, **on_host}

    def _sample_leading(self, logits: torch.Tensor, rows: Rows) -> SamplerOutput:
        """What vLLM's `_sample` does, without the followers' rows, which are 0 in the output."""
        batch, index = self.input_batch, rows.leading_index
        if not self.guidance.compact:
            logits = logits[index]
        batch.update_async_output_token_ids()  # needs the metadata of the whole batch
        metadata = leaders_metadata(batch, rows)
        return spread(
            self.sampler(logits=logits, sampling_metadata=metadata), index, batch.num_reqs
        )

    @override
    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: torch.Tensor | list[list[int]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call vLLM's method, then give each follower its leader's drafts.

        Returns a list or a tensor with one entry for each request.
        """
        rows, on_host = self.guidance.rows, isinstance(sampled_token_ids, list)
        if self._groups_rest and self.guidance.drafter_rests and on_host:
            return [[] for _ in sampled_token_ids]
        drafts = super().propose_draft_token_ids(
            scheduler_output, sampled_token_ids, *args, **kwargs
        )
        if rows is None or self._groups_rest:
            return drafts
        if isinstance(drafts, torch.Tensor):
            drafts = drafts.clone()
            rows.copy_to_followers(drafts)
            return drafts
        return [drafts[leader] for leader in rows.leader_place.tolist()]

    def _discard(self, places: list[int]) -> None:
        """Make vLLM drop the samples of these places in the batch."""
        if places:
            self.discard_request_mask.np[places] = True
            self.discard_request_mask.copy_to_gpu(self.input_batch.num_reqs)

    def _withhold_generators(self) -> dict[int, torch.Generator]:
        """Remove the seeded generators of rows whose sample is dropped, so that none advances.

        Returns them by row. Stock vLLM rewinds them after sampling instead. CPU generators cannot
        be rewound, so a seeded request with a chunked prompt would end the engine ("CPU Generator
        does not use offset").
        """
        generators, dropped = self.input_batch.generators, self.discard_request_mask.np
        return {row: generators.pop(row) for row in list(generators) if dropped[row]}


class GuidedCPURunnerV1(GuidedRunnerV1, CPUModelRunner):
    """GuidedRunnerV1 on a CPU."""
