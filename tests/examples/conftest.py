"""Examples run on configs/cfg.yaml, which they are about."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest) -> str:
    """The address of a server. If CFG_SERVE_URL is set, it is that one."""
    given = os.environ.get("CFG_SERVE_URL")
    url: str = given or request.getfixturevalue("chat_server").url
    return url
