"""The playground of a server with API keys."""

from __future__ import annotations

import httpx
from playwright.sync_api import expect

from tests.serve.browser import chromium, page_of
from tests.serve.limited.server import KEY
from tools.serving.process import ServeProcess

FIELDS = {"mode": "text", "prompt": "Once", "negative": "none", "scales": "2", "max_tokens": "3"}


def test_a_key_is_asked_for_and_kept_in_the_session_alone(limited_server: ServeProcess) -> None:
    state = "&".join(f"{name}={value}" for name, value in FIELDS.items())
    address = f"{limited_server.url}/playground#{state}"
    with chromium() as browser:
        with page_of(browser, address, expected="status of 401") as page:
            key = page.get_by_label("API key")
            told = page.locator("#key-wrong")
            expect(told).to_contain_text("key")
            expect(key).to_be_focused()
            key.fill("a wrong one")
            page.keyboard.press("Enter")
            expect(told).to_contain_text("key")
            key.fill(KEY)
            page.keyboard.press("Tab")
            expect(told).to_have_count(0)
            page.keyboard.press("Control+Enter")
            expect(page.locator("#status")).to_have_text("All answers are complete.")
            assert KEY not in page.url
            stored = page.evaluate("[localStorage.length, document.cookie, sessionStorage.length]")
            assert stored == [0, "", 1]
            page.get_by_role("button", name="As curl").click()
            code = page.get_by_role("dialog").get_by_role("textbox").input_value()
            assert "$API_KEY" in code
            assert KEY not in code
            page.keyboard.press("Escape")
            page.reload()
            expect(page.locator("#model")).to_have_value("stories")
            page.get_by_role("button", name="Generate").click()
            expect(page.locator("#status")).to_have_text("All answers are complete.")
        with page_of(browser, address, expected="status of 401") as page:
            expect(page.locator("#key-wrong")).to_contain_text("key")
            assert page.get_by_label("API key").input_value() == ""


def test_the_api_can_be_tried_with_a_key(limited_server: ServeProcess) -> None:
    """The document names no model, because not everybody may know them."""
    page = httpx.get(f"{limited_server.url}/docs")
    assert page.status_code == 200
    document = httpx.get(f"{limited_server.url}/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["security"] == [{"key": []}]
    assert "stories" not in str(document)
    assert "MiniLM" not in str(document)
