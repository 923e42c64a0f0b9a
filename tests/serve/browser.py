"""A real Chromium for tests of the pages. It reaches the server under test and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import chromium as scripts
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route

WAIT_MS = 60_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium; skips the test if there is none."""
    try:
        with scripts.chromium() as browser:
            yield browser
    except scripts.NoBrowserError as error:
        pytest.skip(str(error))


@contextmanager
def page_of(
    browser: Browser,
    url: str,
    size: tuple[int, int] = (1280, 900),
    dark: bool = False,
    expected: str | None = None,
) -> Iterator[Page]:
    """Open `url` in a window of its own, in which every other host is cut off.

    At the end, nothing may have been asked of another host, and the page may have told no error.

    expected: a part of messages that the browser may write to its console, such as a status.
    """
    host = urlsplit(url).netloc
    strangers: list[str] = []
    errors: list[str] = []

    def only_the_server(route: Route) -> None:
        if urlsplit(route.request.url).netloc == host:
            route.continue_()
        else:
            strangers.append(route.request.url)
            route.abort()

    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light"
    )
    try:
        context.set_default_timeout(WAIT_MS)
        context.route("**/*", only_the_server)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.goto(url)
        page.locator("#model option, #key[aria-invalid]").first.wait_for(state="attached")
        yield page
        assert not strangers, strangers
        unexpected = [error for error in errors if expected is None or expected not in error]
        assert not unexpected, unexpected
    finally:
        context.close()


def findings(page: Page) -> list[Any]:
    """What axe finds wrong with the page as it is shown: rule, impact and elements."""
    told = Axe().run(page).response["violations"]
    return [(v["id"], v["impact"], [node["html"][:200] for node in v["nodes"]]) for v in told]
