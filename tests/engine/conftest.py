"""Fixtures of the engine tests: models and oracles are made once a session, engines once a
module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engines import ENVIRONMENT, forget_settings
from oracle import MIN_MARGIN, Oracle
from tiny_models import build

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="package", autouse=True)
def environment() -> Iterator[None]:
    """vLLM's settings, for this folder's tests only.

    One thread is used, because the models are too small for more.
    """
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
    forget_settings()
    torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it by a no-op
    set_num_threads(num_threads)


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
