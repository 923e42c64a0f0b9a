"""Cuts: which tokens a group may sample. One object from the request to the workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Which tokens a group may sample, by the most likely ones of a distribution.

    They are defined on the rows before masks and penalties. A token that is as likely as the k-th
    counts among the k.

    top_k, min_p: only the leader's k most likely tokens, or those with at least this share of its
        most likely one's probability (the plausibility constraint of VCD, arXiv 2311.16922).
    filter_top_k: the leader's own distribution is sampled, among the k tokens that the blend finds
        most likely (as in Dia).
    """

    top_k: int | None = None
    min_p: float | None = None
    filter_top_k: int | None = None
