"""Staging: the joint groups of a step become index tensors on the logits' device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from cfg_core.blend import CutRows, RuleRows, StrengthRows
from cfg_core.policy.groups import Group
from cfg_core.vllm_plugin.wire import JointRow, columns_of
from cfg_core.vllm_plugin.worker.head import LARGEST_WEIGHT, Merged
from cfg_core.vllm_plugin.worker.logit_blends import LogitBlend
from cfg_core.vllm_plugin.worker.rows import LogprobRows, Rows


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
        suffixes: int = 0,
    ) -> Rows | None:
        """As the function `stage`. Equal arguments in a row give the same object.

        names: the stream at each place in the batch, and the suffixes behind them.
        """
        key = (joint, tuple(names), first_row.tobytes(), device, affine)
        if key != self._key:
            place_of = {name: place for place, name in enumerate(names)}
            self._rows = stage(joint, place_of, first_row, device, affine=affine, suffixes=suffixes)
            self._key = key
        return self._rows


def stage(
    joint: Sequence[JointRow],
    place_of: Mapping[str, int],
    first_row: np.ndarray,
    device: torch.device,
    *,
    affine: bool = False,
    suffixes: int = 0,
) -> Rows | None:
    """The joint groups as index tensors; None if there are none.

    place_of: each stream's place in the batch, and those of suffixes behind them.
    first_row: [batch + suffixes + 1], where the rows of logits of each place begin.
    affine: whether groups may be blended before the head.
    suffixes: how many places at the end are suffixes, which are not in the batch.
    """
    if not joint:
        return None
    sizes = np.array([len(group.weights) for group in joint])
    streams, weights = padded(joint, place_of, sizes.max())
    logits = first_row[streams]
    counts = first_row[streams[0] + 1] - logits[0]
    group_of = np.repeat(np.arange(len(joint)), counts)
    if counts.max() > 1:  # with drafts: repeat each group's columns, and count up from its row
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        logits = logits[:, group_of] + offsets
    early = np.array([affine and may_merge(group) for group in joint])[group_of]
    row_weights = weights[:, group_of]
    leader_place = np.arange(len(first_row) - 1)
    weight = np.ones(len(leader_place))
    leader_place[streams[1:]] = streams[0]
    for places, own in zip(streams[::-1], weights[::-1], strict=True):
        weight[places] = own  # row by row: padding, and a probe's own negative, are overwritten
    weight[streams[0][streams[1] >= len(weight) - suffixes]] = 1  # drafters have no row of a suffix
    batch = len(leader_place) - suffixes
    leader_place, weight = leader_place[:batch], weight[:batch]
    leading, leader_of = np.unique(leader_place, return_inverse=True)
    return Rows(
        to_device(logits, np.int64, device),
        to_device(leader_place, np.int64, device),
        to_device(weight, np.float32, device),
        leading.tolist(),
        to_device(leading, np.int64, device),
        to_device(leader_of, np.int64, device),
        stage_merged(logits[:, early], row_weights[:, early], first_row[-1], device),
        stage_logit_blends(
            joint, group_of[~early], logits[:, ~early], row_weights[:, ~early], device
        ),
        stage_logprob_rows(joint, streams[0], counts, device),
        counts.tolist(),
        stage_draft_blends(joint, streams, weights, device),
    )


def padded(
    joint: Sequence[JointRow], place_of: Mapping[str, int], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Places and weights of all streams and suffixes: [size, groups] each.

    A group with fewer streams repeats its first follower, with the weight 0.
    """
    streams = np.empty((size, len(joint)), dtype=np.int64)
    weights = np.zeros((size, len(joint)))
    for i, group in enumerate(joint):
        n = len(group.weights)
        streams[:n, i] = [place_of[name] for name in group.blended]
        streams[n:, i] = streams[1, i]
        weights[:n, i] = group.weights
    return streams, weights


def may_merge(row: JointRow) -> bool:
    """Whether a group may be blended before an affine head."""
    return not row.group.needs_rows and max(map(abs, row.weights)) <= LARGEST_WEIGHT


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


def stage_logit_blends(
    joint: Sequence[JointRow],
    group_of: np.ndarray,
    streams: np.ndarray,
    weights: np.ndarray,
    device: torch.device,
) -> tuple[LogitBlend, ...]:
    """Index tensors of the rows that are blended after the head, by their number of streams.

    Probes are apart from pairs.

    group_of: [n], the group of each row.
    streams, weights: [streams, n].
    """
    kinds = np.array([(len(joint[i].weights), joint[i].probe) for i in group_of]).reshape(-1, 2)
    blends = []
    for size, is_probe in np.unique(kinds, axis=0).tolist():
        chosen = (kinds == (size, is_probe)).all(1)
        groups = [joint[i].group for i in group_of[chosen]]
        blends.append(
            LogitBlend(
                to_device(streams[:size, chosen], np.int64, device),
                to_device(weights[:size, chosen], np.float32, device),
                *stage_limits(groups, device, is_probe=bool(is_probe)),
                bool(is_probe),
            )
        )
    return tuple(blends)


def stage_draft_blends(
    joint: Sequence[JointRow], streams: np.ndarray, weights: np.ndarray, device: torch.device
) -> tuple[LogitBlend, ...]:
    """See `Rows.draft_blends`.

    streams, weights: [streams, groups], the places, and their weights.
    """
    changed = np.flatnonzero([_changes_drafts(row.group) for row in joint])
    if not len(changed):
        return ()
    return stage_logit_blends(joint, changed, streams[:, changed], weights[:, changed], device)


def _changes_drafts(group: Group) -> bool:
    """Whether the drafts of a group are of another blend. With a suffix they are the leader's."""
    return not group.suffix and (group.cuts is not None or group.strength is not None)


def stage_limits(
    groups: Sequence[Group], device: torch.device, is_probe: bool = False
) -> tuple[CutRows | None, StrengthRows | None, tuple[RuleRows, ...]]:
    """What changes the blend of rows, whose groups are given; None if nothing does.

    is_probe: whether the rows are probes, for which no rule computes a scale.
    """
    put = partial(to_device, device=device)
    strengths = [group.strength for group in groups]
    return (
        CutRows.of([group.cuts for group in groups], put),
        StrengthRows.of(strengths, put),
        () if is_probe else RuleRows.of(strengths, put),
    )


def stage_logprob_rows(
    joint: Sequence[JointRow], places: np.ndarray, counts: np.ndarray, device: torch.device
) -> LogprobRows | None:
    """Index tensors of the groups that want their streams' log-probabilities, or None.

    places: [groups], places of the leaders in the batch.
    counts: [groups], rows of logits of each stream of a group.
    """
    wanted = np.repeat([row.group.logprobs is not None for row in joint], counts)
    if not wanted.any():
        return None
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    arrays = (np.arange(counts.sum()), np.repeat(places, counts), offsets)
    columns, at, after = (to_device(array[wanted], np.int64, device) for array in arrays)
    return LogprobRows(columns, at, after, columns_of(joint).top)


def to_device(values: Any, dtype: Any, device: torch.device) -> torch.Tensor:
    """Copy a small host array to `device` without waiting for it.

    This uses vLLM's own pinned, asynchronous copy.
    """
    tensor: torch.Tensor = async_tensor_h2d(
        np.ascontiguousarray(values, dtype=dtype), device=device
    )
    return tensor
