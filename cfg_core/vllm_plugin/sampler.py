"""GuidedSampling: the blend on vLLM's V1 model runner.

Around one step of vLLM's `sample_tokens`: blend the raw rows of each joint group into the leader's row, before
grammar masks, penalties and temperature (guidance changes the model, everything else sees a model); let vLLM
sample; copy the leader's token to the followers. Rows of solo streams are discarded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cfg_core.blend import blend
from cfg_core.vllm_plugin.step import JointRow, StepGuidance

PRIVATE_NAMES = (
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model_state",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.discard_request_mask",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.input_batch",
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState.logits",
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState.scheduler_output",
    "vllm.v1.worker.gpu_input_batch:InputBatch.generators",
    "vllm.v1.worker.gpu_input_batch:InputBatch.req_id_to_index",
    "vllm.v1.worker.gpu_input_batch:InputBatch.num_reqs",
)


class Rows(NamedTuple):
    """Index tensors of the joint groups of one step, on the logits' device.

    leaders: [groups] int64, followers: [streams - 1, groups] int64, batch rows. weights: [streams, groups] float32.
    """

    leaders: torch.Tensor
    followers: torch.Tensor
    weights: torch.Tensor


class GuidedSampling:
    """Mixin in front of a V1 model runner's class (`guide` puts it there)."""

    _joint_rows: Rows | None = None

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        """vLLM's `sample_tokens`, with the rows of joint groups blended and those of solo streams dropped."""
        state = self.execute_model_state
        if state is None or state.logits is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        guidance = StepGuidance.of(state.scheduler_output)
        if guidance is not None:
            self._discard(guidance.solo)
            self._joint_rows = stage(guidance.joint, self.input_batch.req_id_to_index, state.logits.device)
        if self._joint_rows is not None:
            self.execute_model_state = state._replace(logits=blended(state.logits, self._joint_rows))
        withheld = self._withhold_generators()
        try:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        finally:
            self.input_batch.generators.update(withheld)
            self._joint_rows = None

    def _sample(self: Any, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        """vLLM's `_sample`, then the leader's token to its followers."""
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if self._joint_rows is not None:
            tokens = output.sampled_token_ids  # [rows, 1] int32
            tokens[self._joint_rows.followers] = tokens[self._joint_rows.leaders]
        return output

    def _discard(self: Any, solo: tuple[str, ...]) -> None:
        if solo:
            rows = self.input_batch.req_id_to_index
            self.discard_request_mask.np[[rows[stream] for stream in solo]] = True
            self.discard_request_mask.copy_to_gpu(self.input_batch.num_reqs)

    def _withhold_generators(self: Any) -> dict[int, torch.Generator]:
        """Take out the seeded generators of rows whose sample is dropped, so that they do not advance.

        vLLM rewinds them afterwards instead, which CPU generators cannot do: there a seeded request with a
        chunked prompt ends the stock engine ("CPU Generator does not use offset").
        """
        generators, dropped = self.input_batch.generators, self.discard_request_mask.np
        return {row: generators.pop(row) for row in list(generators) if dropped[row]}


def stage(joint: tuple[JointRow, ...], row_of: dict[str, int], device: torch.device) -> Rows | None:
    """The joint groups as index tensors; None if there are none. All groups have the same number of streams."""
    if not joint:
        return None
    rows = torch.tensor([[row_of[s] for s in group.streams] for group in joint], device=device).T
    weights = torch.tensor([group.weights for group in joint], dtype=torch.float32, device=device).T
    return Rows(rows[0], rows[1:], weights)


def blended(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`logits` [rows, vocabulary] as float32, with each leader's row replaced by its group's blend.

    A copy unless float32 already: the blend must not be rounded back to bfloat16.
    """
    streams = torch.cat((rows.leaders.unsqueeze(0), rows.followers))
    out = logits.float()
    out[rows.leaders] = blend(logits[streams], rows.weights)
    return out


def guide(runner: Any) -> None:
    """Put GuidedSampling in front of the class of this model runner instance."""
    cls = type(runner)
    if not issubclass(cls, GuidedSampling):
        runner.__class__ = type(f"Guided{cls.__name__}", (GuidedSampling, cls), {})
