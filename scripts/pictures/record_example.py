"""Record the answers that the playground shows before anybody generated: recorded.json.

    make serve                                   in another terminal
    python scripts/pictures/record_example.py [URL]

The real page chooses its first example and generates. What is recorded are the requests that it
sent, and what the server answered. tests/chat/test_playground_first_view.py says when that is
out of date.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias
from urllib.request import urlopen

from chromium import chromium
from playwright.sync_api import Page, Response, expect

Json: TypeAlias = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deployments/ingress/playground/recorded.json"
ALTERNATIVES = 6
"""Likely tokens that are kept of each distribution. A table shows four of each of three."""

DIGITS = 4
LIMIT_MS = 120_000
NOT_KEPT = ("bytes", "token_id")


def generate(page: Page) -> list[Response]:
    """Choose the first example and generate. Returns the responses in the order of the answers."""
    found: list[Response] = []
    page.on("response", lambda r: found.append(r) if "/v1/chat" in r.url else None)
    page.get_by_label("Example").select_option(index=1)
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_have_text("All answers are complete.", timeout=LIMIT_MS)
    return sorted(found, key=lambda r: float(body_of(r).get("guidance_scale", 1)))


def body_of(response: Response) -> Json:
    body: Json = json.loads(response.request.post_data or "{}")
    return body


def events_of(response: Response) -> list[Json]:
    lines = [line.removeprefix("data: ") for line in response.text().split("\n\n")]
    return [json.loads(line) for line in lines if line not in ("", "[DONE]")]


def short(value: Any) -> Any:
    """Log-probabilities and lists of likely tokens with as much as the page shows."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, list):
        return [short(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    kept = {key: short(entry) for key, entry in value.items() if key not in NOT_KEPT}
    for key in kept.keys() & {"top_logprobs", "conditional_top_logprobs"}:
        kept[key] = kept[key][:ALTERNATIVES]
    if "negative_top_logprobs" in kept:
        kept["negative_top_logprobs"] = [
            ranking[:ALTERNATIVES] for ranking in kept["negative_top_logprobs"]
        ]
    return kept


def answer_of(response: Response, article: Any) -> Json:
    """One answer, in the form that recorded.js reads."""
    events = events_of(response)
    choices = [choice for event in events for choice in event.get("choices", ())]
    facts = article.locator(".facts").last.inner_text()
    seconds = re.search(r"in ([0-9.]+) s", facts)
    assert seconds is not None, facts
    body = body_of(response)
    return {
        "title": article.get_attribute("aria-label"),
        "request": {"path": "v1/chat/completions", "body": unwatched(body)},
        "content": [
            short(token) for c in choices if c["logprobs"] for token in c["logprobs"]["content"]
        ],
        "finish_reason": next(c["finish_reason"] for c in choices if c["finish_reason"]),
        "guidance": next((event["guidance"] for event in events if "guidance" in event), None),
        "seconds": float(seconds[1]),
    }


def unwatched(body: Json) -> Json:
    """The request without what the page asks for itself, as its buttons As curl and As Python."""
    own = ("logprobs", "top_logprobs", "guidance_logprobs", "stream")
    return {name: value for name, value in body.items() if name not in own}


def recording(page: Page, url: str, device: str) -> Json:
    responses = generate(page)
    articles = page.get_by_role("article").all()
    preset = page.locator("#preset option:checked").inner_text()
    with urlopen(f"{url}/version", timeout=30) as answer:
        version = json.load(answer)["version"]
    return {
        "preset": preset,
        "model": body_of(responses[0])["model"],
        "vllm": re.sub(r"\+.*", "", version),
        "device": device,
        "recorded": datetime.now(UTC).date().isoformat(),
        "answers": [answer_of(r, a) for r, a in zip(responses, articles, strict=True)],
    }


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{url}/playground")
        page.locator("#send:enabled").wait_for()
        recorded = recording(page, url, "CPU")
    text = json.dumps(recorded, ensure_ascii=False, separators=(",", ":"))
    FILE.write_text(text.replace('{"title"', '\n{"title"') + "\n")
    print(f"{FILE.name}: {len(text) // 1024} kB")


if __name__ == "__main__":
    main()
