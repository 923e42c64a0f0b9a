"""The playground's recording belongs to its first example.

tests/chat/test_playground_first_view.py compares it with a real server.
"""

import json
from pathlib import Path

import pytest

PLAYGROUND = Path(__file__).parents[2] / "deployments" / "ingress" / "playground"
RECORDED = json.loads((PLAYGROUND / "recorded.json").read_text(encoding="utf-8"))
PRESETS = (PLAYGROUND / "presets.js").read_text(encoding="utf-8")
FIRST = PRESETS[PRESETS.index("PRESETS = [") : PRESETS.index("\n  },\n")]
AGAIN = "make the recording again: scripts/pictures/record_example.py"


def test_it_is_of_the_first_example_as_it_is_now():
    assert f'name: "{RECORDED["preset"]}"' in FIRST, AGAIN
    for answer in RECORDED["answers"]:
        body = answer["request"]["body"]
        for message in body["messages"]:
            name = message["role"]
            assert f'{name}: "{message["content"]}"' in FIRST, AGAIN
    scales = [a["request"]["body"].get("guidance_scale", 1) for a in RECORDED["answers"]]
    assert f'scales: "{", ".join(map(str, scales))}"' in FIRST, AGAIN


@pytest.mark.parametrize("answer", RECORDED["answers"], ids=lambda answer: answer["title"])
def test_every_token_of_it_was_guided_as_it_says(answer):
    guided = "guidance_scale" in answer["request"]["body"]
    assert (answer["guidance"] is not None) == guided
    assert len(answer["content"]) == answer["request"]["body"]["max_tokens"]
    if guided:
        assert answer["guidance"]["guided_tokens"] == len(answer["content"])
    for token in answer["content"]:
        assert ("conditional_logprob" in token) == guided
        assert token["logprob"] <= 0


def test_it_is_small_enough_to_load_with_the_page():
    assert (PLAYGROUND / "recorded.json").stat().st_size < 150_000
