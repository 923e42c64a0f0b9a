"""The queue in front of an encoder, and the bounds of one request. No engine, no server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cfg_core.errors import OverloadedError, RequestError
from cfg_core.prefill_only.models.checkpoint import ModelInfo
from cfg_core.prefill_only.options import EngineOptions
from deployments.admission.encoder_queue import EncoderQueue
from deployments.admission.entries import Share
from deployments.config.encoders import EncoderArgs
from deployments.requests.encode.jobs import check_job
from deployments.requests.encode.readers import read_job

OPTIONS = EngineOptions()
EMBEDDER = ModelInfo(
    tasks=("embed", "token_embed"),
    dimension=4,
    max_input_tokens=256,
    vocab_size=30_000,
    dtype="float32",
)
RERANKER = ModelInfo(
    tasks=("classify",),
    dimension=None,
    max_input_tokens=256,
    vocab_size=30_000,
    dtype="float32",
    labels=("LABEL_0",),
)


# --- one request ----------------------------------------------------------------------------------


LONG = "p" * 3_900_000


@pytest.mark.parametrize(
    ("endpoint", "info", "body", "field", "words"),
    [
        ("embeddings", EMBEDDER, {"prompt": LONG, "input": ["a"] * 50}, "prompt", "195000050"),
        ("pooling", EMBEDDER, {"prompt": LONG, "input": ["a"] * 50}, "prompt", "195000050"),
        ("embeddings", EMBEDDER, {"prompt": LONG, "input": "a" * 200_000}, "prompt", "4100000"),
        ("rerank", RERANKER, {"query": LONG, "documents": ["a"] * 50}, "query", "195000050"),
        ("rerank", RERANKER, {"query": LONG, "texts": ["a"] * 50}, "query", "195000050"),
        ("score", RERANKER, {"text_1": LONG, "text_2": ["a"] * 50}, "text_1", "195000050"),
        ("embeddings", EMBEDDER, {"input": [[1000] * 250] * 2048}, "input", "512000 tokens"),
        ("embeddings", EMBEDDER, {"input": [1000] * 1_000_001}, "input", "4000004 characters"),
        ("pooling", EMBEDDER, {"input": [[7] * 999_999] * 5}, "input", "19999980 characters"),
        ("embeddings", EMBEDDER, {"input": [LONG] * 5}, "input", "19500000 characters"),
        ("rerank", EMBEDDER, {"query": "q", "documents": [LONG] * 5}, "documents", "19500000"),
        ("embeddings", EMBEDDER, {"input": "p" * 4_000_001}, "input", "this server takes 4000000"),
    ],
)
def test_what_is_too_large_is_refused_by_its_field(
    endpoint: Any, info: ModelInfo, body: dict[str, Any], field: str, words: str
) -> None:
    job = read_job(endpoint, body, "m", info)
    with pytest.raises(RequestError, match=words) as refused:
        check_job(job, OPTIONS)
    assert refused.value.param == field
    assert any(hint in refused.value.message for hint in ("shorten", "send"))


@pytest.mark.parametrize(
    ("endpoint", "info", "body"),
    [
        ("embeddings", EMBEDDER, {"prompt": "query: ", "input": ["a" * 3000] * 2048}),
        ("embeddings", EMBEDDER, {"input": [[1000] * 140] * 2048}),
        (
            "embeddings",
            EMBEDDER,
            {"input": [[1000] * 1500] * 2048, "truncate_prompt_tokens": 128},
        ),
        ("rerank", RERANKER, {"query": "q" * 1000, "documents": ["a" * 3000] * 2048}),
    ],
)
def test_what_honest_clients_send_is_taken(
    endpoint: Any, info: ModelInfo, body: dict[str, Any]
) -> None:
    check_job(read_job(endpoint, body, "m", info), OPTIONS)


def test_prompts_and_queries_count_in_the_estimates() -> None:
    def job(endpoint: Any, info: ModelInfo, **body: Any) -> Any:
        return read_job(endpoint, body, "m", info)

    plain = job("embeddings", EMBEDDER, input=["a" * 40] * 10)
    assert plain.num_tokens == 120
    prompted = job("embeddings", EMBEDDER, input=["a" * 40] * 10, prompt="p" * 400)
    assert prompted.num_tokens == 1120
    pairs = job("rerank", RERANKER, query="q" * 400, documents=["a" * 40] * 10)
    assert pairs.num_tokens == 10 * (102 + 12)
    cut = job("embeddings", EMBEDDER, input=["a" * 64_000] * 10, truncate=True)
    assert cut.num_tokens == 10 * 256
    assert cut.work == 10 * 256 + 10 * 1000, "tokenizing is work, too"


# --- the queue ------------------------------------------------------------------------------------


def queue(replicas: int = 1, **info: int) -> EncoderQueue:
    fields = {"max_batch_tokens": 100, "max_queued_tokens": 5000, **info}
    known = ModelInfo(
        tasks=("embed",), dimension=4, max_input_tokens=64, vocab_size=9, dtype="float32", **fields
    )
    return EncoderQueue(EncoderArgs(model="m"), known, 0.5, lambda: replicas)


class Client:
    """A request that waits, runs, or was refused."""

    def __init__(self, line: EncoderQueue, tenant: str, work: int, weight: float = 1.0) -> None:
        self.task = asyncio.ensure_future(line.enter(Share(tenant=tenant, weight=weight), work))

    @property
    def state(self) -> str:
        if not self.task.done():
            return "waits"
        return "refused" if isinstance(self.task.exception(), OverloadedError) else "runs"

    def end(self) -> None:
        self.task.result().leave()


async def clients(line: EncoderQueue, tenant: str, *works: int) -> list[Client]:
    made = [Client(line, tenant, work) for work in works]
    await settle()
    return made


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def states(made: list[Client]) -> list[str]:
    return [client.state for client in made]


async def test_one_tenant_fills_it() -> None:
    line = queue()
    greedy = await clients(line, "greedy", *[100_000] * 4, *[2000] * 4)
    assert states(greedy) == ["runs"] * 4 + ["waits"] * 2 + ["refused"] * 2
    for number in range(20):  # all at once, each with the engine full
        (small,) = await clients(line, f"small {number}", 10)
        assert small.state == "runs"
    error = greedy[-1].task.exception()
    assert isinstance(error, OverloadedError)
    assert error.reason == "encoder_queue"
    assert error.retry_after_s >= 1


async def test_a_second_request_goes_before_those_of_the_greedy() -> None:
    line = queue()
    greedy = await clients(line, "greedy", *[400] * 12)
    assert states(greedy).count("runs") == 4, "1600 tokens have a place"
    first, second, third = await clients(line, "small", 10, 10, 10)
    assert states([first, second, third]) == ["runs", "waits", "waits"], "there is no room"
    first.end()
    await settle()
    assert second.state == "runs"
    greedy[0].end()
    await settle()
    assert third.state == "runs"
    assert states(greedy).count("runs") == 4, "one has ended, and none has begun: others are here"


async def test_who_fills_the_queue_makes_room() -> None:
    line = queue()
    greedy = await clients(line, "greedy", *[400] * 16)
    assert states(greedy).count("waits") == 12
    honest = await clients(line, "honest", *[300] * 4)
    assert states(honest) == ["runs"] + ["waits"] * 3
    assert states(greedy)[-1] == "refused", "the queue holds 5000 tokens"
    assert "refused" not in states(honest)


async def test_a_replica_has_its_number_of_requests() -> None:
    line = queue(max_batch_tokens=512, max_queued_tokens=65_536)
    many = await clients(line, "many", *[1] * 300)
    assert states(many).count("runs") == 96
    line = queue(replicas=2, max_batch_tokens=512, max_queued_tokens=65_536)
    many = await clients(line, "many", *[1] * 500)
    assert states(many).count("runs") == 2 * 96


async def test_who_leaves_frees_its_place() -> None:
    line = queue()
    greedy = await clients(line, "greedy", *[400] * 6)
    greedy[5].task.cancel()
    await settle()
    assert line.stats == {"queued_requests": 1, "queued_tokens": 400}
    greedy[0].end()
    await settle()
    assert greedy[4].state == "runs"
    assert line.stats == {"queued_requests": 0, "queued_tokens": 0}
