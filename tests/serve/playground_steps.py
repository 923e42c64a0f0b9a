"""What tests do on a page of the playground, and what they read there."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page, Response, expect

from tools.serving.process import Json

PIRATE = "A pirate makes tea"


def choose(page: Page, preset: str, **fields: str) -> None:
    """Choose an example, and type into fields."""
    page.get_by_label("Example").select_option(label=preset)
    for name, text in fields.items():
        page.locator(f"#{name}").fill(text)


def generate(page: Page) -> None:
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_have_text("All answers are complete.", timeout=60_000)


def answers(page: Page) -> dict[str, str]:
    """The text of each answer, by its title."""
    return {
        article.get_attribute("aria-label") or "": shown(article)
        for article in page.get_by_role("article").all()
    }


def shown(article: Any) -> str:
    texts = article.get_by_role("option").evaluate_all("all => all.map(one => one.textContent)")
    return "".join(texts).removesuffix("<|im_end|>")


def bodies(page: Page) -> list[Json]:
    """A list that gets the bodies of all requests from now on."""
    sent: list[Json] = []
    page.on("request", lambda r: sent.append(json.loads(r.post_data)) if r.post_data else None)
    return sent


def streams(page: Page) -> list[Response]:
    """A list that gets the answers of the API from now on, in the order of the requests."""
    found: list[Response] = []
    page.on("response", lambda r: found.append(r) if "/v1/chat" in r.url else None)
    return found


def choices(response: Response) -> list[Json]:
    """The choices of all events of a stream."""
    lines = [line.removeprefix("data: ") for line in response.text().split("\n\n")]
    events = [json.loads(line) for line in lines if line not in ("", "[DONE]")]
    return [choice for event in events for choice in event["choices"]]
