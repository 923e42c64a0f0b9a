"""Speculation over HTTP: counts of drafts, and requests that use drafts."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from tools.serving.process import Json, ServeProcess

pytestmark = pytest.mark.slow

GUIDANCE: Json = {"guidance_scale": 1.5, "negative_prompt": "A story about the sea."}
LIMIT_S = 60


def complete(server: ServeProcess, **fields: Any) -> Json:
    body = {"prompt": "Once upon a time", "max_tokens": 60, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    completion: Json = answer.json()
    return completion


def test_guided_and_plain_drafts_are_counted_apart(server: ServeProcess) -> None:
    before = counts(server)
    answer = complete(server, temperature=0, **GUIDANCE)
    assert answer["guidance"]["guided_tokens"] == answer["usage"]["completion_tokens"] > 0
    between = counts(server, guided_drafts_accepted=before["guided_drafts_accepted"])
    assert between["plain_drafts"] == before["plain_drafts"]
    complete(server, temperature=0)
    after = counts(server, plain_drafts_accepted=between["plain_drafts_accepted"])
    assert after["guided_drafts"] == between["guided_drafts"]


def counts(server: ServeProcess, **above: int) -> dict[str, int]:
    """The engine's counts, as soon as those of `above` are above the numbers given.

    On a busy machine, /ready answers with counts that are some seconds old.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        answer = httpx.get(f"{server.url}/ready", timeout=LIMIT_S)
        state: dict[str, int] = answer.json()["engine"]
        if all(state[name] > number for name, number in above.items()):
            return state
        assert time.monotonic() < deadline, (above, state)
        time.sleep(0.2)


def test_seeded_samples_structured_output_and_processors_under_drafts(server: ServeProcess) -> None:
    sampled: Json = {"temperature": 1.0, "seed": 4, **GUIDANCE}
    assert (
        complete(server, **sampled)["choices"][0]["text"]
        == complete(server, **sampled)["choices"][0]["text"]
    )
    words = complete(
        server, **sampled, structured_outputs={"regex": "(sea|forest)( sea| forest){3}"}
    )
    assert set(words["choices"][0]["text"].split()) <= {"sea", "forest"}
    unique: Json = {
        "logits_processors": [{"name": "no_repeat_ngram", "n": 1}],
        "return_token_ids": True,
    }
    ids = complete(server, **sampled, **unique)["choices"][0]["token_ids"]
    assert len(set(ids)) == len(ids) > 3


def test_a_server_without_rays_token_says_so(server: ServeProcess) -> None:
    assert "Ray's token authentication is off" in server.log.read_text(errors="replace")
