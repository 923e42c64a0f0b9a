"""The oracle of tests that compare texts of configs/stories.yaml."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from cfg_core.reference import CausalLM
from tools.serving.process import REPOSITORY


@pytest.fixture(scope="module")
def oracle() -> Iterator[CausalLM]:
    """models/stories in transformers, in float32, on one thread: a server uses the other cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = REPOSITORY / "models" / "stories"
    yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.set_num_threads(threads)
