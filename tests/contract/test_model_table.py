"""The table of architectures covers vLLM's registry, and what was measured explains each row."""

from __future__ import annotations

from typing import Any

import pytest
import vllm
from vllm.model_executor.models.registry import _MULTIMODAL_MODELS, _TEXT_GENERATION_MODELS

from tools.architectures import results, table
from tools.architectures.rows import STOCK, Row

FOUND = results.load()
MEASURED = "0.32.0"
"""The vLLM whose registry the table covers."""


def test_the_table_covers_the_registry() -> None:
    """A new architecture without a row fails here."""
    names = [row.name for row in table.ARCHITECTURES]
    assert len(names) == len(set(names))
    text = {n for n, row in zip(names, table.ARCHITECTURES, strict=True) if not sees(row)}
    if vllm.__version__ == MEASURED:  # `make beside` runs this with others, which have more
        assert text == set(_TEXT_GENERATION_MODELS)
    assert set(names) - text <= set(_MULTIMODAL_MODELS)


def sees(row: Row) -> bool:
    return row.name in _MULTIMODAL_MODELS and row.name not in _TEXT_GENERATION_MODELS


@pytest.mark.parametrize("row", table.ROWS, ids=lambda row: row.label)
def test_each_row_is_equal_or_explained(row: Row) -> None:
    found: dict[str, Any] = FOUND[row.label]
    assert found["vllm"] == MEASURED
    if row.missing:
        assert found["outcome"] == "failed"
        assert found["error"]
    else:
        assert found["outcome"] == "equal", found
        assert found["problems"] == []
        assert found["oracle"] == row.oracle
        assert row.oracle != STOCK or row.note


def test_nothing_was_measured_that_has_no_row() -> None:
    assert list(FOUND) == [row.label for row in table.ROWS]


def test_at_least_seventy_are_equal() -> None:
    equal = [row for row in table.ARCHITECTURES if not row.missing]
    assert len(equal) >= 70
    for kind in ("dense", "moe", "mla", "sliding", "sinks", "recurrent", "hybrid"):
        assert any(kind in row.kinds for row in equal), kind
