"""The playground's page of conversations, at two scales side by side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.serve.browser import findings, page_of
from tests.serve.playground_steps import bodies, shown
from tools.serving.process import ServeProcess


@pytest.fixture
def page(browser: Browser, server: ServeProcess) -> Iterator[Page]:
    address = f"{server.url}/playground/chat"
    with page_of(browser, address, expected="status of 400") as page:
        page.locator("#max_tokens").fill("12")
        yield page


def say(page: Page, text: str, ends: str = "All answers are complete.") -> list[str]:
    """Send a message. Returns the texts of the two answers to it."""
    page.locator("#user").fill(text)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".message").last).to_have_text(text)
    expect(page.locator("#status")).to_have_text(ends, timeout=60_000)
    return [shown(article) for article in page.get_by_role("article").all()[-2:]]


def test_each_side_goes_on_from_its_own_answers(page: Page) -> None:
    sent = bodies(page)
    first = say(page, "How do I make tea?")
    assert first[0] != first[1]
    say(page, "And coffee?")
    assert [body.get("guidance_scale", 1) for body in sent] == [1, 1.5, 1, 1.5]
    assert "negative_prompt" not in sent[0]
    assert sent[1]["negative_prompt"] == "You are a helpful assistant."
    for body, answer in zip(sent[2:], first, strict=True):
        assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
        assert [m["content"] for m in body["messages"][1:]] == [
            "How do I make tea?",
            answer,
            "And coffee?",
        ]
    page.get_by_role("button", name="Start anew").click()
    assert page.get_by_role("article").count() == 0
    say(page, "Hello.")
    assert [m["role"] for m in sent[-1]["messages"]] == ["system", "user"]


def test_an_error_is_at_its_field_and_its_turn_is_not_remembered(page: Page) -> None:
    sent = bodies(page)
    page.locator("#right").fill("2x")
    say(page, "Hello.", ends="1 of 2 answers failed.")
    expect(page.locator("#right-wrong")).to_contain_text("must be a number, not a string")
    assert page.locator("#user").input_value() == "Hello."
    page.locator("#right").fill("2,5")
    say(page, "Who are you?")
    assert sent[-1]["guidance_scale"] == 2.5
    assert [m["content"] for m in sent[-1]["messages"][1:]] == ["Who are you?"]
    assert len(sent[-2]["messages"]) == 4  # the left side had an answer


@pytest.mark.parametrize("size", [(1280, 900), (360, 740)], ids=["wide", "narrow"])
def test_nothing_stands_in_anyones_way(
    browser: Browser, server: ServeProcess, size: tuple[int, int]
) -> None:
    with page_of(browser, f"{server.url}/playground/chat", size=size, dark=True) as page:
        assert findings(page) == []
        page.locator("#max_tokens").fill("12")
        say(page, "How do I make tea?")
        page.get_by_role("listbox").last.focus()
        assert findings(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
