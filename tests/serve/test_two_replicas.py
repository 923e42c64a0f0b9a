"""Two generators and an encoder that sleeps: what a client sees when one engine dies, and when nobody embeds.

chaos.py has every other fault, on several nodes.
"""

import asyncio
import re
import time
from itertools import pairwise

import httpx
import pytest
from load import Load
from serve_process import ServeProcess, shipped_config

pytestmark = pytest.mark.slow

LIMIT_S = 240
EMBEDDING = {"model": "all-MiniLM-L6-v2", "input": "The cat sat on the mat."}


@pytest.fixture(scope="module")
def pair():
    config = shipped_config()
    application = config["applications"][0]
    application["args"]["encoders"][0]["scales_to_zero"] = True
    _, replica, embedder = application["deployments"]
    replica["num_replicas"] = 2
    replica["ray_actor_options"]["num_cpus"] = 0.5
    del embedder["num_replicas"]
    embedder["autoscaling_config"] = {
        "min_replicas": 0,
        "max_replicas": 1,
        "downscale_to_zero_delay_s": 2,
        "metrics_interval_s": 1,
        "look_back_period_s": 2,
    }
    process = ServeProcess(config)
    try:
        process.wait_until_ready()
        wait_for(lambda: gauge(process, "replicas") == 2)
        yield process
    finally:
        process.stop()


def gauge(server, name):
    told = httpx.get(f"{server.url}/metrics", timeout=30).text
    return float(re.search(rf"^cfg_serve_{name}{{.*}} (\S+)$", told, re.MULTILINE)[1])


def find(server, words):
    return [process for process in server.processes() if words in " ".join(process.cmdline())]


def wait_for(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_an_encoder_sleeps_until_it_is_called(pair):
    """/ready is 200 without waking it; its first caller waits for it; then it sleeps again."""
    assert not find(pair, "ServeReplica:cfg:Embedder")
    ready = httpx.get(f"{pair.url}/ready", timeout=30)
    assert ready.status_code == 200
    assert not find(pair, "ServeReplica:cfg:Embedder")
    answer = httpx.post(f"{pair.url}/v1/embeddings", json=EMBEDDING, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"][0]["embedding"]) == 384
    wait_for(lambda: not find(pair, "ServeReplica:cfg:Embedder"))


def test_an_engine_dies_and_its_requests_go_to_the_other(pair):
    """Nothing is lost or wrong; only streams that had begun are told; the rest ends well, though one engine is away."""
    load = Load(pair.url, clients=6)

    async def strike():
        await load.learn()
        stop = asyncio.Event()
        clients = asyncio.ensure_future(load.run(stop))
        await asyncio.sleep(4)
        find(pair, "EngineCore")[0].kill()
        at = time.monotonic()
        await asyncio.sleep(12)
        stop.set()
        await clients
        return at

    at = asyncio.run(strike())
    assert all(outcome.kind == "right" for outcome in load.outcomes if outcome.ended < at)
    after = [outcome for outcome in load.outcomes if outcome.ended >= at]
    kinds = {outcome.kind for outcome in after}
    assert kinds <= {"right", "error event"}, [o for o in after if o.kind not in ("right", "error event")]
    told = [outcome for outcome in after if outcome.kind == "error event"]
    assert len(told) <= 6
    assert all(outcome.started < at and outcome.ended - at < 3 for outcome in told)
    assert sum(outcome.kind == "right" for outcome in after) > 6
    ends = sorted(outcome.ended for outcome in after)
    assert max(b - a for a, b in pairwise(ends)) < 10, "the other engine did not go on"
    wait_for(lambda: len(find(pair, "EngineCore")) == gauge(pair, "replicas") == 2)
