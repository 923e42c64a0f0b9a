"""Sounds in leaders and followers: guided text equals the formula on transformers' logits.

The way of images (test_images.py), which all media share. A follower has a noised sound, none, or
the leader's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.engine.engines import ROOMY, Engine, plain, tokens
from tests.engine.tiny_audio import PLACE, AudioStreams, build_audio, sound
from tests.engine.tiny_vision import use_stand_in

NEW_TOKENS = 12
LEAST_GAP = 5e-4
"""Least gap between the two best tokens of a step: 8 times what rounding can change."""
ASKS = f"user: {PLACE} What is heard? answer:"
QUIET = "user: What is heard? answer:"
ONE, TWO = sound(1, 0.5), sound(2, 0.3)
NOISED = (ONE * 0.3 + np.random.default_rng(0).normal(size=ONE.shape) * 0.3).astype(np.float32)


class Case(NamedTuple):
    """A request: its fields, and text and sounds of each stream, the leader's first."""

    fields: dict[str, Any]
    streams: list[tuple[str, list[Any]]]
    weights: list[float]


CASES = {
    "a noised sound": Case(
        {"guidance_scale": 2, "negative_multi_modal_data": {"audio": [NOISED]}},
        [(ASKS, [ONE]), (ASKS, [NOISED])],
        [2, -1],
    ),
    "no sound": Case(
        {"guidance_scale": 2, "negative_prompt": QUIET}, [(ASKS, [ONE]), (QUIET, [])], [2, -1]
    ),
    "another sound, three streams": Case(
        {
            "guidance_streams": [
                {"multi_modal_data": {"audio": [TWO]}, "weight": -0.5},
                {"prompt": QUIET, "weight": -0.25},
            ]
        },
        [(ASKS, [ONE]), (ASKS, [TWO]), (QUIET, [])],
        [1.75, -0.5, -0.25],
    ),
    "in the follower alone": Case(
        {
            "guidance_streams": [
                {"prompt": ASKS, "multi_modal_data": {"audio": [TWO]}, "weight": -0.5}
            ]
        },
        [(QUIET, []), (ASKS, [TWO])],
        [1.5, -0.5],
    ),
}


class Bench(NamedTuple):
    folder: Path
    want: list[list[int]]
    plain: list[list[int]]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    use_stand_in()
    folder = build_audio(tmp_path_factory.mktemp("audio"))
    model = AudioStreams()
    want = [texts(model, case.streams, case.weights) for case in CASES.values()]
    unguided = [texts(model, case.streams[:1], [1]) for case in CASES.values()]
    assert all(a != b for a, b in zip(want, unguided, strict=True))
    return Bench(folder, want, unguided)


def texts(
    model: AudioStreams, streams: list[tuple[str, list[Any]]], weights: list[float]
) -> list[int]:
    prompts = [model.prompt(text, sounds) for text, sounds in streams]
    output, gap = model.generate(prompts, weights, NEW_TOKENS)
    assert gap > LEAST_GAP
    return output


@pytest.fixture(scope="module", params=["roomy", "tight"])
def engine(request: pytest.FixtureRequest, bench: Bench) -> Iterator[Engine]:
    tight = {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 32, "max_num_seqs": 16}
    options = ROOMY if request.param == "roomy" else tight
    engine = Engine(bench.folder, **options)
    yield engine
    engine.close()


def test_guided_and_plain_requests(engine: Engine, bench: Bench) -> None:
    """All in one batch, twice: the second time from the caches."""
    prompts, params = [], []
    for case in CASES.values():
        text, sounds = case.streams[0]
        media = {"multi_modal_data": {"audio": sounds}} if sounds else {}
        prompts += [{"prompt": text, **media}] * 2
        params += [plain(max_tokens=NEW_TOKENS, extra_args=case.fields)]
        params += [plain(max_tokens=NEW_TOKENS)]
    for _ in range(2):
        got = tokens(engine.llm.generate(prompts, params, use_tqdm=False))
        engine.assert_idle()
        assert got[::2] == bench.want
        assert got[1::2] == bench.plain
    is_tight = engine.scheduler.max_num_scheduled_tokens < 100
    assert (engine.stats()["group_preemptions"] > 0) == is_tight
