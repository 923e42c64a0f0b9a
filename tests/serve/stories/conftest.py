"""Answers and pages of one server: see stories_fixtures.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.serve.browser import chromium, page_of
from tests.serve.stories_fixtures import client, http, model, server

__all__ = ["client", "http", "model", "server"]  # fixtures


@pytest.fixture(scope="package")
def browser(server: Any) -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server: Any) -> Iterator[Page]:
    """The playground's page for text, as `/` leads to it."""
    with page_of(browser, server.url) as page:
        yield page
