"""The playground in a real Chromium, on the small models of configs/stories.yaml.

What guidance does to the chat model: tests/chat/test_playground.py.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.serve.browser import findings, page_of
from tests.serve.playground_steps import PIRATE, answers, bodies, choices, choose, generate, streams
from tools.serving.process import ServeProcess

NARROW = (360, 740)


# --- what guidance does ---------------------------------------------------------------------------


def test_a_token_is_read_by_keyboard(page: Page) -> None:
    """The numbers are the API's."""
    told = streams(page)
    choose(page, PIRATE, max_tokens="10")
    generate(page)
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Tokens, scale 2":
            break
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft"):
        page.keyboard.press(key)
    panel = page.get_by_role("complementary", name="The chosen token")
    expect(panel.get_by_role("heading")).to_have_text("Token 8, scale 2")
    (response,) = [r for r in told if '"guidance_scale":2' in (r.request.post_data or "")]
    tokens = [t for c in choices(response) if c["logprobs"] for t in c["logprobs"]["content"]]
    said = tokens[8]
    row = panel.get_by_role("row").filter(has_text="(sampled)").inner_text().split("\t")
    values = [said["logprob"], said["conditional_logprob"], *said["negative_logprobs"]]
    assert len(row) == 1 + len(values)
    for cell, logprob in zip(row[1:], values, strict=True):
        assert float(re.sub("[^0-9.]", "", cell)) == pytest.approx(
            100 * math.exp(logprob), rel=0.02, abs=0.011
        )
    active = page.get_by_role("listbox", name="Tokens, scale 2").get_attribute(
        "aria-activedescendant"
    )
    label = page.locator(f"#{active}").get_attribute("aria-label") or ""
    assert label == panel.locator("p").inner_text()
    assert f"KL {said['guidance_kl']:.2f} nats" in label
    bars = panel.locator("tr.sampled td").evaluate_all(
        "all => all.map(cell => Number(cell.style.getPropertyValue('--share')))"
    )
    assert bars == pytest.approx([math.exp(logprob) for logprob in values], abs=1e-3)


def test_pointing_shows_tokens_and_the_curve(page: Page) -> None:
    choose(page, PIRATE, max_tokens="10")
    generate(page)
    article = page.get_by_role("article", name="scale 2")
    article.get_by_role("option").nth(1).hover()
    expect(page.locator("#token h2")).to_have_text("Token 1, scale 2")
    curve = article.get_by_role("img")
    expect(curve).to_have_attribute(
        "aria-label", re.compile("KL of each token in nats: mean .*, highest .* at token")
    )
    assert len(re.findall("[ML]", curve.locator("path.kl").get_attribute("d") or "")) == 10
    page.keyboard.press("Escape")
    expect(page.locator("#token")).to_be_hidden()
    box = curve.bounding_box()
    assert box is not None
    curve.hover(position={"x": box["width"] * 0.95, "y": 5})
    expect(page.locator("#token h2")).to_have_text("Token 9, scale 2")
    colours = article.get_by_role("option").evaluate_all(
        "all => all.map(one => one.style.backgroundColor)"
    )
    assert len(set(colours)) > 3
    assert not any(
        page.get_by_role("article", name="without guidance")
        .get_by_role("option")
        .evaluate_all("all => all.map(one => one.style.backgroundColor)")
    )


# --- the form -------------------------------------------------------------------------------------


def test_streams_are_added_and_weighed(page: Page) -> None:
    sent = bodies(page)
    choose(page, PIRATE, max_tokens="4", scales="0, 1, 2")
    page.get_by_label("Several streams").check()
    expect(page.locator("#streams li")).to_have_count(1)  # one to begin with
    for weight, message in (("-0.5", "You are a helpful assistant."), ("0.25", "You sing.")):
        page.get_by_role("button", name="Add a stream").click()
        page.keyboard.press("Control+A")
        page.keyboard.type(weight)
        page.locator("#streams li").last.get_by_label("System message").fill(message)
    page.get_by_role("button", name="Remove this stream").first.click()
    generate(page)
    assert tuple(answers(page)) == (
        "without guidance",
        *(f"weights \u00d7 {factor}" for factor in (1, 2)),
    )
    assert "guidance_streams" not in sent[0]
    weights = [[stream["weight"] for stream in body["guidance_streams"]] for body in sent[1:]]
    assert weights == [[-0.5, 0.25], [-1, 0.5]]
    page.get_by_role("listbox").nth(1).focus()
    header = page.locator("#token thead").inner_text().split()
    assert header == ["Token", "Blend", "Conditional", "Stream", "1", "Stream", "2"]


def test_text_stop_window_and_cuts_are_sent(page: Page) -> None:
    sent = bodies(page)
    choose(page, "A horror story", max_tokens="12", scales="2", start="2", end="8")
    page.get_by_text("Stop, top p, cuts, trust region").click()
    for name, text in (("stop", "x!\ny!"), ("cut_top_k", "40"), ("temperature", "0.7")):
        page.locator(f"#{name}").fill(text)
    generate(page)
    (body,) = sent
    assert body["stop"] == ["x!", "y!"]
    assert (body["guidance_start"], body["guidance_end"], body["guidance_top_k"]) == (2, 8, 40)
    assert (body["seed"], body["temperature"]) == (1, 0.7)
    expect(page.locator("article .facts").last).to_contain_text("6 guided")
    page.get_by_role("listbox").focus()
    expect(page.locator("#token p")).to_contain_text("not guided")


@pytest.mark.parametrize(
    ("text", "scales"),
    [
        ("1,5", [1.5]),
        ("1, 1,5, 2", [1, 1.5, 2]),
        ("1;1,5", [1, 1.5]),
        ("1.5,2", [1.5, 2]),
        ("0,2,3", [0, 2, 3]),
    ],
)
def test_a_decimal_comma_is_understood(page: Page, text: str, scales: list[float]) -> None:
    """The page says how it reads the numbers."""
    sent = bodies(page)
    choose(page, PIRATE, max_tokens="2", scales=text, temperature="0,5")
    expect(page.locator("#scales-hint")).to_have_text(
        "1 is off. A rule may stand there, too: adacad or arr."
        f" Now: {' and '.join(map(str, scales))}."
    )
    generate(page)
    assert [body.get("guidance_scale", 1) for body in sent] == scales
    assert {body["temperature"] for body in sent} == {0.5}


def test_a_trust_region_is_sent_and_its_strength_drawn(page: Page) -> None:
    sent = bodies(page)
    choose(page, PIRATE, max_tokens="12", scales="2")
    page.get_by_text("Stop, top p, cuts, trust region").click()
    generate(page)
    strength = page.locator(".curve path.strength")
    assert strength.get_attribute("d") == ""
    page.locator("#max_kl").fill("0,05")
    page.locator("#min_entropy").fill("0.1")
    generate(page)
    assert (sent[1]["guidance_max_kl"], sent[1]["guidance_min_entropy"]) == (0.05, 0.1)
    assert strength.get_attribute("d")
    expect(page.get_by_role("img")).to_have_attribute("aria-label", re.compile("strength"))
    page.get_by_role("listbox").focus()
    said = [page.locator("#token p").inner_text()]
    for _ in range(11):
        page.keyboard.press("ArrowRight")
        said.append(page.locator("#token p").inner_text())
    assert any(re.search(r"Guidance had \d+ % strength", text) for text in said), said


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("scales", "1, 2x", "guidance_scale"),
        ("temperature", "-1", "temperature"),
        ("max_tokens", "none", "max_tokens"),
        ("end", "0", "guidance_end"),
        ("cut_min_p", "7", "guidance_min_p"),
    ],
)
def test_an_error_is_the_apis_sentence_at_the_field(
    browser: Browser, server: ServeProcess, field: str, text: str, words: str
) -> None:
    """The next good request takes it away."""
    with page_of(browser, server.url, expected="status of 400") as page:
        sent = bodies(page)
        choose(page, PIRATE, max_tokens="4", scales="2")
        page.locator("details").evaluate("one => { one.open = true; }")
        page.locator(f"#{field}").fill(text)
        page.keyboard.press("Control+Enter")
        wrong = page.locator(f"#{field}-wrong")
        expect(wrong).to_contain_text(words)
        told = httpx.post(f"{server.url}/v1/chat/completions", json=sent[-1]).json()
        assert wrong.inner_text() == told["error"]["message"]
        expect(page.locator(f"#{field}")).to_be_focused()
        expect(page.locator(f"#{field}")).to_have_attribute("aria-invalid", "true")
        assert findings(page) == []
        choose(page, PIRATE, max_tokens="4", scales="2")
        generate(page)
        assert page.locator(".wrong").count() == 0


def test_an_error_of_a_stream_is_at_that_stream(browser: Browser, server: ServeProcess) -> None:
    with page_of(browser, server.url, expected="status of 400") as page:
        choose(page, "Two negatives with weights", scales="1", max_tokens="2")
        page.locator("#streams li").last.get_by_label("Weight").fill("heavy")
        page.get_by_role("button", name="Generate").click()
        wrong = page.locator("#streams li").last.locator(".wrong")
        expect(wrong).to_contain_text("guidance_streams[1].weight")
        expect(page.locator("#status")).to_have_text("1 of 1 answers failed.")
        expect(page.get_by_role("article")).to_contain_text(wrong.inner_text())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("", "ended early"),
        ('data: {"choices": []}\n\n', "ended early"),
        ("data: {\n\n", "is no JSON"),
        ('data: {"error": {"message": "The engine is gone."}}\n\n', "The engine is gone."),
    ],
)
def test_half_an_answer_is_a_failure(page: Page, answer: str, words: str) -> None:
    page.route("**/v1/chat/**", lambda route: route.fulfill(body=answer))
    choose(page, PIRATE, scales="2")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#problem")).to_contain_text(words)
    expect(page.get_by_role("article")).to_contain_text(words)


def test_bounds_are_of_the_tokens_that_are_not_shown(page: Page) -> None:
    """The sampled token is known in any case, so it says nothing about others."""
    entry = {"token": "a", "logprob": math.log(0.5)}
    ranking = [{"token": text, "logprob": math.log(p)} for text, p in (("b", 0.3), ("c", 0.1))]
    token = {
        **entry,
        "top_logprobs": [entry, *ranking],
        "conditional_logprob": -20,
        "negative_logprobs": [-30],
        "guidance_kl": 1.0,
        "conditional_top_logprobs": ranking[:1],
        "negative_top_logprobs": [ranking],
    }
    event = {"choices": [{"logprobs": {"content": [token]}, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/**", lambda route: route.fulfill(body=body))
    choose(page, PIRATE, scales="2")
    generate(page)
    page.get_by_role("listbox").focus()
    rows = [row.split("\t") for row in page.locator("#token tbody tr").all_inner_texts()]
    assert rows == [
        ["a (sampled)", "50.0 %", "< 0.01 %", "< 0.01 %"],
        ["b", "30.0 %", "30.0 %", "30.0 %"],
        ["c", "10.0 %", "< 30.0 %", "10.0 %"],
    ]


def test_nothing_that_was_typed_is_lost(page: Page) -> None:
    """By the skip link, by an example and the way back, or by a reload."""
    page.locator("#user").fill("What is soup?")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "answers"
    assert page.locator("#user").input_value() == "What is soup?"
    page.get_by_label("Example").select_option(label="A poem about the moon")
    expect(page.locator("#user")).to_have_value("What is the moon?")
    page.go_back()
    expect(page.locator("#user")).to_have_value("What is soup?")
    expect(page.get_by_label("Example")).to_have_value("")
    page.locator("#max_tokens").fill("1")
    generate(page)
    page.locator("#user").fill("What is bread?")
    page.locator("#system").focus()
    page.go_back()
    expect(page.locator("#user")).to_have_value("What is soup?")
    page.go_forward()
    expect(page.locator("#user")).to_have_value("What is bread?")
    page.reload()
    expect(page.locator("#user")).to_have_value("What is bread?")


def test_a_link_is_copied_where_pages_have_no_clipboard(page: Page) -> None:
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.locator("#user").fill("What is soup?")
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#status")).to_have_text("The link is copied.")
    page.locator("#system").fill("")
    page.locator("#system").press("Control+V")
    assert page.locator("#system").input_value() == page.url


STOP_AT_THE_FIRST_TOKEN = """() => new MutationObserver((_, observer) => {
    if (document.querySelector(".tokens > *")) {
        observer.disconnect();
        document.getElementById("stop-all").click();
    }
}).observe(document.body, { childList: true, subtree: true })"""
"""A click from outside of the page may come when all texts have ended."""


def test_stop_ends_all_answers(page: Page) -> None:
    choose(page, PIRATE, max_tokens="400")
    page.evaluate(STOP_AT_THE_FIRST_TOKEN)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.get_by_role("article").first).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_disabled()


def test_the_address_holds_the_state(page: Page) -> None:
    choose(
        page,
        "Two negatives with weights",
        user="Why, \u201cyou\u201d & me + #1?",
        scales="1",
        seed="7",
    )
    generate(page)
    before, address = answers(page), page.url
    assert "seed=7" in address.partition("#")[2]
    page.goto("about:blank")
    page.goto(address)
    assert page.locator("#user").input_value() == "Why, \u201cyou\u201d & me + #1?"
    assert page.locator("#streams li").count() == 2
    generate(page)
    assert answers(page) == before


@pytest.mark.parametrize("kind", ["curl", "Python"])
def test_a_copied_request_runs(page: Page, kind: str) -> None:
    """The prompt has quotes that a shell and Python could misread.

    The first token is that of the page. Others may differ: the page asks for log-probabilities, so
    its blend is rounded in other places.
    """
    told = streams(page)
    choose(page, PIRATE, user='Don\'t say "tea", `tea` or $TEA \\n', max_tokens="8", scales="1.5")
    generate(page)
    (message,) = [json.loads(r.request.post_data or "")["messages"] for r in told]
    url = told[0].url.replace("chat/completions", "chat/completions/render")
    num_tokens = len(httpx.post(url, json={"messages": message}).json()["token_ids"])
    first = page.locator(".tokens > *").first.inner_text()
    page.get_by_role("button", name=f"As {kind}").click()
    assert findings(page) == []
    code = page.get_by_role("dialog").get_by_role("textbox").input_value()
    page.keyboard.press("Escape")
    command = ["bash", "-c", code] if kind == "curl" else [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    if kind == "Python":
        assert run.stdout.startswith(first)
        return
    answer = json.loads(run.stdout)
    assert answer["choices"][0]["message"]["content"].startswith(first)
    assert answer["guidance"]["scale"] == 1.5
    assert answer["usage"]["prompt_tokens"] == num_tokens


# --- for everybody --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "dark"),
    [
        pytest.param((1280, 900), False, id="wide-light"),
        pytest.param(NARROW, True, id="narrow-dark"),
        pytest.param((1280, 900), True, id="wide-dark", marks=pytest.mark.survey),
        pytest.param(NARROW, False, id="narrow-light", marks=pytest.mark.survey),
    ],
)
def test_nothing_stands_in_anyones_way(
    browser: Browser, server: ServeProcess, size: tuple[int, int], dark: bool
) -> None:
    """Axe finds nothing, before and after answers came, and nothing is wider than the window."""
    with page_of(browser, server.url, size=size, dark=dark) as page:
        assert findings(page) == []
        choose(page, "Two negatives with weights", max_tokens="20")
        generate(page)
        page.get_by_role("listbox").last.focus()
        assert findings(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        choose(page, PIRATE, max_tokens="20", scales="2")
        generate(page)
        page.get_by_role("listbox").focus()
        fits = "one => one.scrollWidth <= one.clientWidth"
        assert page.locator("#token .scroll").evaluate(fits)  # with its three distributions
    with page_of(browser, f"{server.url}/playground/encoders", size=size, dark=dark) as page:
        page.get_by_role("button", name="Rank").click()
        page.get_by_role("table").wait_for()
        assert findings(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_passages_are_ranked_and_compared(browser: Browser, server: ServeProcess) -> None:
    address = f"{server.url}/playground/encoders"
    with page_of(browser, address, expected="status of 400") as page:
        sent = bodies(page)
        page.get_by_label("Question").fill("What do bakers need?")
        page.get_by_label("Passages").fill("The sea is salty.\n\nBread is made of flour.\n")
        page.get_by_role("button", name="Rank").click()
        page.get_by_role("table").wait_for()
        told = httpx.post(f"{server.url}/v1/rerank", json=sent[0]).json()["results"]
        assert told[0]["index"] == 1
        scores = page.locator(".ranking .score").all_inner_texts()
        assert scores == [f"{entry['relevance_score']:.3f}" for entry in told]
        assert page.locator(".ranking li").first.inner_text().endswith("2. Bread is made of flour.")
        cells = [float(cell) for cell in page.locator(".matrix td").all_inner_texts()]
        assert cells[0] == cells[3] == 1
        assert cells[1] == cells[2] < 0.5
        page.reload()
        assert page.get_by_label("Question").input_value() == "What do bakers need?"
        page.get_by_label("Question").fill("")
        page.get_by_role("button", name="Rank").click()
        expect(page.locator("#query-wrong, #problem:visible")).to_contain_text("query")
