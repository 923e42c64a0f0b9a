"""What bench_real_size.py measures in an engine of this process: steps, and first tokens."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from bench_decode import SCALE, Bench

MORE = 16
"""Tokens after the first."""
POSITIONS = 131_072


def medians(ways: Mapping[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """The median of each way over the turns, in which all take turns in changing order.

    The first turn warms up, and fills the caches.
    """
    names, found = list(ways), []
    for turn in range(turns + 1):
        order = names if turn % 2 else names[::-1]
        found.append({name: ways[name]() for name in order})
    return {name: statistics.median(row[name] for row in found[1:]) for name in names}


class RealSize(Bench):
    """An engine of bench_decode.py that takes prompts of real length."""

    def __init__(self, model: Path, batches: Sequence[int], longest: int) -> None:
        options = {"model": "real-size", "dtype": "float32", "batches": batches}
        lengths = {"prompt": 16, "negatives": [max(16, longest)], "tokens": 24}
        super().__init__(argparse.Namespace(**options, **lengths), model)

    def decoding(self, batches: Sequence[int], turns: int) -> Iterator[dict[str, Any]]:
        """One row for each number of groups: ms of a step."""
        for batch in batches:
            loads = {"plain(B)": (batch, 0), "guided(B)": (batch, 16), "plain(2B)": (2 * batch, 0)}
            ways = {name: partial(self.step_ms, *load) for name, load in loads.items()}
            ms = medians(ways, turns)
            yield {"batch": batch, "ms": ms, "parity": ms["plain(2B)"] / ms["guided(B)"]}

    def step_ms(self, requests: int, negative: int) -> float:
        return 1000 * self.step_s(requests, negative)[0]

    def first_tokens(self, lengths: Sequence[int], turns: int) -> Iterator[dict[str, Any]]:
        """One row for each length of prompt and negative: ms to the first token, and for more."""
        for length in lengths:
            prompt, negative = self._ids(length), self._ids(length)
            yield {"tokens": length, **compared(self.answer_ms, prompt, negative, turns)}

    def answer_ms(self, prompt: list[int], negative: list[int] | None, tokens: int) -> float:
        """Ms of `LLM.generate`. None: a plain request."""
        from vllm import SamplingParams

        fields = {"guidance_scale": SCALE, "negative_prompt_token_ids": negative}
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            extra_args=fields if negative else None,
        )
        start = time.perf_counter()
        self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return 1000 * (time.perf_counter() - start)


Answer = Callable[[list[int], list[int] | None, int], float]
"""(prompt, negative or None, tokens) -> ms."""


def compared(
    answer_ms: Answer, prompt: list[int], negative: list[int], turns: int
) -> dict[str, float]:
    """First tokens and the time of MORE tokens more, plain and guided, with both prompts cached."""
    ms = medians(
        {
            "plain": lambda: answer_ms(prompt, None, 1),
            "guided": lambda: answer_ms(prompt, negative, 1),
            "plain, all": lambda: answer_ms(prompt, None, 1 + MORE),
            "guided, all": lambda: answer_ms(prompt, negative, 1 + MORE),
        },
        turns,
    )
    more = {kind: ms[f"{kind}, all"] - ms[kind] for kind in ("plain", "guided")}
    return {
        "plain_ms": ms["plain"],
        "guided_ms": ms["guided"],
        "guided_over_plain": ms["guided"] / ms["plain"],
        "more_plain_ms": more["plain"],
        "more_guided_ms": more["guided"],
        "more_over_plain": more["guided"] / more["plain"],
    }


def close(bench: RealSize) -> None:
    """Free the engine, so that another can start in this process."""
    bench._engine.engine_core.shutdown()
