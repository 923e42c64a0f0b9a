"""The blend on vLLM's model runners, V1 and V2.

Blend the raw rows of each joint group into the leader's row, before grammar masks, penalties and temperature
(guidance changes the model, everything else sees a model); let vLLM sample; copy the leader's token to the
followers. The sample of a solo stream is dropped.

Under speculation a stream has a row of logits for each of its drafts and one more. All streams of a group have
equally many; all are blended, so vLLM's rejection sampler verifies the drafts against the guided distribution. What
it keeps is copied, and so are the next drafts.

Both runners share `stage` and `blended`. They differ in where the logits are: V1 computes them in
`execute_model` and keeps them until `sample_tokens`; V2 computes them in `sample`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from cfg_core.blend import blend
from cfg_core.processor_registry import Registry
from cfg_core.vllm_plugin import sequence_processors
from cfg_core.vllm_plugin.compat import check_hooks
from cfg_core.vllm_plugin.drafting import guide_drafter
from cfg_core.vllm_plugin.step import JointRow, StepGuidance
from cfg_core.vllm_plugin.stream_logprobs import Asked, keep, widen

_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
PRIVATE_NAMES = (
    f"{_V1}:GPUModelRunner.sample_tokens",
    f"{_V1}:GPUModelRunner._sample",
    f"{_V1}:GPUModelRunner.execute_model_state",
    f"{_V1}:GPUModelRunner.discard_request_mask",
    f"{_V1}:GPUModelRunner.input_batch",
    f"{_V1}:ExecuteModelState.logits",
    f"{_V1}:ExecuteModelState.scheduler_output",
    f"{_V1}:ExecuteModelState.spec_decode_metadata",
    f"{_V1}:GPUModelRunner.propose_draft_token_ids",
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata.num_draft_tokens",
    "vllm.v1.worker.gpu_input_batch:InputBatch.generators",
    "vllm.v1.worker.gpu_input_batch:InputBatch.req_id_to_index",
    "vllm.v1.worker.gpu_input_batch:InputBatch.num_reqs",
    f"{_V2}.execute_model",
    f"{_V2}.sample",
    f"{_V2}.model",
    f"{_V2}.speculator",
    "vllm.v1.worker.gpu.input_batch:InputBatch.cu_num_logits_np",
    "vllm.v1.worker.gpu.input_batch:InputBatch.req_ids",
    "vllm.v1.worker.gpu.sample.output:SamplerOutput.sampled_token_ids",
    "vllm.v1.worker.gpu.sample.output:SamplerOutput.num_sampled",
    "vllm.v1.worker.gpu.sample.output:SamplerOutput.num_rejected",
    "vllm.utils.torch_utils:async_tensor_h2d",
)


class Rows(NamedTuple):
    """Index tensors of the joint groups of one step, on the logits' device.

    streams: [streams, groups] int64, places in the batch, the leaders' first.
    logits: [streams, rows] int64, their rows of logits; as many for each stream as it has drafts, and one.
    weights: [streams, rows] float32. group_weights: [streams, groups], the same once for each group.
    asked: the rows of the groups that want their streams' log-probabilities; None if there are none.
    """

    streams: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor
    group_weights: torch.Tensor
    asked: Asked | None = None

    def copy_to_followers(self, per_stream: torch.Tensor) -> None:
        """Give each follower's row of `per_stream` [batch, ...] its leader's value."""
        per_stream[self.streams[1:]] = per_stream[self.streams[0]]


class GuidedSamplingV1:
    """Mixin in front of the V1 model runner's class."""

    HOOKS = ("sample_tokens", "_sample", "propose_draft_token_ids")
    _joint_rows: Rows | None = None
    _kept: torch.Tensor | None = None
    _drafter_rests = False

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        """vLLM's `sample_tokens`, with the rows of joint groups blended and those of solo streams dropped."""
        state = self.execute_model_state
        if state is None or state.logits is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        guidance = StepGuidance.of(state.scheduler_output)
        if guidance is not None:
            self._drafter_rests = guidance.drafter_rests
            self._discard(guidance.solo)
            self._joint_rows = stage(
                guidance.joint,
                self.input_batch.req_id_to_index,
                first_rows(state.spec_decode_metadata, self.input_batch.num_reqs),
                state.logits.device,
            )
        if self._joint_rows is not None:
            self._kept = kept_rows(state.logits, self._joint_rows)
            self.execute_model_state = state._replace(logits=blended(state.logits, self._joint_rows))
        withheld = self._withhold_generators()
        try:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        finally:
            self.input_batch.generators.update(withheld)
            self._joint_rows = self._kept = None
            self._drafter_rests = False

    def _sample(self: Any, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        """vLLM's `_sample`, then the leader's token to its followers."""
        if spec_decode_metadata is not None and not spec_decode_metadata.draft_token_ids.numel():
            # Stock vLLM takes its rejection sampler even then; with a top_k, on a CPU, that ends the engine ("max():
            # Expected reduction dim"). Without drafts the two samplers are the same.
            spec_decode_metadata = None
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if self._joint_rows is not None:
            tokens = output.sampled_token_ids  # [batch, 1 + drafts] int32
            self._joint_rows.copy_to_followers(tokens)
            asked = self._joint_rows.asked
            if asked is not None and output.logprobs_tensors is not None:
                rows = asked.places * tokens.shape[1] + asked.offsets
                sampled = tokens[asked.places, asked.offsets]
                output.logprobs_tensors = widen(output.logprobs_tensors, self._kept, sampled, rows)
        return output

    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's proposal, a list or a tensor of drafts per request; the leader's for its followers, too."""
        drafts = super().propose_draft_token_ids(*args, **kwargs)  # type: ignore[misc]
        if self._joint_rows is None:
            return drafts
        if not isinstance(drafts, torch.Tensor):
            for leader, *followers in self._joint_rows.streams.T.tolist():
                for follower in followers:
                    drafts[follower] = drafts[leader]
            return drafts
        drafts = drafts.clone()
        self._joint_rows.copy_to_followers(drafts)
        return drafts

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


class GuidedSamplingV2:
    """Mixin in front of Model Runner V2's class. Seeds need no care here: V2 derives noise from the position."""

    HOOKS = ("execute_model", "sample")
    _guidance: StepGuidance | None = None
    _joint_rows: Rows | None = None
    _drafter_rests = False

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `execute_model`; keeps the step's guidance for `sample`, which follows it."""
        self._guidance = StepGuidance.of(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample(self: Any, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """vLLM's `sample`, on blended logits. Returns (SamplerOutput, tokens kept, tokens taken back) per row."""
        guidance, self._guidance, self._joint_rows = self._guidance, None, None
        self._drafter_rests = guidance is not None and guidance.drafter_rests
        if guidance is None:
            return super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]
        row_of = {stream: row for row, stream in enumerate(input_batch.req_ids)}
        joint = stage(guidance.joint, row_of, input_batch.cu_num_logits_np, hidden_states.device)
        model, self._joint_rows = self.model, joint
        head = None if joint is None else _BlendedHead(model, joint)
        self.model = head or model
        try:
            output, num_sampled, num_rejected = super().sample(  # type: ignore[misc]
                hidden_states, input_batch, grammar_output
            )
        finally:
            self.model = model
        if joint is not None and head is not None:
            for per_stream in (output.sampled_token_ids, num_sampled, num_rejected):
                joint.copy_to_followers(per_stream)
            if joint.asked is not None and head.kept is not None and output.logprobs_tensors is not None:
                sampled = output.sampled_token_ids[joint.asked.places, joint.asked.offsets]
                rows = joint.logits[0, joint.asked.columns]
                output.logprobs_tensors = widen(output.logprobs_tensors, head.kept, sampled, rows)
        if guidance.solo:
            solo = to_device([row_of[stream] for stream in guidance.solo], np.int64, hidden_states.device)
            num_rejected[solo] += num_sampled[solo]  # the worker, too, takes its tokens back
            num_sampled[solo] = 0
        return output, num_sampled, num_rejected


class _BlendedHead:
    """The model as V2's `sample` sees it: logits come out blended, before the grammar masks them."""

    def __init__(self, model: Any, rows: Rows) -> None:
        self._model, self._rows = model, rows
        self.kept: torch.Tensor | None = None

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden size] -> [rows, vocabulary] float32."""
        logits = self._model.compute_logits(hidden_states)
        self.kept = kept_rows(logits, self._rows)
        return blended(logits, self._rows)


def first_rows(spec_decode_metadata: Any, num_reqs: int) -> np.ndarray:
    """[batch + 1]: the first row of logits of each place in V1's batch, and the end."""
    drafts = spec_decode_metadata.num_draft_tokens if spec_decode_metadata is not None else [0] * num_reqs
    return np.cumsum([0, *(1 + n for n in drafts)])


def stage(
    joint: Sequence[JointRow], place_of: Mapping[str, int], first_row: np.ndarray, device: torch.device
) -> Rows | None:
    """The joint groups as index tensors; None if there are none. All groups have the same number of streams.

    place_of: each stream's place in the batch. first_row: [batch + 1], where the rows of logits of each place begin.
    """
    if not joint:
        return None
    streams = np.array([[place_of[stream] for stream in group.streams] for group in joint]).T
    weights = np.array([group.weights for group in joint]).T
    logits = first_row[streams]
    counts = first_row[streams[0] + 1] - logits[0]
    places, group_weights = to_device(streams, np.int64, device), to_device(weights, np.float32, device)
    row_weights = group_weights
    if counts.max() > 1:  # drafts: repeat each group's columns, and count on from its first row
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        logits = np.repeat(logits, counts, axis=1) + offsets
        row_weights = to_device(np.repeat(weights, counts, axis=1), np.float32, device)
    asked = stage_asked(joint, streams[0], counts, device)
    return Rows(places, to_device(logits, np.int64, device), row_weights, group_weights, asked)


def stage_asked(
    joint: Sequence[JointRow], places: np.ndarray, counts: np.ndarray, device: torch.device
) -> Asked | None:
    """Index tensors of the groups that want their streams' log-probabilities. places, counts: [groups]."""
    wanted = np.repeat([group.logprobs for group in joint], counts)
    if not wanted.any():
        return None
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    arrays = (np.arange(counts.sum()), np.repeat(places, counts), offsets)
    return Asked(*(to_device(array[wanted], np.int64, device) for array in arrays))


def kept_rows(logits: torch.Tensor, rows: Rows) -> torch.Tensor | None:
    """What `widen` will need of `logits`, before they are blended; None if nobody asks."""
    return None if rows.asked is None else keep(logits, rows.logits[:, rows.asked.columns])


def to_device(values: Any, dtype: Any, device: torch.device) -> torch.Tensor:
    """A small host array on `device`, without waiting for it: vLLM's own pinned, asynchronous copy."""
    tensor: torch.Tensor = async_tensor_h2d(np.ascontiguousarray(values, dtype=dtype), device=device)
    return tensor


def blended(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`logits` [rows, vocabulary] as float32, with each leader's row replaced by its group's blend.

    A copy unless float32 already: the blend must not be rounded back to bfloat16.
    """
    out = logits.float()
    out[rows.logits[0]] = blend(logits[rows.logits], rows.weights)
    return out


def guide(runner: Any, registry: Registry, *, v2: bool) -> None:
    """Put our mixins for this model runner instance in front of its class. Raises CompatibilityError."""
    mixin, cls = GuidedSamplingV2 if v2 else GuidedSamplingV1, type(runner)
    if issubclass(cls, mixin):
        return
    check_hooks(cls, mixin.HOOKS)
    guide_drafter(runner, v2=v2)
    processors = sequence_processors.install(runner, registry, v2=v2)
    check_hooks(cls, processors.HOOKS)
    runner.__class__ = type(f"Guided{cls.__name__}", (processors, mixin, cls), {})
