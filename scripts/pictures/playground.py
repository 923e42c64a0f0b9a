"""Draw the pictures of docs/playground.md: the real playground of a running server.

    make serve                                   in another terminal
    python scripts/pictures/playground.py [URL]

They are docs/playground.png, its dark twin and playground.gif. The recording chooses an example,
generates, and walks over tokens with the arrow keys. It shows the page as it is; only the waiting
time between pictures is even.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

from chromium import chromium
from PIL import Image
from playwright.sync_api import Page

DOCS = Path(__file__).resolve().parents[2] / "docs"
SIZE = (1200, 900)
FRAME_MS, LAST_MS = 140, 3000
COLOURS = 128
LIMIT_S = 60


class Recorder:
    """Takes pictures of a page, and writes them as one moving picture."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._frames: list[tuple[Image.Image, int]] = []

    def shoot(self, ms: int = FRAME_MS) -> None:
        """Take a picture that is shown for `ms`; the same one again lengthens it."""
        image = Image.open(io.BytesIO(self._page.screenshot())).convert("RGB")
        if self._frames and self._frames[-1][0].tobytes() == image.tobytes():
            image, before = self._frames.pop()
            ms += before
        self._frames.append((image, ms))

    def until(self, done: Callable[[], bool]) -> None:
        """Take pictures until something is so."""
        end = time.monotonic() + LIMIT_S
        while not done():
            if time.monotonic() > end:
                raise TimeoutError(f"The page was not ready after {LIMIT_S} s.")
            self.shoot()

    def write(self, path: Path) -> None:
        small = [image.resize((SIZE[0] * 3 // 4, SIZE[1] * 3 // 4)) for image, _ in self._frames]
        palette = small[-1].quantize(COLOURS)
        first, *others = [
            image.quantize(palette=palette, dither=Image.Dither.NONE) for image in small
        ]
        durations = [ms for _, ms in self._frames]
        first.save(
            path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True
        )


def is_complete(page: Page) -> bool:
    return "complete" in page.locator("#status").inner_text()


def record(page: Page) -> None:
    """Play the walk that the recording shows, and write both pictures."""
    recorder = Recorder(page)
    recorder.shoot(1200)
    page.get_by_label("Example").select_option(label="A pirate makes tea")
    page.locator("#max_tokens").fill("45")
    page.evaluate("scrollTo(0, 0)")
    page.get_by_role("button", name="Generate").click()
    recorder.until(lambda: is_complete(page))
    recorder.shoot(1200)
    page.get_by_role("listbox", name="Tokens, scale 2").focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
        recorder.shoot(500)
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
        recorder.shoot(500)
    shoot_both(page)
    recorder.shoot(LAST_MS)
    recorder.write(DOCS / "playground.gif")


def shoot_both(page: Page) -> None:
    """The still picture, for light pages and for dark ones."""
    for scheme, name in (("dark", "playground-dark.png"), ("light", "playground.png")):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.screenshot(path=DOCS / name)
        shrink(DOCS / name)


def shrink(path: Path) -> None:
    Image.open(path).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with chromium() as browser:
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
        page.goto(f"{url}/playground")
        page.locator("#send:enabled").wait_for()
        record(page)
    for name in ("playground.png", "playground-dark.png", "playground.gif"):
        print(f"docs/{name}: {(DOCS / name).stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
