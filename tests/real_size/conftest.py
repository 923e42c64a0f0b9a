"""Models of real size: vocabularies of 151,936 and 262,144 tokens, and 131,072 positions.

What all tests of this folder share:

- `model_path`, `largest_model_path`: the folders of the models (models/real_size.py).
- `engine`: an `Engine` (tests/engine/engines.py) of the smaller one in this process, for one file.
- `server`: a ServeProcess of configs/cfg.yaml as `make serve` starts it, but with that model, and
  `http`, a client of it. The model's name there is at_real_size.MODEL. One for the folder.
- `reference`: the model in transformers, as cfg_core/reference.py takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from models.real_size import LARGEST_VOCABULARY, POSITIONS, real_size_model
from tests.engine.engines import Engine, of_these_tests
from tests.real_size.at_real_size import MODEL, Reference, started
from tools.serving.process import ServeProcess, config_with_model


@pytest.fixture(scope="package", autouse=True)
def environment() -> Iterator[None]:
    with of_these_tests(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # else the first logprobs compile C++
        yield


@pytest.fixture(scope="session")
def model_path() -> Path:
    return real_size_model()


@pytest.fixture(scope="session")
def largest_model_path() -> Path:
    return real_size_model(LARGEST_VOCABULARY)


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    with started(model_path) as engine:
        yield engine


@pytest.fixture(scope="package")
def server(model_path: Path) -> Iterator[ServeProcess]:
    config = config_with_model(model_path, MODEL, max_model_len=POSITIONS)
    with ServeProcess(config) as process:
        yield process


@pytest.fixture(scope="package")
def http(server: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as http:
        yield http


@pytest.fixture(scope="session")
def reference(model_path: Path) -> Reference:
    return Reference(model_path)
