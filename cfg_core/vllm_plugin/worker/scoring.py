"""Scores: log-probabilities of a prompt's last tokens under the blend. Both model runners share it.

The streams of a group read their prompts in different steps. The rows of hidden states that predict
scored tokens wait here until the group's first joint step (core/scoring.py). They wait in host
memory, and go back to the device in pieces, because vLLM does not count them when it measures the
GPU's memory. Most prompts are read in one step; then nothing waits.

The rows are blended as those of sampled tokens are: before an affine head if the group may be
(head.py), otherwise as logits, some rows at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from cfg_core.policy.groups import Group
from cfg_core.vllm_plugin.wire import JointRow, ScoredRead, Scoring, StepGuidance
from cfg_core.vllm_plugin.worker.head import Head, Merged, merge
from cfg_core.vllm_plugin.worker.logit_blends import LogitBlend, blend_logits, pieces
from cfg_core.vllm_plugin.worker.staging import may_merge, stage_limits, to_device

MOST_ROWS = 256
"""Rows of logits that are computed at a time. With a vocabulary of 128k they have 128 MiB in
float32, and the blend makes a few tensors of that size."""


@dataclass
class _Kept:
    """Rows of one stream, in the order of the tokens that they predict.

    parts: [n, hidden size] each.
    """

    parts: list[torch.Tensor] = field(default_factory=list)
    rows: int = 0

    def add(self, read: ScoredRead, rows: torch.Tensor) -> None:
        """Add the next rows. A stream that was preempted begins anew."""
        if read.first == 0:
            self.parts, self.rows = [], 0
        assert read.first == self.rows, f"scored rows of {read.stream} are missing"
        self.parts.append(rows)
        self.rows += len(rows)

    def joined(self) -> torch.Tensor:
        """All rows: as the step computed them, or in host memory if some have waited there."""
        if len(self.parts) == 1:
            return self.parts[0]
        return torch.cat([part.to("cpu") for part in self.parts])


class Scorer:
    """The scores of one model runner. Used from the thread that runs the model."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def forget(self, streams: Iterable[str]) -> None:
        """Drop the rows of streams that have ended."""
        for stream in streams if self._kept else ():
            self._kept.pop(stream, None)

    def step(
        self,
        guidance: StepGuidance | None,
        hidden_states: torch.Tensor,
        start_of: Callable[[str], int],
        head: Head | None,
    ) -> dict[str, LogprobsTensors]:
        """Keep what this step computed for scores, and return those of the groups that are joint.

        hidden_states: [tokens of the step, hidden size].
        start_of: where the rows of a stream begin.
        head: None on ranks that do not compute logits.

        Returns one entry for each leader: the scored token and the most likely ones, [tokens,
        1 + top], on the device of the logits.
        """
        if head is None:
            return {}
        found: dict[str, LogprobsTensors] = {}
        ready = self.take(guidance, hidden_states, start_of)
        for (_, merged), batch in _alike(ready, affine=head.affine):
            found |= score(batch, head, hidden_states.device, merged=merged)
        return found

    def take(
        self,
        guidance: StepGuidance | None,
        hidden_states: torch.Tensor,
        start_of: Callable[[str], int],
    ) -> list[ScoredGroup]:
        """Keep what this step computed for scores. Returns the groups that are scored now."""
        if guidance is None or not guidance.scores:
            return []
        joint = [(row, row.scoring) for row in guidance.joint if row.scoring is not None]
        now = {stream for row, _ in joint for stream in row.streams}
        for read in guidance.reads:
            start = start_of(read.stream) + read.skip
            rows = hidden_states[start : start + read.count]
            if read.stream not in now:
                rows = rows.to("cpu", copy=True)
            self._kept.setdefault(read.stream, _Kept()).add(read, rows)
        return [self._wanted(row, scoring) for row, scoring in joint]

    def _wanted(self, row: JointRow, scoring: Scoring) -> ScoredGroup:
        kept = [self._kept.pop(stream) for stream in row.streams]
        assert all(one.rows == len(scoring.tokens) for one in kept), row
        return ScoredGroup(row, scoring, tuple(one.joined() for one in kept))


class ScoredGroup(NamedTuple):
    """A group whose scores are wanted now.

    states: [tokens, hidden size] of each stream, on the device or in host memory.
    """

    row: JointRow
    scoring: Scoring
    states: tuple[torch.Tensor, ...]


def _alike(
    wanted: Iterable[ScoredGroup], *, affine: bool
) -> Iterator[tuple[tuple[int, bool], list[ScoredGroup]]]:
    """Groups that can be blended together, by their number of streams and the way of the blend.

    The key says whether they are blended before the head.
    """

    def key(one: ScoredGroup) -> tuple[int, bool]:
        return len(one.row.streams), affine and may_merge(one.row)

    for kind, batch in itertools.groupby(sorted(wanted, key=key), key):
        yield kind, list(batch)


class Piece(NamedTuple):
    """Some scored tokens of groups with equally many streams: n in all, on the device.

    states: [streams, n, hidden size].
    weights: [streams, n] float32.
    tokens: [n] int64.
    groups: of each token.
    """

    states: torch.Tensor
    weights: torch.Tensor
    tokens: torch.Tensor
    groups: list[Group]

    @classmethod
    def of(cls, parts: Sequence[tuple[ScoredGroup, slice]], device: torch.device) -> Piece:
        tokens = [one.scoring.tokens[part] for one, part in parts]
        counts = [len(ids) for ids in tokens]
        weights = np.array([one.row.weights for one, _ in parts]).T.repeat(counts, axis=1)
        streams = range(len(parts[0][0].row.streams))
        states = [torch.cat([one.states[i][p].to(device) for one, p in parts]) for i in streams]
        return cls(
            torch.stack(states),
            to_device(weights, np.float32, device),
            to_device([token for ids in tokens for token in ids], np.int64, device),
            [one.row.group for (one, _), n in zip(parts, counts, strict=True) for _ in range(n)],
        )

    def places(self) -> torch.Tensor:
        """Where the row of each stream and token is in the flattened states: [streams, n] int64."""
        streams, n, _ = self.states.shape
        return torch.arange(streams * n, device=self.states.device).view(streams, n)


def pieces_of(
    wanted: Iterable[ScoredGroup], size: int
) -> Iterator[list[tuple[ScoredGroup, slice]]]:
    """All tokens of all groups in order, `size` at a time: which group, and which of its tokens."""
    piece: list[tuple[ScoredGroup, slice]] = []
    room = size
    for one in wanted:
        first, end = 0, len(one.scoring.tokens)
        while first < end:
            taken = min(room, end - first)
            piece.append((one, slice(first, first + taken)))
            first, room = first + taken, room - taken
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def score(
    wanted: Sequence[ScoredGroup], head: Head, device: torch.device, *, merged: bool
) -> dict[str, LogprobsTensors]:
    """The scores of groups with equally many streams, by leader.

    merged: whether they are blended before the head.

    Returns nothing on a rank that has no logits.
    """
    tops = [one.scoring.top for one in wanted]
    top = -1 if -1 in tops else max(tops)
    blended = merged_logits if merged else late_logits
    found = []
    for parts in pieces_of(wanted, max(1, MOST_ROWS // len(wanted[0].row.streams))):
        piece = Piece.of(parts, device)
        guided = blended(piece, head)
        if guided is None:
            return {}
        found.append(gather(guided, piece.tokens, top))
    return _by_leader(wanted, [torch.cat(part) for part in zip(*found, strict=True)])


def _by_leader(
    wanted: Sequence[ScoredGroup], scores: Iterable[torch.Tensor]
) -> dict[str, LogprobsTensors]:
    """Give each group its rows, and no more of the most likely tokens than it asked for."""
    counts = [len(one.scoring.tokens) for one in wanted]
    rows = zip(*(torch.split(part, counts) for part in scores), strict=True)
    found = {}
    for one, (ids, values, ranks) in zip(wanted, rows, strict=True):
        width = ids.shape[1] if one.scoring.top == -1 else 1 + one.scoring.top
        found[one.row.streams[0]] = LogprobsTensors(ids[:, :width], values[:, :width], ranks)
    return found


def merged_logits(piece: Piece, head: Head) -> torch.Tensor | None:
    """The blend of n tokens before the head, [n, vocabulary]; None on a rank that has no logits."""
    streams = piece.places()
    source = streams[0]  # `merge` does not read it
    merged = merge(piece.states.flatten(0, 1), Merged(streams, piece.weights, source))
    return head.compute_logits(merged)


def late_logits(piece: Piece, head: Head) -> torch.Tensor | None:
    """As `merged_logits`, after the head, and cut."""
    logits = head.compute_logits(piece.states.flatten(0, 1))
    if logits is None:
        return None
    out = logits.float()
    limits = stage_limits(piece.groups, logits.device)
    blend_logits(logits, LogitBlend(piece.places(), piece.weights, *limits), out)
    return out[: len(piece.tokens)]


def on_cpu(scores: LogprobsTensors) -> LogprobsTensors:
    """The same in host memory, ready to be read."""
    ids, values, ranks, *_ = scores
    return LogprobsTensors(ids.cpu(), values.cpu(), ranks.cpu())


def gather(guided: torch.Tensor, tokens: torch.Tensor, top: int) -> Sequence[torch.Tensor]:
    """As vLLM shows log-probabilities: token ids and values [n, 1 + top], and ranks [n] from 1.

    guided: [n, vocabulary], up to a constant for each row.
    tokens: [n] int64, the scored tokens. They come first.
    top: -1 for the whole vocabulary.
    """
    found = [
        _gather(guided[part], tokens[part], top)
        for part in pieces(len(tokens), guided.shape[-1], guided.device)
    ]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _gather(guided: torch.Tensor, tokens: torch.Tensor, top: int) -> Sequence[torch.Tensor]:
    log_probs = guided.float().log_softmax(-1)
    own = log_probs.gather(-1, tokens.unsqueeze(-1))
    values, ids = log_probs.topk(log_probs.shape[-1] if top == -1 else top)
    ranks = (log_probs >= own).sum(-1)
    return (
        torch.cat([tokens.unsqueeze(-1), ids], 1).to(torch.int32),
        torch.cat([own, values], 1),
        ranks.to(torch.int32),
    )
