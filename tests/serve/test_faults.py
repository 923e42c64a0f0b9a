"""A server in distress: a pool too small, too many requests, an engine that is killed."""

import concurrent.futures
import json
import threading
import time
from pathlib import Path

import httpx
import pytest
from serve_process import ServeProcess, shipped_config

pytestmark = pytest.mark.slow

GUIDANCE = {"guidance_scale": 2.0, "negative_prompt": "A story about the sea."}
RECOVERY_S = 240


@pytest.fixture(scope="module")
def weak_server():
    """Room for 24 blocks of 32 tokens, two streams at a time, and two that wait."""
    config = shipped_config()
    application = config["applications"][0]
    application["args"]["engine"] |= {"block_size": 32, "num_gpu_blocks_override": 24, "max_num_seqs": 4}
    application["args"]["logits_processors"] = {"breaks": "faulty_processors:Breaks"}
    application["args"]["admission"] = {"streams_per_replica": 2, "max_queued_streams": 2}
    process = ServeProcess(config, {"PYTHONPATH": str(Path(__file__).parent)})
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def complete(server, stream=False, **fields):
    body = {"prompt": "Once upon a time", "ignore_eos": True, "stream": stream, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=RECOVERY_S)


@pytest.mark.parametrize("stream", [False, True])
def test_a_group_that_never_fits_the_pool_is_refused(weak_server, stream):
    answer = complete(weak_server, stream, max_tokens=400, **GUIDANCE)
    assert answer.status_code == 400
    assert "can never fit the KV pool" in answer.json()["error"]["message"]
    assert complete(weak_server, stream, max_tokens=400).status_code == 200  # alone it fits


def test_too_many_requests_get_429(weak_server):
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(complete, weak_server, bool(i % 2), max_tokens=200) for i in range(12)]
        answers = [call.result() for call in calls]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(answers) > len(refused) > 0
    for answer in refused:
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("guidance", [{}, GUIDANCE])
def test_a_processor_that_fails_says_why_and_fails_alone(weak_server, guidance):
    body = {"max_tokens": 40, **guidance, "logits_processors": [{"name": "breaks", "after": 5}]}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        beside = pool.submit(complete, weak_server, max_tokens=40)
        answer = complete(weak_server, **body)
    assert beside.result().status_code == 200
    assert answer.status_code == 500
    assert "breaks" in answer.json()["error"]["message"]
    assert "the gears are stuck" in answer.json()["error"]["message"]
    streamed = complete(weak_server, stream=True, **body)
    *texts, last = [event.split("data: ")[1] for event in streamed.text.split("\n\n") if event]
    assert "the gears are stuck" in json.loads(last)["error"]["message"]
    assert len(texts) >= 1


def test_an_engine_that_dies(weak_server):
    """Its streams end with an error event and never with [DONE]; a request without a byte yet is sent again
    and ends well, on the replica that Serve starts; meanwhile /ready says 503."""
    lines, started = [], threading.Event()

    def read_stream():
        body = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{weak_server.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                started.set()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        stream = pool.submit(read_stream)
        assert started.wait(30)
        waiting = pool.submit(complete, weak_server, max_tokens=200, **GUIDANCE)
        time.sleep(0.1)
        for process in weak_server.processes():
            if "EngineCore" in " ".join(process.cmdline()):
                process.kill()
        stream.result(timeout=30)
        assert "event: error" in lines
        assert "data: [DONE]" not in lines
        unready = httpx.get(f"{weak_server.url}/ready", timeout=30)
        assert unready.status_code == 503
        assert int(unready.headers["retry-after"]) >= 1
        answer = waiting.result(timeout=RECOVERY_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["guidance"]["guided_tokens"] == 200
    assert httpx.get(f"{weak_server.url}/ready", timeout=30).json()["engine"]["running"] == 0
