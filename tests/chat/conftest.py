"""One server for this folder: the shipped configs/cfg.yaml. Pages and examples are about it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.serve.browser import chromium, page_of
from tools.serving.process import ServeProcess, shipped_config


@pytest.fixture(scope="package")
def chat_server(chat_model: Path) -> Iterator[ServeProcess]:
    with ServeProcess(shipped_config("cfg"), stock=True) as process:
        yield process


@pytest.fixture(scope="package")
def url(request: pytest.FixtureRequest) -> str:
    """The address of the server of pages and examples: CFG_SERVE_URL, if that is set."""
    given = os.environ.get("CFG_SERVE_URL")
    url: str = given or request.getfixturevalue("chat_server").url
    return url


@pytest.fixture(scope="package")
def browser(chat_server: ServeProcess) -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, chat_server: ServeProcess) -> Iterator[Page]:
    """The playground's page for text, as `/` leads to it."""
    with page_of(browser, chat_server.url) as page:
        yield page
