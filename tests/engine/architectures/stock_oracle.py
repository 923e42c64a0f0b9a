"""Stock vLLM as the oracle: is each token of a guided text the one that guidance chooses?

For each token, the engine without the plugin gives the log-probabilities of the whole vocabulary
after both streams as they were then. They are blended here in float32, with cfg_core/reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from oracle import MIN_MARGIN, Case, rounding
from torch import Tensor

from cfg_core.reference import guide

Stream = tuple[int, ...]

BFLOAT16_ROUNDING = 0.1
"""As `oracle.rounding` for one stream in bfloat16: logits up to 16 have steps of 1/16."""


@dataclass(frozen=True)
class Verdict:
    """What was found about texts.

    tokens: how many were looked at.
    inexact: how many were not the most likely one, but within the bound of it.
    wrong: one line for each text with a token outside of the bound.
    worst: the largest distance from the most likely token.
    """

    tokens: int
    inexact: int
    wrong: list[str]
    worst: float


def bound(scale: float, dtype: str) -> float:
    """How far below the most likely token a token may be."""
    if dtype == "float32":
        return MIN_MARGIN * rounding(scale)
    return BFLOAT16_ROUNDING * (abs(scale) + abs(1 - scale))


def verify(
    engine: Any, cases: Sequence[Case], texts: Sequence[Sequence[int]], dtype: str
) -> Verdict:
    """Look at each token of the texts, which belong to the cases."""
    both = [(case.prompt, case.negative) for case in cases]
    streams = [
        (*start, *text[:k])
        for starts, text in zip(both, texts, strict=True)
        for start in starts
        for k in range(len(text))
    ]
    rows = log_probs(engine, list(dict.fromkeys(streams)))
    wrong, inexact, worst, tokens = [], 0, 0.0, 0
    for i, (case, text) in enumerate(zip(cases, texts, strict=True)):
        for k, token in enumerate(text):
            own, negative = (rows[*start, *text[:k]] for start in (case.prompt, case.negative))
            scores = guide(own, negative, case.scale)
            gap = float(scores.max() - scores[token])
            tokens, inexact, worst = tokens + 1, inexact + (gap > 0), max(worst, gap)
            if not gap <= bound(case.scale, dtype):  # NaN is wrong, too
                wrong.append(f"text {i} (scale {case.scale}), token {k}: {gap:.4f} from the best")
                break
    return Verdict(tokens, inexact, wrong, worst)


def log_probs(engine: Any, streams: Sequence[Stream]) -> dict[Stream, Tensor]:
    """The log-probabilities [V] of the token after each stream."""
    from engines import plain

    outputs = engine.generate(streams, [plain(max_tokens=1, logprobs=-1)] * len(streams))
    return {
        stream: row_of(output.outputs[0].logprobs[0])
        for stream, output in zip(streams, outputs, strict=True)
    }


def row_of(found: dict[int, Any]) -> Tensor:
    row = torch.empty(len(found))
    row[list(found)] = torch.tensor([one.logprob for one in found.values()])
    return row
