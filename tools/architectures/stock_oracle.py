"""Stock vLLM as the oracle: is each token of a guided text the one that guidance chooses?

For each token, the engine without the plugin gives the log-probabilities of the whole vocabulary
after both streams as they were then. They are blended here in float32, with cfg_core/reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cfg_core.reference import guide
from tests.engine.oracle import MIN_MARGIN, Case, rounding

Stream = tuple[int, ...]

BFLOAT16_ROUNDING = 0.5
"""As `oracle.rounding` for one stream in bfloat16: logits above 16 have steps of 1/8."""


class Verdict(NamedTuple):
    """What was found about texts.

    tokens: how many were looked at.
    inexact: how many were not the most likely one, but within the bound of it.
    worst: the largest distance from the most likely token.
    wrong: one line for each text with a token outside of the bound.
    """

    tokens: int
    inexact: int
    worst: float
    wrong: list[str]


def bound(scale: float, dtype: str) -> float:
    """How far below the most likely token a token may be."""
    if dtype == "float32":
        return MIN_MARGIN * rounding(scale)
    return BFLOAT16_ROUNDING * (abs(scale) + abs(1 - scale))


def verify(engine: Any, texts: Sequence[tuple[Case, tuple[int, ...]]], dtype: str) -> Verdict:
    """Look at each token of the texts."""
    streams = [
        (*start, *text[:k])
        for case, text in texts
        for start in (case.prompt, case.negative)
        for k in range(len(text))
    ]
    rows = log_probs(engine, list(dict.fromkeys(streams)))
    gaps: list[float] = []
    wrong: list[str] = []
    for case, text in texts:
        found = [gap(rows, case, text, k) for k in range(len(text))]
        gaps += found
        # NaN is wrong, too
        far = [k for k, distance in enumerate(found) if not distance <= bound(case.scale, dtype)]
        if far:
            wrong.append(
                f"scale {case.scale}, {len(case.prompt)} and {len(case.negative)} tokens: token"
                f" {far[0]} is {found[far[0]]:.4f} below the best"
            )
    return Verdict(len(gaps), sum(g != 0 for g in gaps), max(gaps), wrong)


def gap(rows: dict[Stream, Tensor], case: Case, text: Stream, k: int) -> float:
    """How far token k is below the most likely one."""
    own, negative = (rows[*start, *text[:k]] for start in (case.prompt, case.negative))
    scores = guide(own, negative, case.scale)
    return float(scores.max() - scores[text[k]])


def log_probs(engine: Any, streams: Sequence[Stream]) -> dict[Stream, Tensor]:
    """The log-probabilities [V] of the token after each stream."""
    from tests.engine.engines import plain

    outputs = engine.generate(streams, [plain(max_tokens=1, logprobs=-1)] * len(streams))
    return {
        stream: row_of(output.outputs[0].logprobs[0])
        for stream, output in zip(streams, outputs, strict=True)
    }


def row_of(found: dict[int, Any]) -> Tensor:
    row = torch.empty(len(found))
    row[list(found)] = torch.tensor([one.logprob for one in found.values()])
    return row
