"""vLLM's settings, for this folder's tests only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def environment() -> Iterator[None]:
    """One thread is used, because the model is too small for more."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine ends with this process
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        yield
    torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it by a no-op
    set_num_threads(num_threads)
