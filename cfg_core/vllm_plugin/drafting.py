"""Guided drafting: the drafter's rows are blended as the target's are, so that drafts follow the guided distribution.

All streams of a group are in vLLM's one batched draft pass. Before a draft token is sampled, the leader's row becomes
its group's blend; after it, the followers get the leader's token, and read it in the next pass. So the drafter's KV
cache, too, holds the same output for all streams. Drafters without a distribution (n-gram lookup) read the leader's
text; what they find is copied.

Drafts decide about speed alone: whatever is proposed, what is kept has the guided distribution (sampler.py).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cfg_core.blend import blend
from cfg_core.vllm_plugin.compat import check_hooks

if TYPE_CHECKING:
    from cfg_core.vllm_plugin.sampler import Rows

_V1 = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_V2 = "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator"
PRIVATE_NAMES = (
    f"{_V1}._last_draft_probs",
    f"{_V1}._sample_draft_tokens",
    f"{_V1}.model",
    f"{_V1}.num_speculative_tokens",
    f"{_V1}.parallel_drafting",
    f"{_V1}.propose",
    f"{_V1}.use_local_argmax_reduction",
    f"{_V2}.propose",
    f"{_V2}.sample_draft",
    f"{_V2}.compute_draft_logits",
    f"{_V2}.device",
    f"{_V2}.max_num_reqs",
    f"{_V2}.num_speculative_steps",
    f"{_V2}.use_local_argmax_reduction",
)

NUM_STREAMS = 2
GREEDY_BELOW = 1e-5
"""A lower temperature is none, as in vLLM."""


class GuidedProposerV1:
    """Mixin in front of the class of a V1 drafter that is a model: a draft model, EAGLE, MTP."""

    HOOKS = ("propose", "_sample_draft_tokens")
    joint_rows: Callable[[], Rows | None]
    rests: Callable[[], bool]

    def propose(self: Any, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """vLLM's: drafts [batch, drafts]. Stock vLLM computes the step's tokens even if no draft is wanted."""
        if not self.rests():
            drafts: torch.Tensor = super().propose(num_speculative_tokens, *args, **kwargs)  # type: ignore[misc]
            return drafts
        self._last_draft_probs = None
        next_tokens: torch.Tensor = kwargs["next_token_ids"]
        return next_tokens.new_empty(next_tokens.shape[0], 0)

    def _sample_draft_tokens(self: Any, hidden_states: torch.Tensor, sampling_metadata: Any) -> Any:
        """vLLM's; `hidden_states` [batch x drafts at once, hidden size] -> (tokens, their distributions or None)."""
        rows = self.joint_rows()
        at_once = self.num_speculative_tokens if self.parallel_drafting else 1
        model, reduced = self.model, self.use_local_argmax_reduction
        if rows is not None:
            self.model, self.use_local_argmax_reduction = _BlendedDraftHead(model, rows, at_once), False
        try:
            tokens, probs = super()._sample_draft_tokens(hidden_states, sampling_metadata)  # type: ignore[misc]
        finally:
            self.model, self.use_local_argmax_reduction = model, reduced
        if probs is not None and at_once == 1:
            sample_seeded(tokens, probs, sampling_metadata)
        if rows is not None:
            rows.copy_to_followers(tokens.view(-1, at_once))
        return tokens, probs


def sample_seeded(tokens: torch.Tensor, probs: torch.Tensor, sampling_metadata: Any) -> None:
    """Draw the drafts of seeded requests again, by their own generators: tokens [batch], probs [batch, vocabulary].

    vLLM's V1 runner draws all drafts by one generator, so that under probabilistic drafting the same seed gives
    another text each time.
    """
    for row, generator in sampling_metadata.generators.items():
        if sampling_metadata.temperature[row] >= GREEDY_BELOW:
            noise = torch.empty_like(probs[row]).exponential_(generator=generator)
            tokens[row] = (probs[row] / noise).argmax()


class _BlendedDraftHead:
    """The draft model as its sampling sees it: logits come out blended. at_once: rows for each request."""

    def __init__(self, model: Any, rows: Rows, at_once: int) -> None:
        self._model, self._rows, self._at_once = model, rows, at_once

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[batch x at once, hidden size] -> [batch x at once, vocabulary]."""
        logits: torch.Tensor = self._model.compute_logits(hidden_states)
        by_request = logits.view(-1, self._at_once, logits.shape[-1])
        streams, weights = self._rows.streams, self._rows.group_weights
        for i in range(self._at_once):
            by_request[streams[0], i] = blend(by_request[streams, i], weights).to(logits.dtype)
        return logits


class GuidedSpeculatorV2(ABC):  # as vLLM's: Python lets an instance change its class only between equal layouts
    """Mixin in front of the class of a V2 speculator with a row of logits for each request: a draft model, EAGLE, MTP.

    Where the rows of groups are is in buffers of fixed size, so that a CUDA graph may hold the blend.
    """

    HOOKS = ("propose", "sample_draft", "compute_draft_logits")
    joint_rows: Callable[[], Rows | None]
    rests: Callable[[], bool]
    _guides = False

    def make_buffers(self: Any) -> None:
        """Once, before any graph is captured. The row of a request that leads no group is blended with itself."""
        size, device = self.max_num_reqs, self.device
        self._own_row = torch.arange(size, device=device)
        self._partners = self._own_row.repeat(NUM_STREAMS, 1)  # [streams, rows]
        self._weights = torch.zeros(NUM_STREAMS, size, device=device)
        self._leader_of = self._own_row.clone()
        self._leads = torch.zeros(size, dtype=torch.bool, device=device)

    def _point_at(self: Any, rows: Rows | None) -> None:
        self._partners.copy_(self._own_row.expand_as(self._partners))
        self._leader_of.copy_(self._own_row)
        self._leads.fill_(False)
        if rows is not None:
            leaders = rows.streams[0]
            self._partners[:, leaders] = rows.streams
            self._weights[:, leaders] = rows.group_weights
            self._leader_of[rows.streams[1:]] = leaders
            self._leads[leaders] = True

    def propose(
        self: Any, input_batch: Any, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """vLLM's: drafts [batch, drafts]. No more than asked for: stock StandaloneARSpeculator computes them all."""
        dummy = kwargs.get("dummy_run")
        if not dummy and self.rests():
            return torch.full((input_batch.num_reqs, self.num_speculative_steps), -1, device=self.device)
        rows, steps = None if dummy else self.joint_rows(), self.num_speculative_steps
        if rows is not None or self._guides:
            self._point_at(rows)
        self._guides = rows is not None
        if num_speculative_tokens is not None:
            self.num_speculative_steps = max(1, num_speculative_tokens)
        try:
            drafts: torch.Tensor = super().propose(  # type: ignore[misc]
                input_batch, *args, num_speculative_tokens=num_speculative_tokens, **kwargs
            )
        finally:
            self.num_speculative_steps = steps
        return drafts

    def sample_draft(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """vLLM's: [rows, hidden size] -> tokens [rows]; a follower's is its leader's."""
        if not self._blends():
            return super().sample_draft(hidden_states, *args, **kwargs)  # type: ignore[misc,no-any-return]
        reduced, self.use_local_argmax_reduction = self.use_local_argmax_reduction, False
        try:
            tokens: torch.Tensor = super().sample_draft(hidden_states, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.use_local_argmax_reduction = reduced
        return tokens[self._leader_of[: tokens.shape[0]]]

    def compute_draft_logits(self: Any, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """vLLM's: [rows, hidden size] -> [rows, vocabulary], the rows of leaders blended."""
        logits: torch.Tensor = super().compute_draft_logits(hidden_states, spec_step_idx)  # type: ignore[misc]
        if not self._blends():
            return logits
        n = logits.shape[0]
        guided = blend(logits[self._partners[:, :n]], self._weights[:, :n]).to(logits.dtype)
        return torch.where(self._leads[:n, None], guided, logits)

    def _blends(self: Any) -> bool:
        """Whether groups are in the batch; or may be, whenever the graph that is now captured is replayed.

        Not in a graph that reduces its logits on each device: groups' drafts come out unguided there, and are copied.
        """
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return self._guides or (capturing and not self.use_local_argmax_reduction)


def guide_drafter(runner: Any, *, v2: bool) -> None:
    """Let the drafter of `runner`, if it has one, propose for groups. Raises CompatibilityError."""
    drafter = getattr(runner, "speculator" if v2 else "drafter", None)
    if drafter is None:
        return
    mixin: Any = GuidedSpeculatorV2 if v2 else GuidedProposerV1
    if _has_rows(drafter, v2=v2) and not isinstance(drafter, mixin):
        cls = type(drafter)
        check_hooks(cls, mixin.HOOKS)
        drafter.__class__ = type(f"Guided{cls.__name__}", (mixin, cls), {})
        drafter.joint_rows = lambda: runner._joint_rows
        drafter.rests = lambda: runner._drafter_rests
        if v2:
            drafter.make_buffers()
    if v2:
        copy_drafts(runner)


def _has_rows(drafter: Any, *, v2: bool) -> bool:
    """Whether a drafter computes logits for each request, one draft at a time, where our mixin can blend them."""
    if not v2:
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

        return isinstance(drafter, SpecDecodeBaseProposer)
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    return isinstance(drafter, DraftModelSpeculator) and isinstance(
        drafter, StandaloneARSpeculator | TargetDependentARSpeculator
    )


def copy_drafts(runner: Any) -> None:
    """Let V2's speculator, of any kind, propose for the followers what it proposes for their leaders."""
    propose = runner.speculator.propose

    def propose_for_groups(*args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = propose(*args, **kwargs)  # [batch, drafts]
        if runner._joint_rows is not None and not kwargs.get("dummy_run"):
            drafts = drafts.clone()  # vLLM may return a view of its own buffer
            runner._joint_rows.copy_to_followers(drafts)
        return drafts

    runner.speculator.propose = propose_for_groups
