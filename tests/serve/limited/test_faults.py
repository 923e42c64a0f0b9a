"""Faults and overload: a KV pool that is too small, too many requests, an engine that is killed."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import threading
import time
from typing import Any

import httpx
import pytest

from tests.serve.limited.server import KEY, bearer
from tools.serving.process import Json, ServeProcess

pytestmark = pytest.mark.slow

GUIDANCE: Json = {"guidance_scale": 2.0, "negative_prompt": "A story about the sea."}
RECOVERY_S = 240


def complete(
    server: ServeProcess, stream: bool = False, key: str = KEY, **fields: Any
) -> httpx.Response:
    body = {"prompt": "Once upon a time", "ignore_eos": True, "stream": stream, **fields}
    return httpx.post(
        f"{server.url}/v1/completions", json=body, timeout=RECOVERY_S, headers=bearer(key)
    )


def error_of(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    assert answer.headers["x-request-id"]
    return answer.status_code, error["message"]


def test_a_key_is_needed_and_says_what_one_may_do(limited_server: ServeProcess) -> None:
    url = f"{limited_server.url}/v1/completions"
    nobody = httpx.post(url, json={"prompt": "x"}, timeout=30)
    assert error_of(nobody) == (
        401,
        "An API key is needed: send the header `Authorization: Bearer KEY`.",
    )
    assert nobody.headers["www-authenticate"] == "Bearer"
    assert error_of(complete(limited_server, key="wrong"))[0] == 401
    status, message = error_of(complete(limited_server, key="other"))
    assert (status, "use all-MiniLM-L6-v2" in message) == (403, True)
    embedding = {"model": "all-MiniLM-L6-v2", "input": "x"}
    for key, expected in (("other", 200), ("wrong", 401), ("gen", 403)):
        answer = httpx.post(
            f"{limited_server.url}/v1/embeddings", json=embedding, headers=bearer(key), timeout=60
        )
        assert answer.status_code == expected
        body = {"model": "all-MiniLM-L6-v2", "prompt": "x"}
        answer = httpx.post(
            f"{limited_server.url}/tokenize", json=body, headers=bearer(key), timeout=60
        )
        assert answer.status_code == expected
    assert complete(limited_server, key="gen", max_tokens=2).status_code == 200
    assert complete(limited_server, key="gen", max_tokens=2, model="stories").status_code == 200
    assert error_of(complete(limited_server, key="gen", model=5))[0] == 403
    assert httpx.get(f"{limited_server.url}/health", timeout=30).status_code == 200
    assert httpx.get(f"{limited_server.url}/metrics", timeout=30).status_code == 401


def test_a_key_has_rates_and_a_least_priority(limited_server: ServeProcess) -> None:
    status, message = error_of(complete(limited_server, key="slow", priority=1))
    assert (status, message) == (
        400,
        "priority 1 is more urgent than this key allows: ask for 5 or more.",
    )
    assert complete(limited_server, key="slow", max_tokens=2).status_code == 200
    refused = complete(limited_server, key="slow", max_tokens=2)
    assert error_of(refused)[0] == 429
    assert 30 < int(refused.headers["retry-after"]) <= 60


def test_a_large_body_is_refused(limited_server: ServeProcess) -> None:
    status, message = error_of(complete(limited_server, prompt="x" * 5000))
    assert (status, message) == (
        413,
        "The body is larger than 4096 bytes: send less in one request.",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_group_that_never_fits_the_pool_is_refused(
    limited_server: ServeProcess, stream: bool
) -> None:
    answer = complete(limited_server, stream, max_tokens=400, **GUIDANCE)
    assert answer.status_code == 400
    assert "can never fit the KV pool" in answer.json()["error"]["message"]
    # A plain request fits.
    assert complete(limited_server, stream, max_tokens=400).status_code == 200


def test_too_many_requests_get_429(limited_server: ServeProcess) -> None:
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        calls = [
            pool.submit(complete, limited_server, bool(i % 2), max_tokens=200) for i in range(12)
        ]
        answers = [call.result() for call in calls]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(answers) > len(refused) > 0
    for answer in refused:
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("guidance", [{}, GUIDANCE])
def test_a_processor_that_fails_says_why_and_fails_alone(
    limited_server: ServeProcess, guidance: Json
) -> None:
    body = {"max_tokens": 40, **guidance, "logits_processors": [{"name": "breaks", "after": 5}]}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        beside = pool.submit(complete, limited_server, max_tokens=40)
        answer = complete(limited_server, **body)
    assert beside.result().status_code == 200
    assert answer.status_code == 500
    assert "breaks" in answer.json()["error"]["message"]
    assert "failed on purpose" in answer.json()["error"]["message"]
    streamed = complete(limited_server, stream=True, **body)
    *texts, last = [event.split("data: ")[1] for event in streamed.text.split("\n\n") if event]
    assert "failed on purpose" in json.loads(last)["error"]["message"]
    assert len(texts) >= 1


def test_the_controller_dies_and_no_replica_goes_with_it(limited_server: ServeProcess) -> None:
    """Serve starts another controller, which asks each replica for its state.

    The state includes the path of the replica's log file.
    """
    before = pids(limited_server, "ServeReplica")
    (controller,) = pids(limited_server, "ServeController")
    os.kill(controller, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (
        pids(limited_server, "ServeController") in ([], [controller])
        and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    for _ in range(20):
        assert complete(limited_server, max_tokens=2, **GUIDANCE).status_code == 200
        time.sleep(0.5)
    assert pids(limited_server, "ServeReplica") == before
    assert pids(limited_server, "ServeController") not in ([], [controller])


def pids(server: ServeProcess, words: str) -> list[int]:
    return sorted(
        process.pid for process in server.processes() if words in " ".join(process.cmdline())
    )


def test_an_engine_that_dies(limited_server: ServeProcess) -> None:
    """The streams of a dead engine end with an error event, and never with [DONE].

    A request that has sent no byte yet is retried, and succeeds on the replica that Serve starts.
    Until then /ready answers 503.
    """
    lines: list[str] = []
    started = threading.Event()

    def read_stream() -> None:
        body = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "stream": True}
        url = f"{limited_server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60, headers=bearer(KEY)) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                started.set()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        stream = pool.submit(read_stream)
        assert started.wait(30)
        waiting = pool.submit(complete, limited_server, max_tokens=200, **GUIDANCE)
        time.sleep(0.1)
        for process in limited_server.processes():
            if "EngineCore" in " ".join(process.cmdline()):
                process.kill()
        stream.result(timeout=30)
        assert "event: error" in lines
        assert "data: [DONE]" not in lines
        unready = httpx.get(f"{limited_server.url}/ready", timeout=30)
        assert unready.status_code == 503
        assert int(unready.headers["retry-after"]) >= 1
        answer = waiting.result(timeout=RECOVERY_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["guidance"]["guided_tokens"] == 200
    assert httpx.get(f"{limited_server.url}/ready", timeout=30).json()["engine"]["running"] == 0
