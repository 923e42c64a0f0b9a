"""benchmarks/serving: the engine that costs nothing can be called as the one it stands for."""

from __future__ import annotations

import inspect
import re

import pytest

from benchmarks.serving.free_engine import FreeServer
from deployments.generator import replica
from deployments.generator.vllm_server import VllmServer

NOT_NEEDED = {"small", "failed"}
"""What only other requests than those of the ceilings need."""


@pytest.mark.parametrize(
    "name",
    sorted({*re.findall(r"self\._server\.(\w+)", inspect.getsource(replica))} - NOT_NEEDED),
)
def test_it_has_what_a_replica_asks_for(name: str) -> None:
    assert hasattr(FreeServer, name)
    real, free = getattr(VllmServer, name, None), getattr(FreeServer, name)
    if inspect.isfunction(real):
        inspect.signature(free).bind(*inspect.signature(real).parameters)
