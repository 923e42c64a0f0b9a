"""Fixtures of the engine tests: models and oracles are made once a session, engines once a
module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.engines import of_these_tests
from tests.engine.oracle import MIN_MARGIN, Oracle
from tests.engine.tiny_models import build

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="package", autouse=True)
def environment() -> Iterator[None]:
    with of_these_tests():
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Name of an architecture -> folder of its random-weight model."""
    return functools.cache(lambda name: build(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def oracle_of(model_folder: ModelFolder) -> Callable[[str], Oracle]:
    """Name of an architecture -> the answers of Hugging Face transformers."""
    return functools.cache(lambda name: Oracle(model_folder(name)))


@pytest.fixture(scope="session")
def llama(oracle_of: Callable[[str], Oracle]) -> Oracle:
    oracle = oracle_of("llama")
    assert oracle.margin > MIN_MARGIN
    return oracle
