"""What this machine can do with its GPU, or with the threads that torch has, measured: how fast it
reads memory, and how fast it multiplies matrices.

From these two rates follows about how long a decode step must take at least.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

READ_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
"""More than the caches hold."""
MATRIX = {"cpu": 1024, "cuda": 8192}
ROWS = {"cpu": 256, "cuda": 8192}


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
    """The rates of the first GPU if there is one, else with as many threads as torch has now."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_bytes, width, num_rows = READ_BYTES[device], MATRIX[device], ROWS[device]
    numbers = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    rows = torch.randn(num_rows, width, device=device).to(dtype)
    matrix = torch.randn(width, width, device=device).to(dtype)
    product = lambda: torch.nn.functional.linear(rows, matrix)  # noqa: E731
    return Rates(
        bytes_s=num_bytes / _fastest_s(numbers.sum),
        flop_s=2 * num_rows * width * width / _fastest_s(product),
    )


def _fastest_s(work: Callable[[], object], times: int = 20) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)
