"""What is measured in an engine of this process: steps, and first tokens."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from ..engine.bench import SCALE, Bench
from ..llm import guidance
from ..turns import take_turns

MORE = 16
"""Tokens after the first."""


class RealSize(Bench):
    """An engine that takes prompts of real length."""

    def __init__(self, model: Path, batches: Sequence[int], longest: int) -> None:
        options = {"model": "real-size", "dtype": "float32", "batches": batches}
        lengths = {"prompt": 16, "negatives": [max(16, longest)], "tokens": 24}
        super().__init__(argparse.Namespace(**options, **lengths), model)

    def decoding(self, batches: Sequence[int], turns: int) -> Iterator[dict[str, Any]]:
        """One row for each number of groups: ms of a step."""
        for batch in batches:
            loads = {"plain(B)": (batch, 0), "guided(B)": (batch, 16), "plain(2B)": (2 * batch, 0)}
            ways = {name: partial(self.step_ms, *load) for name, load in loads.items()}
            took = take_turns(ways, turns)
            parity = took.median("plain(2B)") / took.median("guided(B)")
            yield {"batch": batch, "ms": took.medians(), "parity": parity}

    def step_ms(self, requests: int, negative: int) -> float:
        fields = [
            guidance(SCALE, self.ids(negative)) if negative else None for _ in range(requests)
        ]
        wall, _ = self.steps([self.sampling_params(one) for one in fields])
        return 1000 * statistics.median(wall)

    def first_tokens(self, lengths: Sequence[int], turns: int) -> Iterator[dict[str, Any]]:
        """One row for each length of prompt and negative: ms to the first token, and for more."""
        for length in lengths:
            prompt, negative = self.ids(length), self.ids(length)
            yield {"tokens": length, **compared(self.answer_ms, prompt, negative, turns)}

    def answer_ms(self, prompt: list[int], negative: list[int] | None, tokens: int) -> float:
        """Ms of `LLM.generate`. None: a plain request."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            extra_args=guidance(SCALE, negative) if negative else None,
        )
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return 1000 * (time.perf_counter() - start)

    def close(self) -> None:
        """Free the engine, so that another can start in this process."""
        self.engine.engine_core.shutdown()


Answer = Callable[[list[int], list[int] | None, int], float]
"""(prompt, negative or None, tokens) -> ms."""


def compared(
    answer_ms: Answer, prompt: list[int], negative: list[int], turns: int
) -> dict[str, float]:
    """First tokens and the time of MORE tokens more, plain and guided, with both prompts cached."""
    ms = take_turns(
        {
            "plain": lambda: answer_ms(prompt, None, 1),
            "guided": lambda: answer_ms(prompt, negative, 1),
            "plain, all": lambda: answer_ms(prompt, None, 1 + MORE),
            "guided, all": lambda: answer_ms(prompt, negative, 1 + MORE),
        },
        turns,
    ).medians()
    more = {kind: ms[f"{kind}, all"] - ms[kind] for kind in ("plain", "guided")}
    return {
        "plain_ms": ms["plain"],
        "guided_ms": ms["guided"],
        "guided_over_plain": ms["guided"] / ms["plain"],
        "more_plain_ms": more["plain"],
        "more_guided_ms": more["guided"],
        "more_over_plain": more["guided"] / more["plain"],
    }
