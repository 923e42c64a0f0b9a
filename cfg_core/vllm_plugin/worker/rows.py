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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cfg_core.blend import divergence
from cfg_core.vllm_plugin.worker.head import Merged
from cfg_core.vllm_plugin.worker.logit_blends import LogitBlend, blend_logits, pieces

LEAST_LOGIT = -1e30
"""Smaller logits are raised to this in `sum_for_leaders`, so that no weight makes infinity."""


class Rows(NamedTuple):
    """Index tensors of the joint groups of one step, on the logits' device.

    A group with fewer streams than others repeats its first follower, with the weight 0. A suffix
    is a stream here (suffixes.py), which has a row of logits, and no place in the batch.

    of_logits: [streams, rows] int64, the streams' rows of logits. Each stream has one row more than
        drafts.
    leader_place: [batch] int64, for each place in the batch that of its leader. A request that is
        no follower has its own.
    weight: [batch] float32, the weight of each place in its leader's blend.
    leading: the places in the batch that are no followers', in order.
    leading_index: [k] int64, the same as a tensor.
    leader_of: [batch] int64, for each place where `leading` has it. A follower has its leader's.
    merged: the rows that are blended before the head; None if there are none.
    logit_blends: the rows that are blended after it.
    logprob_rows: the rows of the groups that want their streams' log-probabilities; None if there
        are none.
    draft_blends: groups with cuts, limits or a rule, as a drafter with one row for each place
        blends them: `of_logits` of these are places.
    """

    of_logits: torch.Tensor
    leader_place: torch.Tensor
    weight: torch.Tensor
    leading: list[int]
    leading_index: torch.Tensor
    leader_of: torch.Tensor
    merged: Merged | None = None
    logit_blends: tuple[LogitBlend, ...] = ()
    logprob_rows: LogprobRows | None = None
    counts: Sequence[int] = ()
    draft_blends: tuple[LogitBlend, ...] = ()

    def copy_to_followers(self, per_stream: torch.Tensor) -> None:
        """Give each follower's row of `per_stream` [batch, ...] its leader's value."""
        per_stream[: len(self.leader_place)] = per_stream[self.leader_place]

    def sum_for_leaders(self, logits: torch.Tensor) -> torch.Tensor:
        """Blend one row of logits for each place: [batch, ..., vocabulary].

        A leader's row becomes the weighted sum of its group's. This equals the blend up to a
        constant. Followers' rows are 0, and the others stay what they are.
        """
        return sum_for_leaders(logits, self.leader_place, self.weight)

    def blend_drafts(self, own: torch.Tensor, blended: torch.Tensor) -> torch.Tensor:
        """Draft logits in which groups with cuts, limits or a rule are blended with these, too.

        own: [batch, vocabulary], of each place. blended: what `sum_for_leaders` made of it.
        """
        if not self.draft_blends:
            return blended
        out = blended.float()
        for group in self.draft_blends:
            blend_logits(own, group, out)
        return out.to(blended.dtype)


def sum_for_leaders(
    logits: torch.Tensor, leader_place: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """As `Rows.sum_for_leaders`, with the tensors given."""
    weight = weight.view(-1, *[1] * (logits.dim() - 1))
    weighted = logits.float().clamp(min=LEAST_LOGIT) * weight
    return torch.zeros_like(weighted).index_add_(0, leader_place, weighted).to(logits.dtype)


def blended(
    logits: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, StreamLogits | None, torch.Tensor | None]:
    """Blend the rows in `rows.logit_blends`.

    Returns `logits` [rows, vocabulary], each leader's row replaced by its group's blend; the
    StreamLogits of the groups that want their streams' log-probabilities; and the strengths of all
    rows, or None if no group has limits or a rule: [2, rows] float32, how much of the push limits
    have left, and what is shown (see `StreamLogits`).

    If there are such rows, the logits are float32, which keeps the blend from being rounded back to
    bfloat16. If `logits` are float32 already, they are changed in place.
    """
    asked = None if rows.logprob_rows is None else rows.of_logits[:, rows.logprob_rows.columns]
    streams = None if asked is None else logits[asked].float()
    out = logits.float() if rows.logit_blends else logits
    strengths = None
    if any(group.limits is not None or group.rules for group in rows.logit_blends):
        strengths = torch.ones(2, len(logits), device=logits.device)
    for group in rows.logit_blends:
        blend_logits(logits, group, out, strengths)
    if asked is None or streams is None:
        return out, None, strengths
    parts = [
        divergence(out[asked[0, part]], streams[0, part])
        for part in pieces(asked.shape[1], out.shape[-1], out.device)
    ]
    shown = torch.cat(parts)
    strength = torch.ones_like(shown) if strengths is None else strengths[1, asked[0]]
    return out, StreamLogits(streams, shown, strength), strengths


class LogprobRows(NamedTuple):
    """The n tokens whose groups ask for log-probabilities: where they are. Tensors are [n] int64.

    columns: columns of `Rows.of_logits`.
    places: places in the batch.
    offsets: positions among the tokens of their request.
    top: how many most likely tokens of each stream are shown.
    """

    columns: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor
    top: int


class StreamLogits(NamedTuple):
    """What `widen` shows of the n rows whose groups ask.

    streams: [streams, n, vocabulary] float32, the streams' logits before the blend.
    divergence: [n] float32, of the guided distribution from the leader's, in nats.
    strength: [n] float32, how much of the blend's push each row got, 1 without limits. With a rule,
        the scale that was used: 1 + t * (scale - 1), if limits have left t of the push.
    """

    streams: torch.Tensor
    divergence: torch.Tensor
    strength: torch.Tensor


def widen(
    tensors: Any, stream_logits: StreamLogits, tokens: torch.Tensor, rows: torch.Tensor, top: int
) -> Any:
    """Add columns to vLLM's LogprobsTensors (`cfg_core.vllm_plugin.wire.StreamColumns`).

    tokens: [n], the tokens whose log-probabilities are added.
    rows: [n], the rows of vLLM's tensors that get them. The other rows get 0.
    top: how many most likely tokens of each stream are added.
    """
    tokens = tokens.long().clamp(min=0)  # rejected tokens are -1
    found = [
        _shown(stream_logits.streams[:, part], tokens[part], top)
        for part in pieces(
            len(tokens), stream_logits.streams[:, :1].numel(), stream_logits.streams.device
        )
    ]
    shown, values = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    of_blend = torch.stack([stream_logits.divergence, stream_logits.strength], 1)
    ids = torch.cat([tokens.unsqueeze(1).expand(-1, 2), shown.transpose(0, 1).flatten(1)], 1)
    added = torch.cat([of_blend, values.transpose(0, 1).flatten(1)], 1)
    return tensors._replace(
        logprob_token_ids=_joined(tensors.logprob_token_ids, ids, rows),
        logprobs=_joined(tensors.logprobs, added, rows),
    )


def _shown(
    streams: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [n] and each stream's most likely ones, and their log-probabilities there.

    streams: [streams, n, vocabulary] float32, logits. Both results are [streams, n, 1 + top].
    """
    shown = tokens.expand(len(streams), -1).unsqueeze(-1)
    if top:
        shown = torch.cat([shown, streams.topk(top).indices], -1)
    return shown, streams.gather(-1, shown) - streams.logsumexp(-1, keepdim=True)


def _joined(own: torch.Tensor, added: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`own` with columns that hold `added` in `rows`, and 0 elsewhere."""
    columns = own.new_zeros(own.shape[0], added.shape[1])
    columns[rows] = added.to(own.dtype)
    return torch.cat([own, columns], 1)
