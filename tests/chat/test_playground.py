"""The playground's examples in a real Chromium, on the model that configs/cfg.yaml serves.

Its form and its pages: tests/serve/stories/test_playground.py.
"""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.serve.playground_steps import PIRATE, answers, bodies, choices, choose, generate, streams

SCALES = ("without guidance", "scale 1.5", "scale 2")


def test_three_scales_stream_at_once(page: Page) -> None:
    """The texts are those that the API sends."""
    order: list[str] = []
    page.on("request", lambda r: order.append("begins") if "/v1/chat" in r.url else None)
    page.on("requestfinished", lambda r: order.append("ends") if "/v1/chat" in r.url else None)
    sent, told = bodies(page), streams(page)
    choose(page, PIRATE, user="How do I make coffee?", max_tokens="24")
    generate(page)
    assert order == ["begins"] * 3 + ["ends"] * 3
    found = answers(page)
    assert tuple(found) == SCALES
    assert len(set(found.values())) == 3
    for body in sent:
        assert body["messages"][1]["content"] == "How do I make coffee?"
    parts = [[choice["delta"].get("content") or "" for choice in choices(r)] for r in told]
    assert sorted("".join(part) for part in parts) == sorted(found.values())
    facts = page.get_by_role("article", name="scale 1.5").locator(".facts").last
    expect(facts).to_contain_text("24 guided · 2 streams")


@pytest.mark.slow
def test_every_example_shows_an_effect(page: Page) -> None:
    names = page.locator("#preset option").all_inner_texts()[1:]
    assert len(names) >= 6
    for name in names:
        choose(page, name, max_tokens="20")
        generate(page)
        plain, *guided = answers(page).values()
        assert guided, name
        assert plain not in guided, name
        assert "failed" not in page.locator("#status").inner_text()


@pytest.mark.slow
def test_the_scales_of_a_rule_are_drawn(page: Page) -> None:
    choose(page, "A rule in place of a scale", max_tokens="12")
    generate(page)
    curve = page.get_by_role("article", name="rule adacad").locator("svg.curve")
    label = curve.get_attribute("aria-label") or ""
    scales = re.search(r"with the rule's scales dashed, from (1\.\d\d) to (1\.\d\d)$", label)
    assert scales is not None, label
    assert 1 <= float(scales[1]) < float(scales[2]) < 1.7  # at most 1 + log 2
    assert curve.locator(".strength").get_attribute("d")
    curve.hover(position={"x": 5, "y": 5})
    expect(page.locator("#token")).to_contain_text("The rule's scale was 1.")
    chosen = page.get_by_role("article", name="scale 1.5").locator("svg.curve")
    assert "rule" not in (chosen.get_attribute("aria-label") or "")


@pytest.mark.slow
def test_the_passage_is_trusted_with_guidance_alone(page: Page) -> None:
    choose(page, "Trust the passage")
    generate(page)
    plain, *guided = answers(page).values()
    assert "nine days" not in plain
    assert len(guided) == 2
    assert all("a week has nine days" in text for text in guided), guided
