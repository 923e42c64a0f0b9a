"""Scores of documents, from the outputs for queries and documents.

Imports neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cfg_core.prefill_only.max_sim import MaxSim, max_sim
from cfg_core.prefill_only.types import Output


@dataclass(frozen=True)
class Compared:
    """How documents are compared with queries whose outputs come first.

    num_queries: one query for all documents, or one for each.
    max_sim: how vectors of tokens are compared; None: the score is the cosine of dense vectors.
    """

    num_queries: int
    max_sim: MaxSim | None = None

    @property
    def bytes_per_value(self) -> float:
        """Vectors of tokens are held until all are compared, so their number is bounded."""
        return 0.0 if self.max_sim is None else 1.0


def scores_of(compared: Compared | None, outputs: Sequence[Output]) -> list[float]:
    """A score for each document.

    compared: None for a cross-encoder, which computes one number for each pair.
    """
    if compared is None:
        return [float(np.asarray(output.values["classify"])[0]) for output in outputs]
    if compared.max_sim is not None:
        tokens = [output.array("token_embed") for output in outputs]
        queries, documents = tokens[: compared.num_queries], tokens[compared.num_queries :]
        partners = queries * len(documents) if len(queries) == 1 else queries
        pairs = zip(partners, documents, strict=True)
        return [max_sim(query, document, compared.max_sim) for query, document in pairs]
    # [q + d, width]
    vectors = np.stack([np.asarray(output.values["embed"], np.float64) for output in outputs])
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    dense, others = vectors[: compared.num_queries], vectors[compared.num_queries :]
    cosines: list[float] = (dense * others).sum(-1).tolist()
    return cosines
