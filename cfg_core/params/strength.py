"""Strength: what limits how strongly a token is guided. One object as far as the workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Strength:
    """Limits of the share of the blend that a token gets, from its own rows.

    They are defined on the rows before cuts, masks and penalties.

    max_kl: nats. A trust region: how far the guided distribution may be from the leader's,
        KL(guided || leader).
    min_entropy: nats. A token is guided only where the leader's entropy is at least this.
    """

    max_kl: float | None = None
    min_entropy: float | None = None
