"""Gates that are probed whatever steps take, for tests that count probes."""

from __future__ import annotations

from cfg_core.policy.token_cost import TokenCost


class FixedCost(TokenCost):
    """The cost of one more token, in steps, in place of what is measured.

    With 1, probes pay where a gate is not nearly always open.
    """

    def __init__(self, cost: float = 1.0) -> None:
        super().__init__()
        self.cost = cost

    @property
    def of_a_token(self) -> float:
        return self.cost
