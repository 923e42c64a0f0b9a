"""Two generators on different nodes, and an encoder that scales to zero.

The tests kill an engine and a node, and check what clients get. chaos.py has the other faults.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import httpx
import pytest

from tools.serving.cluster import Cluster
from tools.serving.load import Load, Outcome
from tools.serving.process import Json, ServeProcess, shipped_config

pytestmark = pytest.mark.slow

LIMIT_S = 240
SILENCE_S = 5.0  # the default of silence_timeout_s
ENCODER, ENGINE = "ServeReplica:cfg:Embedder", "EngineCore"
EMBEDDING = {"model": "all-MiniLM-L6-v2", "input": "The cat sat on the mat."}


def config() -> Json:
    config = shipped_config()
    application = config["applications"][0]
    application["args"]["encoders"][0]["scales_to_zero"] = True
    router, replica, embedder = application["deployments"]
    router["ray_actor_options"]["resources"] = embedder["ray_actor_options"]["resources"] = {
        "ingress": 1
    }
    replica["num_replicas"] = 2
    replica["ray_actor_options"]["resources"] = {"engine": 1}
    del embedder["num_replicas"]
    embedder["autoscaling_config"] = {
        "min_replicas": 0,
        "max_replicas": 1,
        "downscale_to_zero_delay_s": 2,
        "metrics_interval_s": 1,
        "look_back_period_s": 2,
    }
    return config


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Start a head node for the ingress, and two nodes for an engine each."""
    with Cluster() as cluster:
        for _ in range(2):
            cluster.add(engine=1)
        yield cluster


@pytest.fixture(scope="module")
def server(nodes: Cluster) -> Iterator[ServeProcess]:
    with nodes.serve(config()) as process:
        wait_for(lambda: process.replicas() == 2)
        yield process


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def struck(server: ServeProcess, strike: Callable[[], object]) -> tuple[float, list[Outcome]]:
    """Run six clients, and call `strike`. Return the time of that call, and all outcomes."""
    load = Load(server.url, clients=6)

    async def run() -> float:
        await load.learn()
        stop = asyncio.Event()
        clients = asyncio.ensure_future(load.run(stop))
        await asyncio.sleep(4)
        at = time.monotonic()
        strike()
        await asyncio.sleep(12)
        stop.set()
        await clients
        return at

    return asyncio.run(run()), load.outcomes


def check(at: float, outcomes: list[Outcome], told_within_s: float) -> None:
    """Check that no answer is lost or wrong, and that only streams that had begun got errors.

    They must get them within `told_within_s`. All other requests must succeed on the other engine.
    """
    assert all(outcome.kind == "right" for outcome in outcomes if outcome.ended < at)
    after = sorted(
        (outcome for outcome in outcomes if outcome.ended >= at), key=lambda outcome: outcome.ended
    )
    told = [outcome for outcome in after if outcome.kind != "right"]
    assert len(told) <= 6
    for outcome in told:
        assert outcome.kind == "error event", outcome
        assert outcome.stream
        assert outcome.started < at
        assert outcome.ended - at < told_within_s
    assert len(after) - len(told) > 6
    assert max(b.ended - a.ended for a, b in pairwise(after)) < 10, (
        "the other engine did not continue"
    )


def test_an_engine_dies_and_its_requests_go_to_the_other(
    server: ServeProcess, nodes: Cluster
) -> None:
    check(*struck(server, nodes.find(ENGINE)[0].kill), told_within_s=3)


def test_an_encoder_sleeps_until_it_is_called(server: ServeProcess, nodes: Cluster) -> None:
    """/ready answers 200 without a start of the encoder.

    The first call starts the encoder and waits for it. Later it scales to zero again.
    """
    assert not nodes.find(ENCODER)
    assert httpx.get(f"{server.url}/ready", timeout=30).status_code == 200
    assert not nodes.find(ENCODER)
    answer = httpx.post(f"{server.url}/v1/embeddings", json=EMBEDDING, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"][0]["embedding"]) == 384
    wait_for(lambda: not nodes.find(ENCODER))


def test_a_node_dies_and_its_requests_go_to_the_other(server: ServeProcess, nodes: Cluster) -> None:
    """Both engines run again, and the node of one dies.

    Nothing reports that the node is dead. Its requests are given up for lack of heartbeats.
    """
    wait_for(lambda: len(nodes.find(ENGINE)) == server.replicas() == 2)
    check(*struck(server, nodes.nodes[1].kill), told_within_s=SILENCE_S + 3)
