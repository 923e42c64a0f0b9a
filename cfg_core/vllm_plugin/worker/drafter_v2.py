"""Guided drafting on vLLM's Model Runner V2: the same as drafter_v1.py, with other hooks.

The places of the groups' rows are in buffers of fixed size, so that a CUDA graph can contain the
blend. Which groups have cuts, limits or a rule differs from step to step, so graphs do not contain
these: drafts of a graph are proposed without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from typing_extensions import override
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from cfg_core.vllm_plugin.config import guided_class
from cfg_core.vllm_plugin.drafters import why_groups_rest
from cfg_core.vllm_plugin.worker.rows import Rows, sum_for_leaders
from cfg_core.vllm_plugin.worker.runner_guidance import RunnerGuidance

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


NUM_REJECTED = 6
"""The place of `num_rejected` among the arguments of vLLM's `propose`."""


class GuidedSpeculator(DraftModelSpeculator):
    """A V2 drafter that computes a row of logits for each request.

    guidance: the RunnerGuidance of its runner.
    """

    guidance: RunnerGuidance
    num_speculative_steps: int
    use_local_argmax_reduction: bool
    _guides = False

    def make_buffers(self) -> None:
        """Make the buffers. Call it once, before any CUDA graph is captured."""
        size, device = self.max_num_reqs, self.device
        self._own_place = torch.arange(size, device=device)
        self._leader_place = self._own_place.clone()
        self._weight = torch.ones(size, device=device)

    def _point_at(self, rows: Rows | None) -> None:
        self._leader_place.copy_(self._own_place)
        self._weight.fill_(1)
        if rows is not None:
            n = len(rows.leader_place)
            self._leader_place[:n] = rows.leader_place
            self._weight[:n] = rows.weight

    @override
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Call vLLM's method: drafts [batch, drafts]. If the drafter rests, all drafts are -1.

        Stock StandaloneARSpeculator computes all drafts, however few are asked for. This computes
        `num_speculative_tokens` of them, and at least one.
        """
        dummy = kwargs.get("dummy_run")
        steps = self.num_speculative_steps
        if not dummy and self.guidance.drafter_rests:
            return no_drafts(self, input_batch)
        rows = None if dummy else self.guidance.rows
        if rows is not None or self._guides:
            self._point_at(rows)
        self._guides = rows is not None
        if self.guidance.may_keep_none and not dummy:
            num_rejected = keep_first(num_rejected, input_batch)
        if num_speculative_tokens is not None:
            self.num_speculative_steps = max(1, num_speculative_tokens)
        try:
            drafts: torch.Tensor = super().propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                *args,
                num_speculative_tokens=num_speculative_tokens,
                **kwargs,
            )
        finally:
            self.num_speculative_steps = steps
        return drafts

    @override
    def sample_draft(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call vLLM's method: [rows, hidden size] -> tokens [rows].

        Each follower gets its leader's token.
        """
        if not self._blends():
            stock: torch.Tensor = super().sample_draft(hidden_states, *args, **kwargs)
            return stock
        reduced, self.use_local_argmax_reduction = self.use_local_argmax_reduction, False
        try:
            tokens: torch.Tensor = super().sample_draft(hidden_states, *args, **kwargs)
        finally:
            self.use_local_argmax_reduction = reduced
        return tokens[self._leader_place[: tokens.shape[0]]]

    @override
    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """Call vLLM's method: [rows, hidden size] -> [rows, vocabulary]. Blends leaders' rows."""
        logits: torch.Tensor = super().compute_draft_logits(hidden_states, spec_step_idx)
        if not self._blends():
            return logits
        n = logits.shape[0]
        blended = sum_for_leaders(logits, self._leader_place[:n], self._weight[:n])
        rows = self.guidance.rows
        if rows is None or not self._guides or _is_capturing():
            return blended
        return rows.blend_drafts(logits, blended)

    def _blends(self) -> bool:
        """Whether the logits are to be blended now.

        They are if groups are in the batch. They are also while a CUDA graph is captured, because
        groups may be in the batch when it is replayed. A graph that reduces its logits on each
        device is captured without the blend. With such a graph, groups draft unguided, and the
        leaders' drafts are copied.
        """
        return self._guides or (_is_capturing() and not self.use_local_argmax_reduction)


def keep_first(num_rejected: torch.Tensor, batch: InputBatch) -> torch.Tensor:
    """`num_rejected` [batch], so that each stream has at least its first token of the step left.

    A solo stream has taken back all, and so has an open probe. Then vLLM would write the token that
    comes next into the place before the stream's first one, which is another stream's, or before
    the buffer.
    """
    ends = batch.query_start_loc[: len(num_rejected) + 1]
    return num_rejected.minimum(ends.diff().to(num_rejected.dtype) - 1)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class GuidedStandaloneARSpeculator(GuidedSpeculator, StandaloneARSpeculator):
    """The drafter of the method `draft_model`."""


class GuidedEagleSpeculator(GuidedSpeculator, EagleSpeculator):
    """The drafter of the methods `eagle` and `eagle3`."""


class GuidedMTPSpeculator(GuidedSpeculator, MTPSpeculator):
    """The drafter of the method `mtp`, but for Gemma 4 and for several heads."""


GUIDED: dict[type, type[GuidedSpeculator]] = {
    StandaloneARSpeculator: GuidedStandaloneARSpeculator,
    EagleSpeculator: GuidedEagleSpeculator,
    MTPSpeculator: GuidedMTPSpeculator,
}
"""Our class for each of vLLM's classes."""


def guide_drafter(runner: GPUModelRunner, guidance: RunnerGuidance) -> None:
    """Let the drafter of `runner`, if it has one, propose for groups, or work beside them.

    Raises CompatibilityError for a drafter that should guide, and that this module does not know.
    """
    drafter: BaseSpeculator | None = runner.speculator
    if drafter is None:
        return
    if why_groups_rest(runner.vllm_config) is not None:
        if isinstance(drafter, DraftModelSpeculator):
            be_careful(drafter, guidance)
        return
    if isinstance(drafter, DraftModelSpeculator):
        drafter.__class__ = guided_class(drafter, GUIDED)
        guided = cast(GuidedSpeculator, drafter)
        guided.guidance = guidance
        guided.make_buffers()
    copy_drafts(drafter, guidance)


def be_careful(drafter: DraftModelSpeculator, guidance: RunnerGuidance) -> None:
    """Let a drafter of which groups use no drafts rest, and read what solo streams have left."""
    propose: Any = drafter.propose

    def propose_for_plain(*args: Any, **kwargs: Any) -> torch.Tensor:
        """vLLM passes the batch and what is rejected by their places, but for dummy runs."""
        if not kwargs.get("dummy_run"):
            batch: InputBatch = args[0]
            if guidance.drafter_rests:
                return no_drafts(drafter, batch)
            if guidance.may_keep_none:
                rejected = keep_first(args[NUM_REJECTED], batch)
                args = (*args[:NUM_REJECTED], rejected, *args[NUM_REJECTED + 1 :])
        drafts: torch.Tensor = propose(*args, **kwargs)
        return drafts

    drafter.propose = propose_for_plain


def no_drafts(drafter: DraftModelSpeculator, batch: InputBatch) -> torch.Tensor:
    """What a drafter that rests proposes: [batch, drafts] of -1."""
    size = (batch.num_reqs, drafter.num_speculative_steps)
    return torch.full(size, -1, device=drafter.device)


def copy_drafts(drafter: BaseSpeculator, guidance: RunnerGuidance) -> None:
    """Make a drafter of any kind give the followers the drafts of their leaders."""
    propose = drafter.propose

    def propose_for_groups(*args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = propose(*args, **kwargs)  # [batch, drafts]
        if guidance.rows is not None and not kwargs.get("dummy_run"):
            drafts = drafts.clone()  # vLLM may return a view of its own buffer
            guidance.rows.copy_to_followers(drafts)
        return drafts

    drafter.propose = propose_for_groups
