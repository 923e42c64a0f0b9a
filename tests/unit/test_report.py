"""`guidance.note` for each cause for which a guidance field has no effect."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest

from deployments.generator.answers.report import NOTES, Outcome, note_of
from deployments.requests.guidance_fields import read_guidance

PAGE = (Path(__file__).parents[2] / "docs" / "guidance.md").read_text()
USER = {"role": "user", "content": "Hi"}
PAIR = {"guidance_scale": 2.0, "negative_prompt": "n"}
SCHEDULE = {"negative_prompt": "n"}
LONG = Outcome(longest=10, vocabulary=100)
SAME = Outcome(longest=10, vocabulary=100, same=frozenset([0]))


def streams(*weights: float) -> dict[str, Any]:
    return {"guidance_streams": [{"weight": weight, "prompt": "n"} for weight in weights]}


MARKERS = {"start_token_id": 5, "end_token_id": "</a>"}
CASES = [
    # cause, fields, what is known at the end, words of the sentence
    ("off", {"guidance_scale": 1, "negative_prompt": "n"}, LONG, "so negative_prompt had"),
    ("off", {"negative_prompt_ids": [1]}, LONG, "so negative_prompt_token_ids had"),
    ("off", {"negative_messages": [USER], "messages": [USER]}, LONG, "so negative_messages had"),
    ("off", {"guidance_schedule": [[0, 1]], **SCHEDULE}, LONG, "guidance_schedule is 1"),
    ("off", {"guidance_scale": 1, "negative_suffix": "n"}, LONG, "so negative_suffix had"),
    ("off", {"negative_suffix_token_ids": [1]}, LONG, "so negative_suffix_token_ids had"),
    ("no system message", {**PAIR, "negative_prompt": "", "messages": [USER]}, SAME, "empty"),
    (
        "no tokens",
        {**PAIR, "negative_prompt": ""},
        Outcome(longest=10, has_no_tokens=True),
        "prompt's last token",
    ),
    ("the prompt itself", PAIR, SAME, "negative_prompt has the tokens"),
    ("the prompt itself", {**PAIR, "negative_prompt": ""}, SAME, "negative_prompt has"),
    ("the prompt itself", streams(-1, -1), SAME, "guidance_streams[0] has the tokens"),
    ("one token", {"guidance_scale": 2.0}, SAME, "one token"),
    ("no weight", streams(-1, 0), LONG, "guidance_streams[1].weight is 0"),
    ("not begun", {**PAIR, "guidance_start": 10}, LONG, "is 10, and the longest answer has 10"),
    ("not begun", {**PAIR, "guidance_start": 64, "guidance_end": 70}, LONG, "is 64"),
    ("not ended", {**PAIR, "guidance_end": 10}, LONG, "guidance_end is 10"),
    (
        "scales not reached",
        {"guidance_schedule": [[0, 2], [4, 3], [10, 1.5], [20, 1]], **SCHEDULE},
        LONG,
        "from token 10,",
    ),
    (
        "scales not reached",
        {"guidance_schedule": [[0, 2], [4, 3]], "guidance_end": 4, **SCHEDULE},
        LONG,
        "from token 4,",
    ),
    ("scales of 1", {"guidance_schedule": [[0, 1], [10, 2]], **SCHEDULE}, LONG, "is 1 for all"),
    (
        "scales of 1",
        {"guidance_schedule": [[0, 2], [5, 1]], "guidance_start": 5, **SCHEDULE},
        LONG,
        "is 1 for all",
    ),
    ("no marker", {**PAIR, "guidance_between": MARKERS}, LONG, "between its markers"),
    ("no marker", {**PAIR, "guidance_in": "thinking"}, LONG, "between its markers"),
    ("all tokens kept", {**PAIR, "guidance_top_k": 100}, LONG, "is 100, and the model has 100"),
    ("all tokens found", {**PAIR, "guidance_filter_top_k": 200}, LONG, "conditional stream was"),
    ("one token kept", {**PAIR, "guidance_top_k": 1}, LONG, "guidance_top_k is 1,"),
    ("one token kept", {**PAIR, "guidance_min_p": 1}, LONG, "guidance_min_p is 1,"),
]
QUIET = [
    PAIR,
    {"guidance_scale": 2.0},
    {**PAIR, "guidance_start": 9},
    {**PAIR, "guidance_end": 9},
    {**PAIR, "guidance_top_k": 99, "guidance_filter_top_k": 1},
    {**PAIR, "guidance_min_p": 0.5},
    {"guidance_schedule": [[0, 1], [9, 2]], **SCHEDULE},
    {"guidance_schedule": [[0, 2], [5, 1]], **SCHEDULE},
    streams(-1, 0.5),
    {"guidance_scale": 1},
]


def noted(fields: dict[str, Any], outcome: Outcome) -> str | None:
    endpoint = "chat" if "messages" in fields else "completion"
    guidance = read_guidance(fields, endpoint)
    assert guidance is not None
    return note_of(endpoint, fields, guidance, outcome)


@pytest.mark.parametrize(("cause", "fields", "outcome", "words"), CASES)
def test_each_cause_has_its_note(
    cause: str, fields: dict[str, Any], outcome: Outcome, words: str
) -> None:
    note = noted(fields, outcome)
    assert note is not None
    assert words in note
    fixed = max((text for text, *_ in string.Formatter().parse(NOTES[cause])), key=len)
    assert fixed in note


@pytest.mark.parametrize("fields", QUIET, ids=str)
def test_no_note_where_all_fields_had_an_effect(fields: dict[str, Any]) -> None:
    assert noted(fields, LONG) is None


def test_several_causes_are_all_told() -> None:
    note = noted({**PAIR, "guidance_start": 10, "guidance_top_k": 100}, SAME)
    assert note is not None
    assert note.count(".") == 3


def test_an_answer_without_tokens_says_nothing_of_the_window() -> None:
    assert noted({**PAIR, "guidance_start": 5}, Outcome()) is None


def test_every_cause_is_tried() -> None:
    assert {cause for cause, *_ in CASES} == NOTES.keys()


def test_the_page_lists_all_sentences() -> None:
    """In its table, with a letter for each value."""
    shown = " ".join(PAGE.split())
    for cause, sentence in NOTES.items():
        assert " ".join(sentence.replace("{", "").replace("}", "").split()) in shown, cause
