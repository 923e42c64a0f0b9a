"""Texts of megabytes.

Which part is tokenized, how long other requests wait, and how large an answer may become.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from cfg_core.errors import RequestError
from cfg_core.prefill_only import AsyncEngine, EngineOptions, RequestOptions
from cfg_core.prefill_only.stages import tokenizer
from cfg_core.prefill_only.stages.input_processor import InputProcessor
from tests.encoders import tiny_checkpoints as tiny

CUT = RequestOptions(truncate_to=64)


def words(count: int, seed: int, spaces: tuple[str, ...] = (" ",)) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(tiny.WORDS) + rng.choice(spaces) for _ in range(count))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
async def engine(path) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine.load(path, EngineOptions(dtype="float32"))
    yield engine
    engine.close()


def ids_of(processor: InputProcessor, item, options) -> list[int]:
    (sequence,) = processor.process([item], options)
    return list(sequence.token_ids)


SPACES = {"single": (" ",), "wide": (" ", " " * 60), "none": ("",), "lines": ("\n", " ", "\t \t")}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("pair", [False, True], ids=["text", "pair"])
def test_a_part_has_the_tokens_of_the_whole(path, minilm_path, monkeypatch, side, kind, pair):
    """With a real WordPiece tokenizer and random texts, whichever side is truncated."""
    for model in (path, minilm_path):
        pipeline = AsyncEngine.load(model, EngineOptions(dtype="float32"))
        processor: InputProcessor = pipeline._pipeline.input_processor
        pipeline.close()
        for seed in range(3):
            text = words(6000, seed, SPACES[kind]) + "end."
            item = (f"start {text}", text[::-1]) if pair else text
            options = RequestOptions(truncate_to=40 + 20 * seed, truncation_side=side)
            found = ids_of(processor, item, options)
            with monkeypatch.context() as patch:
                patch.setattr(tokenizer, "_first_length", lambda num_tokens: 10**9)
                assert found == ids_of(processor, item, options)


def test_only_a_part_is_tokenized(path):
    engine = AsyncEngine.load(path, EngineOptions(dtype="float32"))
    own, sizes = engine._pipeline.tokenizer, []
    encode = own.encode
    own.encode = lambda texts: [sizes.append(len(text)) for text in texts] and encode(texts)
    ids_of(engine._pipeline.input_processor, words(400_000, 1), CUT)
    engine.close()
    assert sum(sizes) < 10_000


async def test_far_too_long_texts_are_refused_without_reading_all(engine):
    text = words(900_000, 1)
    start = time.perf_counter()
    with pytest.raises(
        RequestError, match="input 1 has more than 128 tokens and this model takes 128"
    ):
        await engine.run(["waa", text], RequestOptions())
    assert time.perf_counter() - start < 0.5


async def test_texts_beyond_the_bound_are_refused(path):
    engine = AsyncEngine.load(path, EngineOptions(dtype="float32", max_text_chars=1000))
    with pytest.raises(
        RequestError, match="input 1 has 1001 characters, and this server takes 1000"
    ):
        await engine.run(["waa", "a" * 1001], CUT)
    with pytest.raises(RequestError, match="1001 characters"):
        await engine.token_ids("a" * 1001)
    with pytest.raises(RequestError, match="251 tokens are too many"):
        await engine.text_of([5] * 251)
    engine.close()


async def test_others_do_not_wait_for_long_texts(engine):
    """/tokenize must read a whole text.

    Six texts of 800,000 characters run at once, while short requests measure how long they wait.
    On the event loop, others would wait for at least one whole text. Where other programs have the
    machine, a turn takes longer, and so does a text.
    """
    long = words(200_000, 1)
    waits, ticks = [], []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            ticks.append(time.perf_counter() - before - 0.005)

    async def watch() -> None:
        for text in tiny.random_texts(20, seed=3):
            start = time.perf_counter()
            await engine.run([text], RequestOptions())
            waits.append(time.perf_counter() - start)
            await asyncio.sleep(0.01)

    ticker = asyncio.create_task(tick())
    start = time.perf_counter()
    heavy = [asyncio.create_task(engine.token_ids(long)) for _ in range(6)]
    await watch()
    watched = time.perf_counter() - start
    await asyncio.gather(*heavy)
    ticker.cancel()
    one_text = (time.perf_counter() - start) / len(heavy)
    assert max(waits) < max(0.5, one_text), waits
    assert max(ticks) < max(0.25, one_text / 2), max(ticks)
    assert watched < 5


async def test_detokenizing_long_lists_lets_others_run(engine):
    ids = await engine.token_ids("waa wab " * 100, add_special_tokens=False)
    text = await engine.text_of(ids * 50)
    assert text.split() == ["waa", "wab"] * 5000


@pytest.mark.parametrize(("task", "values"), [("embed", 64), ("token_embed", 64 * 4)])
async def test_answers_beyond_the_bound_are_refused_before_they_are_computed(
    engine, monkeypatch, task, values
):
    options = RequestOptions(tasks=(task,))
    inputs = ["waa wab"] * 3  # two words and two special tokens each
    outputs = await engine.run(inputs, options, 3 * values)
    assert sum(output.num_values for output in outputs) == 3 * values
    monkeypatch.setattr(engine._pipeline, "pump", lambda: pytest.fail("computed"))
    with pytest.raises(
        RequestError,
        match=f"would hold {3 * values} numbers, and this server sends {3 * values - 1}",
    ):
        await engine.run(inputs, options, 3 * values - 1)


async def test_slices_keep_order_and_places(engine):
    texts = [words(300, seed) for seed in range(120)]
    outputs = await engine.run(texts, CUT)
    one_by_one = [await engine.run([text], CUT) for text in texts[::17]]
    for output, (alone,) in zip(outputs[::17], one_by_one, strict=True):
        np.testing.assert_allclose(output.array("embed"), alone.array("embed"), atol=1e-5)
    texts[100] = ""
    with pytest.raises(RequestError, match="input 100 is empty"):
        await engine.run(texts, CUT)
