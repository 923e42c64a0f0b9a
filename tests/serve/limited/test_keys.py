"""API keys are neither logged nor shown."""

from __future__ import annotations

import httpx

from tests.serve.limited.server import KEY, bearer
from tools.serving.process import ServeProcess


def test_no_key_is_logged_or_shown(limited_server: ServeProcess) -> None:
    """Not after an answer, a refusal, a wrong key, or a key in the wrong place."""
    wrong = "sk-wrong-and-secret"
    with httpx.Client(base_url=limited_server.url, timeout=60) as http:
        asked = {"model": "stories", "prompt": "Once", "max_tokens": 2}
        told = [
            http.post("/v1/completions", json=asked, headers=bearer(KEY)),
            http.post("/v1/completions", json=asked | {"n": "x"}, headers=bearer(KEY)),
            http.post("/v1/completions", json=asked, headers=bearer(wrong)),
            http.post("/v1/completions", json=asked, headers={"x-api-key": wrong}),
            http.get("/v1/models", headers={"authorization": f"Basic {wrong}"}),
            http.get("/metrics", headers=bearer(KEY)),
            http.get("/openapi.json"),
        ]
    assert [answer.status_code for answer in told] == [200, 400, 401, 401, 401, 200, 200]
    lines = [line for lines in limited_server.ray_logs().values() for line in lines]
    for text in (*(answer.text for answer in told), *lines):
        assert wrong not in text
        assert KEY not in text
