"""How well vectors find texts: the summaries of docstrings against their bodies.

The standard library of Python has thousands of docstrings with a summary, an empty line, and a
body. A summary is the query, and its own body is the one right document. So the set needs no
download, and another Python gives nearly the same one.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

TOP = 10
FEWEST_WORDS, MOST_CHARS = 12, 350
"""Of a body: shorter ones say nothing, and longer ones are cut. No engine then has to truncate."""


def docstring_pairs(num: int, seed: int = 0) -> list[tuple[str, str]]:
    """That many pairs of a query and its document, all of them different."""
    found = list(_all_pairs())
    random.Random(seed).shuffle(found)
    return found[:num]


@cache
def _all_pairs() -> tuple[tuple[str, str], ...]:
    """Sorted. To read the library takes half a minute."""
    library = Path(sysconfig.get_paths()["stdlib"])
    pairs: dict[str, str] = {}
    bodies: set[str] = set()
    for path in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        if path.parent.name in ("site-packages", "test", "idlelib", "lib2to3"):
            continue
        for summary, body in _docstrings(path):
            if body not in bodies:
                pairs.setdefault(summary, body)
                bodies.add(body)
    return tuple(sorted(pairs.items()))


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            summary, _, body = (ast.get_docstring(node) or "").partition("\n\n")
            summary, body = " ".join(summary.split()), " ".join(body.split())[:MOST_CHARS]
            long_enough = len(summary.split()) >= 4 and len(body.split()) >= FEWEST_WORDS
            if long_enough and summary not in body:
                yield summary, body


def quality(queries: np.ndarray, documents: np.ndarray) -> dict[str, float]:
    """Shares of 1, for row i of `documents` being the only right one for row i of `queries`.

    recall@1, recall@10: how often it is the first, and among the first ten.
    nDCG@10: 1 / log2(1 + rank) of the right document, 0 beyond the tenth.
    """
    assert np.isfinite(queries).all()
    assert np.isfinite(documents).all()
    cosines = _normalised(queries) @ _normalised(documents).T
    ranks = 1 + (cosines > cosines.diagonal()[:, None]).sum(1)
    gains = np.where(ranks <= TOP, 1 / np.log2(1 + ranks), 0.0)
    return {
        "recall@1": float((ranks == 1).mean()),
        f"recall@{TOP}": float((ranks <= TOP).mean()),
        f"nDCG@{TOP}": float(gains.mean()),
    }


def _normalised(vectors: np.ndarray) -> np.ndarray:
    rows: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return rows
