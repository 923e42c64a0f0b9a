"""The server of the folders stories and waits, and clients of it.

It is the shipped configs/stories.yaml on a free port. If CFG_SERVE_URL is set, the tests use the
server at that URL instead. Each folder's conftest.py imports these fixtures, so it has a server of
its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import openai
import pytest

from tools.serving.process import ServeProcess, shipped_config


@pytest.fixture(scope="package")
def server() -> Iterator[ServeProcess | SimpleNamespace]:
    if url := os.environ.get("CFG_SERVE_URL"):
        yield SimpleNamespace(url=url)
        return
    with ServeProcess(shipped_config()) as process:
        yield process


@pytest.fixture(scope="package")
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    """Return an unmodified openai client."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="package")
def http(server: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="package")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id
