"""Which rows of a long table CI plays. `make survey` plays the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest


def chosen(
    rows: Sequence[Any], in_ci: Collection[str], name: Callable[[Any], str] = str
) -> list[Any]:
    """`rows` as parameters of a test. All are marked `survey` but those whose names are `in_ci`."""
    assert {name(row) for row in rows} >= set(in_ci)
    return [
        pytest.param(row, id=name(row), marks=() if name(row) in in_ci else pytest.mark.survey)
        for row in rows
    ]
