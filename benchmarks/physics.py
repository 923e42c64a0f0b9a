"""What this machine can do with the threads that torch has, measured: how fast it reads memory, and
how fast it multiplies matrices.

From these two rates follows about how long a decode step must take at least.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

READ_BYTES = 256 << 20
"""More than the caches of a processor hold."""
MATRIX = 1024
ROWS = 256


@dataclass(frozen=True)
class Rates:
    """bytes_s: bytes read per second. flop_s: floating-point operations per second, in matrix
    products of the type that was asked for."""

    bytes_s: float
    flop_s: float

    def step_s(self, weight_bytes: float, weights: float, streams: int) -> float:
        """Least seconds of a decode step, which reads all weights once and multiplies each of them
        with one number for each stream. Attention, sampling and everything on the host come on top.
        """
        return max(weight_bytes / self.bytes_s, 2 * weights * streams / self.flop_s)


def measure(dtype: torch.dtype) -> Rates:
    """The rates with as many threads as torch has now."""
    numbers = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    rows, matrix = torch.randn(ROWS, MATRIX).to(dtype), torch.randn(MATRIX, MATRIX).to(dtype)
    product = lambda: torch.nn.functional.linear(rows, matrix)  # noqa: E731
    return Rates(
        bytes_s=READ_BYTES / _fastest_s(numbers.sum),
        flop_s=2 * ROWS * MATRIX * MATRIX / _fastest_s(product),
    )


def _fastest_s(work: Callable[[], object], times: int = 20) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)
