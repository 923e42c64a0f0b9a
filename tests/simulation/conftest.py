"""What all files of the simulation share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, which stands for a model's."""
    return tmp_path_factory.mktemp("simulated-model")
