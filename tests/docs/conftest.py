"""Snippets of all pages run on configs/cfg.yaml, which they are about."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def chat_url(chat_server: Any) -> str:
    """The address of the server."""
    url: str = chat_server.url
    return url
