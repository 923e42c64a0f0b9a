"""The engine of a server: shared batches, tenants, cancellation, and the bounds of a call.

A failure affects only its own call.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch
import transformers

from cfg_core.errors import (
    CfgServeError,
    ConfigError,
    EngineDeadError,
    EngineError,
    RequestError,
)
from cfg_core.prefill_only import AsyncEngine, Engine, EngineOptions, RequestOptions
from tests.encoders import tiny_checkpoints as tiny

EMBED = RequestOptions()
POISON = tiny.WORDS[7]
"""A word whose embedding is NaN."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tiny.tiny_bert(tmp_path_factory.mktemp("bert"))
    model = transformers.AutoModel.from_pretrained(folder)
    (token,) = transformers.AutoTokenizer.from_pretrained(folder)(POISON, add_special_tokens=False)[
        "input_ids"
    ]
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[token] = float("nan")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
async def engine(path) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine.load(
        path, EngineOptions(dtype="float32", max_batch_tokens=256, sort_window=32)
    )
    yield engine
    await asyncio.sleep(0)
    assert engine.stats()["queued_sequences"] == 0
    assert engine.stats()["queued_tokens"] == 0
    engine.close()


TEXTS = [text for text in tiny.random_texts(60, seed=3) if POISON not in text]


async def test_concurrent_calls_give_the_same_as_single_calls(engine, path):
    with Engine.load(path, dtype="float32") as offline:
        expected = offline.embed(TEXTS)
    outputs = await asyncio.gather(*(engine.run([text], EMBED) for text in TEXTS))
    vectors = np.stack([output.array("embed") for (output,) in outputs])
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert [output.num_tokens for (output,) in outputs] == [len(text.split()) + 2 for text in TEXTS]


async def test_they_share_batches(engine):
    sizes = []
    submit = engine._pipeline._executor.submit
    engine._pipeline._executor.submit = lambda batch: (
        sizes.append(len(batch.sequences)),
        submit(batch),
    )[1]
    await asyncio.gather(*(engine.run(["waa wab"], EMBED) for _ in range(64)))
    assert sizes == [32, 32], "the window has 32 places"


async def test_totals_count_what_has_come(engine):
    assert engine.totals() == {"requests": 0, "sequences": 0, "tokens": 0, "batches": 0}
    await asyncio.gather(*(engine.run(["waa wab", "waa"], EMBED) for _ in range(20)))
    assert engine.totals() == {"requests": 20, "sequences": 40, "tokens": 140, "batches": 2}


async def test_a_nan_fails_its_own_call_only(engine):
    bad = asyncio.create_task(engine.run(["waa wab", f"wac {POISON}"], EMBED))
    good = await asyncio.gather(*(engine.run([text], EMBED) for text in TEXTS[:40]))
    with pytest.raises(EngineError, match="NaN or infinity for input 1"):
        await bad
    assert all(np.isfinite(output.array("embed")).all() for (output,) in good)


async def test_cancelled_calls_leave_the_queue(engine):
    tasks = [asyncio.create_task(engine.run([text], EMBED)) for text in TEXTS]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert all(isinstance(result, list) for result in results[1::2])


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "takes 1 to 2048 inputs, not 0"),
        ([""], "input 0 is empty"),
        (["waa", ""], "input 1 is empty"),
        ([[]], "input 0 has no tokens"),
        ([[5, 400]], "input 0 holds the token id 400: this model knows 0 to 399"),
        ([[5, -1]], "input 0 holds the token id -1"),
        ([[5, True]], "input 0 holds True"),
        ([("waa", "")], "input 0 must be a pair"),
        (
            ["waa " * 200],
            r"input 0 has 202 tokens and this model takes 128: shorten it, or ask for truncation",
        ),
        (["waa"] * 2049, "takes 1 to 2048 inputs, not 2049"),
    ],
)
async def test_bad_inputs(engine, inputs, words):
    with pytest.raises(RequestError, match=words):
        await engine.run(inputs, EMBED)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            RequestOptions(tasks=("classify",)),
            "does not compute classify: it computes embed, token_embed",
        ),
        (RequestOptions(dimensions=32), "not trained to be cut"),
        (RequestOptions(truncate_to=0), "truncation to 0 tokens"),
        (RequestOptions(truncate_to=129), "takes 1 to 128"),
    ],
)
async def test_bad_options(engine, options, words):
    with pytest.raises(RequestError, match=words):
        await engine.run(["waa"], options)


async def test_truncation_keeps_the_special_tokens(engine):
    ids = [2, *range(20, 40), 3]
    whole = await engine.run([[2, *range(20, 28), 3]], EMBED)
    cut = await engine.run([ids], RequestOptions(truncate_to=10))
    left = await engine.run([ids], RequestOptions(truncate_to=10, truncation_side="left"))
    end = await engine.run([[2, *range(32, 40), 3]], EMBED)
    np.testing.assert_allclose(cut[0].array("embed"), whole[0].array("embed"), atol=1e-6)
    np.testing.assert_allclose(left[0].array("embed"), end[0].array("embed"), atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "options", "field", "words"),
    [
        (["waa"] * 9, RequestOptions(prompt="w " * 600), "prompt", "1200 characters of prompt"),
        (["w" * 1200] * 9, EMBED, "input", "the inputs have 10800 characters together"),
        ([[5] * 100] * 30, EMBED, "input", "12000 characters"),
        (["waa"], RequestOptions(prompt="w " * 2000), "prompt", "input 0 has 4003 characters"),
        ([[5] * 40] * 30, EMBED, "input", "have 1200 tokens or more"),
        (["waa " * 40] * 30, EMBED, "input", "tokens or more, and one request may have 900"),
    ],
)
async def test_the_size_of_a_call_is_bounded(path, inputs, options, field, words):
    limits = {"max_request_chars": 10_000, "max_text_chars": 4000, "max_request_tokens": 900}
    engine = AsyncEngine.load(path, EngineOptions(dtype="float32", **limits))
    try:
        with pytest.raises(RequestError, match=words) as refused:
            await engine.run(inputs, options)
        assert refused.value.param == field
        assert engine.totals()["batches"] == 0
    finally:
        engine.close()


async def test_a_long_prompt_is_processed_in_a_thread(engine):
    """The event loop gets its turn every few milliseconds while 100 long texts are made.

    On its own thread they would take it from the first to the last one. Where other programs have
    the machine, a turn takes longer, and so does the whole.
    """
    longest, done, start = 0.0, asyncio.Event(), time.monotonic()

    async def look() -> None:
        nonlocal longest
        while not done.is_set():
            before = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - before)

    looking = asyncio.create_task(look())
    options = RequestOptions(prompt="waa " * 25_000, truncate_to=16)
    assert len(await engine.run(["wab"] * 100, options)) == 100
    done.set()
    await looking
    assert longest < max(0.2, (time.monotonic() - start) / 4)


async def test_a_small_call_of_another_tenant_does_not_wait(engine):
    texts = ["waa " * 98] * 500
    calls = [asyncio.create_task(engine.run(texts, EMBED, tenant="full")) for _ in range(3)]
    while engine.stats()["queued_sequences"] < 1000:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.005)
    before = engine.totals()["batches"]
    await engine.run(["waa"], EMBED, tenant="small")
    assert engine.totals()["batches"] - before <= 8
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_stuck_device_thread_is_reported(path):
    engine = AsyncEngine.load(path, EngineOptions(dtype="float32", hang_timeout_s=0.5))
    released = threading.Event()
    compute = engine._pipeline._runner.compute
    engine._pipeline._executor._compute = lambda batch: (released.wait(20), compute(batch))[1]
    try:
        call = asyncio.create_task(engine.run(["waa"], EMBED))
        async with asyncio.timeout(10):
            while engine.watch():  # noqa: ASYNC110 - as the replica's watchdog does
                await asyncio.sleep(0.1)
        assert engine.alive, "the thread runs, and does not come back"
        with pytest.raises(EngineDeadError):
            await engine.run(["waa"], EMBED)
        with pytest.raises(EngineDeadError):
            engine.check_health()
    finally:
        released.set()
        await call
        engine.close()


async def test_a_busy_loop_is_not_a_stuck_device(path):
    engine = AsyncEngine.load(path, EngineOptions(dtype="float32", hang_timeout_s=0.5))
    try:
        for _ in range(4):
            call = asyncio.create_task(engine.run(["waa"], EMBED))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            time.sleep(0.4)  # noqa: ASYNC251 - the loop is busy, and the batch is ready
            assert engine.watch()
            await call
    finally:
        engine.close()


async def test_a_batch_that_fails_does_not_stop_the_next(engine):
    compute = engine._pipeline._runner.compute
    calls = []

    def fail_once(batch):
        calls.append(batch)
        if len(calls) == 1:
            raise RuntimeError("planted")
        return compute(batch)

    engine._pipeline._executor._compute = fail_once
    with pytest.raises(EngineError, match="planted"):
        await engine.run(["waa"], EMBED)
    assert len(await engine.run(["waa"], EMBED)) == 1


async def test_a_dead_device_thread_is_reported(path):
    engine = AsyncEngine.load(path, EngineOptions(dtype="float32"))
    engine.close()
    with pytest.raises(EngineDeadError):
        await engine.run(["waa"], EMBED)


def test_the_inline_executor_is_refused(path):
    with pytest.raises(ConfigError, match="inline executor would block"):
        AsyncEngine.load(path, EngineOptions(workflow={"executor": "inline"}))


async def test_clients_do_not_disturb_each_other(engine, path):
    """Some clients cancel, send too much, or send nonsense.

    The vectors of the others stay exactly right.
    """
    generator = random.Random(5)
    with Engine.load(path, dtype="float32") as offline:
        expected = dict(zip(TEXTS, offline.embed(TEXTS), strict=True))
    checked = 0

    async def client() -> None:
        nonlocal checked
        for _ in range(25):
            text = generator.choice(TEXTS)
            inputs = generator.choice(
                [[text], [text], [text], [""], ["waa " * 300], [text, POISON], [[-3]]]
            )
            call = asyncio.create_task(engine.run(inputs, EMBED))
            if generator.random() < 0.2:
                await asyncio.sleep(generator.random() * 0.01)
                call.cancel()
            try:
                (output,) = await call
            except (CfgServeError, asyncio.CancelledError):
                continue
            np.testing.assert_allclose(output.array("embed"), expected[text], atol=1e-5)
            checked += 1

    await asyncio.gather(*(client() for _ in range(64)))
    assert checked > 200
