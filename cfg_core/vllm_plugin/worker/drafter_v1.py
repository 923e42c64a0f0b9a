"""Guided drafting on vLLM's V1 model runner.

The drafter's rows are blended as the target's are, so drafts follow the guided distribution. All
streams of a group are in vLLM's one batched draft pass. Before a draft token is sampled, the
leader's row becomes its group's blend. Then the followers get the leader's token, and read it in
the next pass. So the drafter's KV cache also holds the same output for all streams.

A head for multi-token prediction (MTP) is such a drafter, too: each stream's head reads the hidden
states of its own stream, and has its own cache.

A drafter without a distribution (n-gram lookup) reads the leader's text, and the runner (v1.py)
copies its drafts to the followers. Drafts only decide about speed: accepted tokens have the guided
distribution whatever was proposed.

Of a drafter that is neither, groups use no drafts (drafters.py). If it is a model, it reads their
tokens all the same, because plain requests may reuse their blocks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from cfg_core.vllm_plugin.config import check_overrides, guided_class
from cfg_core.vllm_plugin.drafters import why_groups_rest
from cfg_core.vllm_plugin.worker.rows import Rows
from cfg_core.vllm_plugin.worker.runner_guidance import RunnerGuidance

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

GREEDY_BELOW = 1e-5
"""vLLM samples greedily below this temperature."""


class CarefulProposer(SpecDecodeBaseProposer):
    """A V1 drafter that is a model, in whose steps groups are.

    guidance: the RunnerGuidance of its runner.
    """

    guidance: RunnerGuidance

    @override
    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call vLLM's method: drafts [batch, drafts]. If the drafter rests: [batch, 0].

        Stock vLLM runs the drafter over the step's tokens even if no draft is wanted.
        """
        if not self.guidance.drafter_rests:
            drafts: torch.Tensor = super().propose(num_speculative_tokens, *args, **kwargs)
            return drafts
        self._last_draft_probs = None
        next_tokens: torch.Tensor = kwargs["next_token_ids"]
        return next_tokens.new_empty(next_tokens.shape[0], 0)

    @override
    def prepare_inputs_padded(
        self,
        common_attn_metadata: Any,
        spec_decode_metadata: Any,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> Any:
        """Call vLLM's method, so that each stream has at least its first token of the step left.

        A solo stream has no valid sample, nor has a probe whose gate is open. Then vLLM would write
        the token that comes next into the place before the stream's first one, which is another
        stream's. Suffixes are to the drafter what rejected drafts are.
        """
        if self.guidance.may_keep_none:
            valid_sampled_tokens_count = valid_sampled_tokens_count.clamp(min=1)
        metadata, last, num_rejected = super().prepare_inputs_padded(
            common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count
        )
        suffixes = self.guidance.suffixes
        if suffixes is not None:
            last -= suffixes.counts_there.to(last.dtype)
            num_rejected += suffixes.counts_there.to(num_rejected.dtype)
        return metadata, last, num_rejected


class GuidedProposer(CarefulProposer):
    """A V1 drafter that is a model, and drafts for groups, too."""

    model: Any
    use_local_argmax_reduction: bool

    @override
    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call vLLM's method on blended logits.

        hidden_states: [batch x drafts at once, hidden size].

        Returns the tokens, and their distributions or None. Each follower has its leader's token.
        """
        rows = self.guidance.rows
        at_once = self.num_speculative_tokens if self.parallel_drafting else 1
        model, reduced = self.model, self.use_local_argmax_reduction
        if rows is not None:
            self.model = _blended(model, rows, at_once)
            self.use_local_argmax_reduction = False
        try:
            tokens, probs = super()._sample_draft_tokens(hidden_states, sampling_metadata)
        finally:
            self.model, self.use_local_argmax_reduction = model, reduced
        if probs is not None and at_once == 1:
            sample_seeded(tokens, probs, sampling_metadata)
        if rows is not None:
            rows.copy_to_followers(tokens.view(-1, at_once))
        return tokens, probs


class GuidedDraftModelProposer(GuidedProposer, DraftModelProposer):
    """The drafter of the method `draft_model`."""


class GuidedEagleProposer(GuidedProposer, EagleProposer):
    """The drafter of the methods `eagle` and `eagle3`, and of `mtp`, but for two families."""


GUIDED: dict[type, type[GuidedProposer]] = {
    DraftModelProposer: GuidedDraftModelProposer,
    EagleProposer: GuidedEagleProposer,
}
"""Our class for each of vLLM's classes."""


def guide_drafter(runner: GPUModelRunner, guidance: RunnerGuidance) -> None:
    """Let the drafter of `runner`, if it is a model, propose for groups, or work beside them.

    Raises CompatibilityError for a drafter that should guide, and that this module does not know.
    """
    drafter: Any = getattr(runner, "drafter", None)
    if not isinstance(drafter, SpecDecodeBaseProposer):
        return
    if why_groups_rest(runner.vllm_config) is None:
        drafter.__class__ = guided_class(drafter, GUIDED)
    else:
        drafter.__class__ = careful_class(type(drafter))
    drafter.guidance = guidance


def careful_class(stock: type) -> type[CarefulProposer]:
    """The class that replaces a drafter of which groups use no drafts.

    Raises CompatibilityError as check_overrides does.
    """
    cls = type(f"Careful{stock.__name__}", (CarefulProposer, stock), {})
    check_overrides(cls)
    return cls


def sample_seeded(
    tokens: torch.Tensor, probs: torch.Tensor, sampling_metadata: SamplingMetadata
) -> None:
    """Draw the drafts of seeded requests again, each with its own generator.

    tokens: [batch], changed in place.
    probs: [batch, vocabulary].

    vLLM's V1 runner draws all drafts with one generator. Under probabilistic drafting, the same
    seed would therefore give another text each time.
    """
    for row, generator in sampling_metadata.generators.items():
        if sampling_metadata.temperature[row] >= GREEDY_BELOW:
            noise = torch.empty_like(probs[row]).exponential_(generator=generator)
            tokens[row] = (probs[row] / noise).argmax()


def _blended(model: Any, rows: Rows, at_once: int) -> Any:
    """The draft model as vLLM's sampling code sees it: the logits are blended.

    at_once: rows for each request.
    """

    def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
        """[batch x at once, hidden size] -> [batch x at once, vocabulary]."""
        logits: torch.Tensor = model.compute_logits(hidden_states)
        by_request = logits.view(-1, at_once, logits.shape[-1])
        blended = rows.sum_for_leaders(by_request).view_as(logits)
        return rows.blend_drafts(logits, blended) if at_once == 1 else blended

    return SimpleNamespace(compute_logits=compute_logits)
