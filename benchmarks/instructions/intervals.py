"""Bootstrap intervals over prompts.

The samples of a prompt belong together, so a prompt's values are averaged first, and prompts are
drawn. Every call draws the same prompts, because the seed is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
SEED = 2023
COVERAGE = 0.95


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The percentile interval of the mean of `values` (one for each prompt), at 95%."""
    array = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(SEED).integers(len(array), size=(RESAMPLES, len(array)))
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(array[drawn].mean(axis=1), [tail, 1 - tail])
    return float(low), float(high)


def paired_difference(
    values: Sequence[float], reference: Sequence[float]
) -> tuple[float, tuple[float, float]]:
    """The mean of `values - reference` and its interval. Both are in the same order of prompts."""
    differences = [a - b for a, b in zip(values, reference, strict=True)]
    return sum(differences) / len(differences), bootstrap(differences)
