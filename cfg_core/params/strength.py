"""Strength: how strongly a token is guided, from its own rows. One object as far as the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from cfg_core.params.rules import Rule


@dataclass(frozen=True, kw_only=True)
class Strength:
    """What makes the strength of a token a function of its own rows.

    All of it is defined on the rows before cuts, masks and penalties.

    max_kl: nats. A trust region: how far the guided distribution may be from the leader's,
        KL(guided || leader).
    min_entropy: nats. A token is guided only where the leader's entropy is at least this.
    rule: what computes the scale of each token of a pair. The limits come after it.
    """

    max_kl: float | None = None
    min_entropy: float | None = None
    rule: Rule | None = None

    @property
    def limits(self) -> bool:
        """Whether it makes the blend weaker."""
        return self.max_kl is not None or self.min_entropy is not None

    def to_plain(self) -> dict[str, Any]:
        """These values as JSON has them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "rule": self.rule and self.rule.to_entry()}

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> Strength:
        """The inverse of `to_plain`."""
        made = cls(**{**values, "rule": None})
        return replace(made, rule=values["rule"] and Rule.of_entry(values["rule"]))
