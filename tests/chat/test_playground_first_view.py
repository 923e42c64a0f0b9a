"""What a visitor of the playground sees before anything is generated: a recording."""

from __future__ import annotations

import json

import httpx
import pytest
from playwright.sync_api import Page, Response, expect

from cfg_core.cpu_features import CPUINFO, has_bfloat16, read
from tests.serve.playground_steps import answers, choices, generate, streams
from tools.serving.process import Json, ServeProcess

AGAIN = "make the recording again: scripts/pictures/record_example.py"
CLEAR = 12
"""Tokens at the beginning of a greedy answer that other CPUs round to the same ones."""
SAME_TYPE, OTHER_TYPE = 0.1, 0.5
"""Nats by which a log-probability may differ from the recorded one. bfloat16 and float32 were 0.34
apart in a blend of scale 1.5.
"""


@pytest.fixture(scope="module")
def recorded(chat_server: ServeProcess) -> Json:
    found: Json = httpx.get(f"{chat_server.url}/playground/recorded.json").json()
    return found


def text_of(answer: Json) -> str:
    return "".join(token["token"] for token in answer["content"]).removesuffix("<|im_end|>")


def likely(token: Json) -> dict[str, float]:
    return {entry["token"]: entry["logprob"] for entry in token["top_logprobs"]}


def sent_by(response: Response) -> Json:
    body: Json = json.loads(response.request.post_data or "{}")
    return body


def test_recorded_answers_are_there_and_say_so(page: Page, recorded: Json) -> None:
    banner = page.locator("#recorded")
    expect(banner).to_contain_text("Recorded.")
    expect(banner).to_contain_text(recorded["model"])
    expect(banner).to_contain_text(recorded["preset"])
    assert page.locator("#preset option:checked").inner_text() == recorded["preset"]
    shown = answers(page)
    assert shown == {answer["title"]: text_of(answer) for answer in recorded["answers"]}
    assert len(set(shown.values())) == len(shown) == 3
    page.get_by_role("listbox").last.focus()
    expect(page.locator("#token")).to_contain_text("in the conditional stream")
    generate(page)
    expect(banner).to_have_count(0)


def test_finish_is_explained(page: Page) -> None:
    tip = page.get_by_role("article").first.locator("h2 .tip")
    expect(tip).to_have_text("finish: length")
    tip.focus()
    assert "limit of tokens" in tip.evaluate("one => getComputedStyle(one, '::after').content")


def test_the_recording_is_what_this_server_answers(page: Page, recorded: Json) -> None:
    """The same requests, the same fields, and the same words; else it is out of date.

    The recording was computed in bfloat16. A CPU without it computes in float32: there, its text
    may part from the recorded one where another token was nearly as likely.
    """
    is_same_type = has_bfloat16(read(CPUINFO)) is not False
    rounding = SAME_TYPE if is_same_type else OTHER_TYPE
    told = streams(page)
    page.get_by_label("Example").select_option(index=1)
    generate(page)
    by_scale = sorted(told, key=lambda response: sent_by(response).get("guidance_scale", 1))
    for answer, response in zip(recorded["answers"], by_scale, strict=True):
        sent = sent_by(response)
        assert answer["request"]["body"].items() <= sent.items(), AGAIN
        content = [t for c in choices(response) if c["logprobs"] for t in c["logprobs"]["content"]]
        for ours, theirs in zip(answer["content"][:CLEAR], content[:CLEAR], strict=True):
            assert theirs.keys() - ours.keys() <= {"bytes", "token_id"}, AGAIN
            if not is_same_type and ours["token"] != theirs["token"]:
                assert ours["logprob"] - likely(ours)[theirs["token"]] < rounding, AGAIN
                break
            assert ours["token"] == theirs["token"], AGAIN
            assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=rounding), AGAIN
        assert answer["finish_reason"] in ("length", "stop")
        if "guidance_scale" in sent:
            assert answer["guidance"]["guided_tokens"] == len(answer["content"])


def test_a_link_shows_what_it_links_to(page: Page) -> None:
    """Someone who follows a link to a request sees no answers of another one."""
    page.locator("#user").fill("What is soup?")
    page.locator("#system").focus()
    page.reload()
    expect(page.locator("#user")).to_have_value("What is soup?")
    page.wait_for_load_state("networkidle")
    assert page.locator("#recorded").count() == 0
