"""Texts whose log-probabilities under guidance are asked for: requests of formulas.py, continued.

The expected values are those of `cfg_core.reference.weighted_scores` in float32.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from cfg_core.reference import weighted_scores
from tests.engine.engines import plain
from tests.engine.formulas import FORMULAS, Request, error, request
from tests.engine.oracle import Oracle, random_ids

CHANGES = ("scales", "start", "end")
NAMES = [name for name, spec in FORMULAS.items() if not set(CHANGES) & spec.keys()]
LENGTHS = (1, 2, 5, 31, 32, 33, 48)
"""Scored tokens. A block has 32."""

REGION = 1e-3
"""By how much of a trust region two correct engines may differ, from rounding."""


@dataclass(frozen=True, eq=False)
class Scored:
    """A request of formulas.py, continued by a known text. `scored` makes each one once."""

    request: Request
    continuation: tuple[int, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt + self.continuation

    def asking(self, top: int = 0, **options: Any) -> Any:
        extra = {**self.request.extra_args, "guidance_score_tokens": len(self.continuation)}
        return plain(extra_args=extra, prompt_logprobs=top, **{"max_tokens": 2, **options})

    @functools.lru_cache(maxsize=2048)  # noqa: B019 - of one session
    def want(self, oracle: Oracle, limit: float = 1.0) -> list[torch.Tensor]:
        """The reference's rows. `limit` multiplies the trust region."""
        one = self.request
        formula = one.formula
        if formula.max_kl is not None:
            formula = replace(formula, max_kl=formula.max_kl * limit)
        return weighted_scores(oracle.model, one.prompt, one.followers, self.continuation, formula)

    def allowed(self, oracle: Oracle) -> list[torch.Tensor]:
        """How far each log-probability may be from `want`: rows of [vocabulary].

        A trust region adds what a slightly wider or narrower one changes. It may be much where the
        strength hardly changes the divergence.
        """
        least = max(1e-4, 2 * error(self.request.formula))
        if self.request.formula.max_kl is None:
            return [torch.full_like(row, least) for row in self.want(oracle)]
        wider, narrower = (self.want(oracle, 1 + s * REGION) for s in (1, -1))
        return [
            least + (one - other).abs().nan_to_num(0)
            for one, other in zip(wider, narrower, strict=True)
        ]


@functools.cache
def scored(name: str, seed: int) -> Scored:
    rng = random.Random(f"scored {name} {seed}")
    return Scored(request(name, seed), random_ids(rng, rng.choice(LENGTHS)))


def values(one: Scored, prompt_logprobs: list[Any]) -> list[float]:
    """The log-probabilities of the scored tokens, in an output of vLLM."""
    entries = prompt_logprobs[len(one.request.prompt) :]
    return [row[t].logprob for t, row in zip(one.continuation, entries, strict=True)]


def is_right(one: Scored, oracle: Oracle, found: list[float]) -> bool:
    """Whether these are the reference's values. A token that is cut is far below, not infinite."""
    rows = zip(one.continuation, one.want(oracle), one.allowed(oracle), found, strict=True)
    return all(
        value < -100 if row[token] == -torch.inf else abs(value - row[token]) < allowed[token]
        for token, row, allowed, value in rows
    )
