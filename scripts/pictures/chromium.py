"""The Chromium of this machine, without a window, for pictures and tests of the pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGS = (  # no sandbox, because CI runs as root; the others keep Chromium itself off the network
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class NoBrowserError(Exception):
    """This machine has no Chromium."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium: the one that CHROMIUM names, or one on the PATH, or Playwright's own.

    Raises NoBrowserError.
    """
    with sync_playwright() as playwright:
        named = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
        path = named or playwright.chromium.executable_path
        if not Path(path).exists():
            raise NoBrowserError("needs Chromium: install it (on Debian: apt-get install chromium)")
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGS))
        try:
            yield browser
        finally:
            browser.close()
