"""The score of late interaction: how well a document's vectors answer each vector of a query."""

from __future__ import annotations

from typing import Literal, TypeAlias

from cfg_core.prefill_only.types import FloatArray

MaxSim: TypeAlias = Literal["sum", "mean"]
"""Whether the largest products are summed (ColBERT), or averaged (bge-m3)."""


def max_sim(query: FloatArray, document: FloatArray, how: MaxSim) -> float:
    """For each vector of the query [q, n], its largest product with one of the document [d, n].

    Without a vector on either side the score is 0.
    """
    if not len(query) or not len(document):
        return 0.0
    largest = (query @ document.T).max(1)
    return float(largest.sum() if how == "sum" else largest.mean())
