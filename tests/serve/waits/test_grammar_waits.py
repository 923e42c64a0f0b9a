"""Other clients go on while grammars are compiled that take too long."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.serve.grammar_bodies import COMPLETION, SLOW, outputs, slow_tag


def test_others_go_on_while_grammars_are_tried(http: httpx.Client, model: str) -> None:
    """Six slow grammars at once do not delay other clients for long.

    Some of their clients leave. After that a new grammar is compiled quickly.
    """
    ask = {"model": model, "prompt": "Once", "max_tokens": 4}
    known = {**ask, **outputs(choice=["red"])}
    # The first grammar waits until the process that tests grammars has started.
    assert http.post(COMPLETION, json=known, timeout=120).status_code == 200
    done = threading.Event()

    def attack(i: int) -> int | None:
        properties = {f"q{i}_{name}": value for name, value in SLOW.items()}
        body = {
            "model": model,
            "prompt": "x",
            **slow_tag(properties),
        }
        try:
            with httpx.Client(base_url=str(http.base_url), timeout=2.0 if i % 2 else 120) as client:
                return client.post(COMPLETION, json=body).status_code
        except httpx.TimeoutException:
            return None

    def watch() -> list[float]:
        waits = []
        while not done.is_set():
            started = time.monotonic()
            assert http.post(COMPLETION, json=ask).status_code == 200
            assert http.get("/ready").status_code == 200
            text = http.post(COMPLETION, json=known).json()["choices"][0]["text"]
            assert text == "red"
            waits.append(time.monotonic() - started)
        return waits

    with ThreadPoolExecutor(7) as pool:
        watcher = pool.submit(watch)
        statuses = list(pool.map(attack, range(6)))
        done.set()
        waits = watcher.result()
    assert set(statuses) <= {400, 429, None}
    assert {400, 429} & set(statuses)
    assert max(waits) < 8, waits
    started = time.monotonic()
    fresh = http.post(
        COMPLETION,
        json={"model": model, "prompt": "x", "max_tokens": 4, **outputs(choice=["new one"])},
    )
    assert fresh.status_code == 200
    assert time.monotonic() - started < 5
