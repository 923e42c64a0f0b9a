"""Whether sampled texts have the guided distribution.

The place of a token is the probability of the possible tokens that are sorted before it, plus a
random part of its own. The places of all tokens are independent and uniform in [0, 1) if and only
if the sampler is lossless (Rosenblatt, 1952). With tokens first that a drafter proposes, a sampler
that keeps too many drafts moves the places towards 0.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cfg_core.reference import guide
from tests.engine.oracle import Case

TEMPERATURE = 0.9
FALSE_ALARM = 1e-4
"""The probability that the Kolmogorov-Smirnov test rejects a lossless sampler.

The seeds are fixed, so it always does or never does.
"""


def lenient(monkeypatch: pytest.MonkeyPatch, factor: float = 0.5) -> None:
    """Plant a fault in vLLM's acceptance rule: a draft is kept if `factor * u`, not u, is below
    p / q."""
    from vllm.v1.sample import rejection_sampler

    draw = rejection_sampler.generate_uniform_probs
    monkeypatch.setattr(
        rejection_sampler, "generate_uniform_probs", lambda *args: factor * draw(*args)
    )


@torch.inference_mode()
def guided_probs(model: Any, case: Case, text: list[int]) -> torch.Tensor:
    """[tokens, vocabulary]: the exact distribution of each token, given `text` before it."""
    rows = []
    for start in (case.prompt, case.negative):
        logits = model(torch.tensor([[*start, *text[:-1]]])).logits[0, len(start) - 1 :]
        rows.append(torch.log_softmax(logits.double(), -1))
    return (guide(*rows, case.scale) / TEMPERATURE).softmax(-1)


def places(
    probs: torch.Tensor, order: torch.Tensor, text: list[int], generator: torch.Generator
) -> torch.Tensor:
    """The places of the tokens of `text`: [tokens] float64 in [0, 1).

    probs, order: [tokens, vocabulary]. Tokens with a larger number in `order` are sorted first.
    """
    said = torch.tensor(text).unsqueeze(-1)
    below = (probs * (order > order.gather(-1, said))).sum(-1)
    own = probs.gather(-1, said).squeeze(-1)
    return below + own * torch.rand(len(text), generator=generator, dtype=torch.float64)


def uniform_p_value(places: torch.Tensor) -> float:
    """The p-value of the Kolmogorov-Smirnov test, asymptotic (n is large)."""
    n, ordered = len(places), places.sort().values
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max().item()
    return min(
        1.0,
        2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * n * distance**2) for k in range(1, 101)),
    )
