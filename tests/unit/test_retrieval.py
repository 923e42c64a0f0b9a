"""benchmarks/retrieval.py: the set of docstrings, and the measures of retrieval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from retrieval import docstring_pairs, quality


def test_docstrings():
    pairs = docstring_pairs(500)
    assert len(pairs) == 500
    assert pairs == docstring_pairs(500)
    queries, documents = zip(*pairs, strict=True)
    assert len(set(queries)) == len(set(documents)) == 500
    assert not any(query in document for query, document in pairs)


def test_quality():
    """20 documents. Query 0 finds its own third, and query 1 finds its own twelfth."""
    documents = np.eye(20)
    queries = np.eye(20)
    queries[0, :3] = 1, 3, 2
    queries[1, :12] = [12, 1, *range(2, 12)]
    found = quality(5 * queries, documents)
    assert found["recall@1"] == 18 / 20
    assert found["recall@10"] == 19 / 20
    assert found["nDCG@10"] == pytest.approx((18 + 1 / math.log2(4)) / 20)
