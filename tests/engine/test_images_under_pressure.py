"""Images on engines with little room: the encoder's budget and cache, the step, the KV pool.

Each test has an engine of its own, and no two are alive at a time: image models read vLLM's state
of the process while they run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.engines import ROOMY, Engine, plain, tokens
from tests.engine.image_cases import NEW_TOKENS, Bench, all_guided, bench_of, encoded, guided, run
from tests.engine.tiny_models import DECODER
from tests.engine.tiny_vision import PLACES, Streams, picture


@pytest.fixture(scope="module", params=sorted(PLACES))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    name: str = request.param
    return bench_of(name, tmp_path_factory.mktemp(name))


def test_in_one_batch_each_picture_is_computed_once(bench: Bench) -> None:
    """The second round finds everything in the prefix cache and the encoder's cache."""
    engine = Engine(bench.folder, **ROOMY)
    try:
        with encoded(engine) as counts:
            assert all_guided(engine, bench) == bench.want
        assert sum(counts) == 4  # of 12 images in the prompts of all streams
        with encoded(engine) as counts:
            assert all_guided(engine, bench) == bench.want
        assert sum(counts) == 0
        assert engine.stats()["solo_rows"] == 0
    finally:
        engine.close()


def test_one_picture_at_a_time(bench: Bench) -> None:
    """A step computes one image, and the encoder's cache holds one. Groups wait for theirs.

    Prompts are read in chunks of at most 16 tokens, and groups are preempted.
    """
    engine = Engine(
        bench.folder,
        num_gpu_blocks_override={"llava": 14, "paddleocr_vl": 8}[bench.name],
        max_num_batched_tokens=16,
        max_num_seqs=16,
        max_model_len=128,
    )
    try:
        assert engine.scheduler.encoder_cache_manager.cache_size == 16
        with engine.whole_preemptions():
            for _ in range(2):
                assert all_guided(engine, bench) == bench.want
        stats = engine.stats()
        assert stats["group_preemptions"] > 0
        assert stats["solo_rows"] <= stats["joint_steps"] // 20
    finally:
        engine.close()


def test_the_encoder_alone_is_the_bottleneck(bench: Bench) -> None:
    """Budget and pool are roomy, and the encoder's cache holds one image.

    Without the encoder's room in the plan, 8 samples of LLaVA are taken back here. The one that is
    left is of a negative with one token, which is admitted while its leader cannot sample.
    """
    engine = Engine(bench.folder, **{**ROOMY, "max_num_batched_tokens": 512})
    manager = engine.scheduler.encoder_cache_manager
    manager.cache_size = manager.num_free_slots = manager.num_freeable_slots = 16
    engine.scheduler.max_num_encoder_input_tokens = 16
    try:
        assert all_guided(engine, bench) == bench.want
        assert engine.stats()["solo_rows"] <= 1
    finally:
        engine.close()


def test_mixed_with_plain_requests_that_equal_stock(bench: Bench) -> None:
    cases = list(bench.cases.values())
    options: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}]
    texts = []
    for is_guided in (False, True):
        engine = Engine(bench.folder, guided=is_guided, **ROOMY)
        try:
            for more in options:
                given = [plain(max_tokens=NEW_TOKENS, **more) for _ in cases]
                texts.append(tokens(run(engine, [case.prompt for case in cases], given)))
            if is_guided:
                prompts = [case.prompt for case in cases for _ in "ab"]
                params = [p for case in cases for p in (guided(case), plain(max_tokens=NEW_TOKENS))]
                got = tokens(run(engine, prompts, params))
        finally:
            engine.close()
    assert texts[:2] == texts[2:]
    assert texts[0] == bench.plain
    assert got[::2] == list(bench.want.values())
    assert got[1::2] == bench.plain


@pytest.mark.parametrize("bench", ["llava"], indirect=True)
def test_priority_and_drafts(bench: Bench, tmp_path: Path) -> None:
    """A small text model drafts for all streams. It sees no image.

    vLLM 0.32 has no draft models for the other one.
    """
    vocab_size = len(Streams(bench.folder, bench.name).processor.tokenizer)
    drafter = LlamaForCausalLM(LlamaConfig(**{**DECODER, "vocab_size": vocab_size}))
    drafter.float().save_pretrained(tmp_path)
    engine = Engine(
        bench.folder,
        **{**ROOMY, "max_num_batched_tokens": 256},
        scheduling_policy="priority",
        speculative_config={
            "method": "draft_model",
            "model": str(tmp_path),
            "num_speculative_tokens": 2,
        },
    )
    try:
        cases = list(bench.cases.values())
        outputs = engine.llm.generate(
            [case.prompt for case in cases],
            [guided(case) for case in cases],
            use_tqdm=False,
            priority=list(range(len(cases))),
        )
        engine.assert_idle()
        assert tokens(outputs) == list(bench.want.values())
    finally:
        engine.close()


def test_a_text_model_has_no_images(model_folder: Callable[[str], Path]) -> None:
    engine = Engine(model_folder("llama"), **ROOMY)
    try:
        fields = {"guidance_scale": 2, "negative_multi_modal_data": {"image": picture(1)}}
        with pytest.raises(ValueError, match="reads text only"):
            engine.generate([[5, 6, 7]], [plain(extra_args=fields)])
    finally:
        engine.close()
