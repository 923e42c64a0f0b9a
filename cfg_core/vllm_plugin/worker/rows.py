"""Where the rows of the joint groups are, and their blend: what both model runners share.

Each runner blends the rows of a joint group into the leader's row, before grammar masks, penalties
and temperature. So guidance changes what the model predicts, and all that follows works as without
guidance. Most groups are blended before the model's head, as hidden states (head.py), and the
others after it, as logits. Then vLLM samples, and the leader's token is copied to the followers.
The sample of a solo stream is dropped.

Under speculation a stream has one row of logits for each of its drafts, and one more. All streams
of a group have equally many drafts. All rows are blended, so vLLM's rejection sampler verifies the
drafts against the guided distribution. The accepted drafts are copied to the followers, and so are
the next drafts.

The runners differ in where the logits are. V1 computes them in `execute_model` and keeps them until
`sample_tokens` (v1.py). V2 computes them in `sample` (v2.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from cfg_core import blend_kernel
from cfg_core.blend import blend
from cfg_core.vllm_plugin.wire import JointRow
from cfg_core.vllm_plugin.worker.head import LARGEST_WEIGHT, Merged


class Late(NamedTuple):
    """Rows that are blended after the head.

    of_logits: [streams, n] int64.
    weights: [streams, n] float32.
    """

    of_logits: torch.Tensor
    weights: torch.Tensor


class Rows(NamedTuple):
    """Index tensors of the joint groups of one step, on the logits' device.

    in_batch: [streams, groups] int64, the streams' places in the batch, the leaders' first.
    of_logits: [streams, rows] int64, their rows of logits. Each stream has one row more than
        drafts.
    group_weights: [streams, groups] float32.
    leading: the places in the batch that are no followers', in order.
    leading_index: [k] int64, the same as a tensor.
    leader_of: [batch] int64, for each place where `leading` has it. A follower has its leader's.
    merged: the rows that are blended before the head; None if there are none.
    late: the rows that are blended after it; None if there are none.
    asked: the rows of the groups that want their streams' log-probabilities; None if there are
        none.
    """

    in_batch: torch.Tensor
    of_logits: torch.Tensor
    group_weights: torch.Tensor
    leading: list[int]
    leading_index: torch.Tensor
    leader_of: torch.Tensor
    merged: Merged | None = None
    late: Late | None = None
    asked: Asked | None = None

    def copy_to_followers(self, per_stream: torch.Tensor) -> None:
        """Give each follower's row of `per_stream` [batch, ...] its leader's value."""
        per_stream[self.in_batch[1:]] = per_stream[self.in_batch[0]]


def first_rows(names: Sequence[str], drafts: Mapping[str, Sequence[int]]) -> np.ndarray:
    """The first row of logits of each place in V1's batch, and the end: [batch + 1].

    names: the request at each place.
    drafts: the drafts of those that have some.
    """
    return np.cumsum([0, *(1 + len(drafts.get(name, ())) for name in names)])


class Stager:
    """Stages the joint groups of each step, and keeps the tensors while nothing moves.

    Steps of a steady decode have the same groups at the same places. They need no copies to the
    device, and the tensors keep their addresses.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._rows: Rows | None = None

    def stage(
        self,
        joint: tuple[JointRow, ...],
        names: Sequence[str],
        first_row: np.ndarray,
        device: torch.device,
        *,
        affine: bool = False,
    ) -> Rows | None:
        """As the function `stage`. Equal arguments in a row give the same object.

        names: the stream at each place in the batch.
        """
        key = (joint, tuple(names), first_row.tobytes(), device, affine)
        if key != self._key:
            place_of = {name: place for place, name in enumerate(names)}
            self._rows = stage(joint, place_of, first_row, device, affine=affine)
            self._key = key
        return self._rows


def stage(
    joint: Sequence[JointRow],
    place_of: Mapping[str, int],
    first_row: np.ndarray,
    device: torch.device,
    *,
    affine: bool = False,
) -> Rows | None:
    """The joint groups as index tensors; None if there are none.

    All groups must have the same number of streams.

    place_of: each stream's place in the batch.
    first_row: [batch + 1], where the rows of logits of each place begin.
    affine: whether groups may be blended before the head.
    """
    if not joint:
        return None
    streams = np.array([[place_of[stream] for stream in group.streams] for group in joint]).T
    weights = np.array([group.weights for group in joint]).T
    logits = first_row[streams]
    counts = first_row[streams[0] + 1] - logits[0]
    early = np.array([affine and may_merge(group) for group in joint])
    row_weights = weights
    if counts.max() > 1:  # with drafts: repeat each group's columns, and count up from its row
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        logits = np.repeat(logits, counts, axis=1) + offsets
        row_weights, early = np.repeat(weights, counts, axis=1), np.repeat(early, counts)
    leader_of = np.arange(len(first_row) - 1)
    leader_of[streams[1:]] = streams[0]
    leading, leader_of = np.unique(leader_of, return_inverse=True)
    return Rows(
        to_device(streams, np.int64, device),
        to_device(logits, np.int64, device),
        to_device(weights, np.float32, device),
        leading.tolist(),
        to_device(leading, np.int64, device),
        to_device(leader_of, np.int64, device),
        stage_merged(logits[:, early], row_weights[:, early], first_row[-1], device),
        stage_late(logits[:, ~early], row_weights[:, ~early], device),
        stage_asked(joint, streams[0], counts, device),
    )


def may_merge(group: JointRow) -> bool:
    """Whether a group may be blended before an affine head."""
    return not group.needs_rows and max(map(abs, group.weights)) <= LARGEST_WEIGHT


def stage_merged(
    streams: np.ndarray, weights: np.ndarray, num_rows: int, device: torch.device
) -> Merged | None:
    """Index tensors of the rows that go through the head; None if no group is blended before it.

    streams: [streams, m], the rows of those groups, and `weights` theirs.
    """
    if not streams.size:
        return None
    source = np.arange(num_rows)
    source[streams[1:]] = streams[0]
    kept, source = np.unique(source, return_inverse=True)
    leaders = source[streams[0]]
    made_of, factors = np.tile(kept, (len(streams), 1)), np.zeros((len(streams), len(kept)))
    factors[0] = 1
    made_of[:, leaders], factors[:, leaders] = streams, weights
    return Merged(
        to_device(made_of, np.int64, device),
        to_device(factors, np.float32, device),
        to_device(source, np.int64, device),
    )


def stage_late(streams: np.ndarray, weights: np.ndarray, device: torch.device) -> Late | None:
    """Index tensors of the rows [streams, n] that are blended after it; None without any."""
    if not streams.size:
        return None
    return Late(to_device(streams, np.int64, device), to_device(weights, np.float32, device))


def stage_asked(
    joint: Sequence[JointRow], places: np.ndarray, counts: np.ndarray, device: torch.device
) -> Asked | None:
    """Index tensors of the groups that want their streams' log-probabilities, or None.

    places: [groups], places of the leaders in the batch.
    counts: [groups], rows of logits of each stream of a group.
    """
    wanted = np.repeat([group.logprobs for group in joint], counts)
    if not wanted.any():
        return None
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    arrays = (np.arange(counts.sum()), np.repeat(places, counts), offsets)
    return Asked(*(to_device(array[wanted], np.int64, device) for array in arrays))


def kept_rows(logits: torch.Tensor, rows: Rows) -> torch.Tensor | None:
    """The rows of `logits` that `widen` will need, before the blend; None if nobody asks."""
    return None if rows.asked is None else keep(logits, rows.of_logits[:, rows.asked.columns])


def to_device(values: Any, dtype: Any, device: torch.device) -> torch.Tensor:
    """Copy a small host array to `device` without waiting for it.

    This uses vLLM's own pinned, asynchronous copy.
    """
    tensor: torch.Tensor = async_tensor_h2d(
        np.ascontiguousarray(values, dtype=dtype), device=device
    )
    return tensor


def blended(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`logits` [rows, vocabulary], each leader's row in `rows.late` replaced by its group's blend.

    If there are such rows, the result is float32, which keeps the blend from being rounded back to
    bfloat16. If `logits` are float32 already, they are changed in place.
    """
    if rows.late is None:
        return logits
    out = logits.float()
    if blend_kernel.is_usable(logits.device):
        blend_kernel.blend_rows(logits, rows.late.of_logits, rows.late.weights, out)
    else:
        out[rows.late.of_logits[0]] = blend(logits[rows.late.of_logits], rows.late.weights)
    return out


class Asked(NamedTuple):
    """Where the n tokens are whose groups ask for log-probabilities. Each tensor is [n] int64.

    columns: columns of `Rows.logits`.
    places: places in the batch.
    offsets: positions among the tokens of their request.
    """

    columns: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor


def keep(logits: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """The rows of `streams` [streams, n] before the blend: [streams, n, vocabulary] float32."""
    return logits[streams].float()


def widen(tensors: Any, kept: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> Any:
    """Add one column per stream to vLLM's LogprobsTensors.

    kept: [streams, n, vocabulary], the streams' logits before the blend.
    tokens: [n], the tokens whose log-probabilities are added.
    rows: [n], the rows of vLLM's tensors that get them. The other rows get 0.
    """
    tokens = tokens.long().clamp(min=0).expand(kept.shape[0], -1)  # rejected tokens are -1
    values = kept.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - kept.logsumexp(-1)  # [streams, n]
    columns = tensors.logprobs.new_zeros(tensors.logprobs.shape[0], kept.shape[0])
    columns[rows] = values.T.to(columns.dtype)
    ids = tensors.logprob_token_ids
    return tensors._replace(
        logprob_token_ids=torch.cat([ids, ids[:, :1].expand(-1, kept.shape[0])], 1),
        logprobs=torch.cat([tensors.logprobs, columns], 1),
    )
