"""examples/digits: the committed model, its script, its result and the page about it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfg_core.reference import guided_generate
from examples.digits import train
from examples.digits.images import (
    CLASSES,
    FOLDER,
    MODEL,
    NULL_ID,
    PIXEL_IDS,
    PIXELS,
    VOCABULARY,
    Split,
    class_id,
    from_text,
    splits,
    to_text,
)
from examples.digits.sample import RESULT, SCALES, Guidance, sample, start_engine, table

PER_CLASS, BLOCK = 60, 30
PAGE = FOLDER.parents[1] / "docs" / "digits.md"
NAME = "LlamaForCausalLM"
GREEDY_SCALES = (1.5, 3.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    import vllm.envs
    from vllm import ModelRegistry

    vllm.envs.disable_envs_cache()  # another test's engine may have cached the environment
    # vLLM would start a process to look at the model's class, which takes half a minute.
    ModelRegistry.register_model(NAME, ModelRegistry.models[NAME].load_model_cls())
    llm = start_engine()
    yield llm
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    vllm.envs.disable_envs_cache()


@pytest.fixture(scope="module")
def judge(llm: Any) -> Any:
    """Made after the engine: transformers, which vLLM imports, would import scikit-learn, too."""
    from examples.digits.judge import Judge

    return Judge()


# --- pictures, tokens and texts -------------------------------------------------------------------


def test_no_picture_is_in_two_splits() -> None:
    parts = splits()
    images = np.concatenate([part.images for part in parts.values()])
    assert [len(part) for part in parts.values()] == [1000, 400, 397]
    assert len(np.unique(images, axis=0)) == len(images)


def test_a_pixel_is_one_token_and_one_character() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    image = splits()["judge"].images[0]
    text = to_text(image)
    assert tokenizer(f"<7>{text}").input_ids == [class_id(7), *image]
    assert tokenizer("<null>").input_ids == [NULL_ID]
    assert tokenizer.decode(list(image)) == text
    assert (from_text(text) == image).all()


# --- the training script --------------------------------------------------------------------------


def test_a_few_steps_lower_the_loss_and_are_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    losses = train.fit(train.make_model(), splits(), 20)
    again = train.fit(train.make_model(), splits(), 5)
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert losses[:5] == again  # within the warm-up the rate does not depend on the steps
    assert "held out" in capsys.readouterr().out


def test_the_model_knows_digits_that_it_has_not_seen() -> None:
    """The committed weights, without an engine: pixels cost less with the class than without."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with_class, without = train.held_out_loss(model, splits()["held out"])
    assert with_class < without - 0.03
    assert without < 0.6 * np.log(len(PIXEL_IDS))


# --- guidance -------------------------------------------------------------------------------------


def test_guidance_gives_the_digit_asked_for_and_takes_variety(llm: Any, judge: Any) -> None:
    """Margins are beyond noise: the intervals of the shares do not meet."""
    off, on = (judge.measure(sample(llm, Guidance(scale), PER_CLASS)) for scale in (1.0, 3.0))
    assert off["accuracy_interval"][1] < on["accuracy_interval"][0]
    assert on["distance"] < off["distance"]
    assert on["kinds"] < 0.95 * off["kinds"]
    assert off["equal_to_learned"] == on["equal_to_learned"] == 0


def test_a_window_leaves_the_pixels_before_it_alone(llm: Any) -> None:
    half = PIXELS // 2
    plain, late, early = (
        sample(llm, guidance, 2).images
        for guidance in (Guidance(1.0), Guidance(3.0, half, PIXELS), Guidance(3.0, 0, half))
    )
    assert (late[:, :half] == plain[:, :half]).all()
    assert (late != plain).any()
    assert (early[:, :half] != plain[:, :half]).any()


def test_greedy_pictures_equal_the_reference(llm: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    clear = 0
    for scale in GREEDY_SCALES:
        found = sample(llm, Guidance(scale), 1, temperature=0.0, allowed_token_ids=None)
        for label in range(0, CLASSES, 3):
            want = guided_generate(
                model, [class_id(label)], [NULL_ID], scale=scale, max_new_tokens=PIXELS
            )
            if want.min_gap > 2e-4 * scale:  # else rounding may decide a pixel
                assert found.images[label].tolist() == want.token_ids, (label, scale)
                clear += 1
    assert clear >= 6


def test_text_prompts_are_the_same_as_token_ids(llm: Any) -> None:
    from vllm import SamplingParams

    extra = {"guidance_scale": 3.0, "negative_prompt": "<null>"}
    params = SamplingParams(
        temperature=0.0, max_tokens=PIXELS, allowed_token_ids=PIXEL_IDS, extra_args=extra
    )
    (answer,) = llm.generate("<3>", params, use_tqdm=False)
    (ids,) = (
        found.images[found.labels == 3]
        for found in (sample(llm, Guidance(3.0), 1, temperature=0.0),)
    )
    assert (from_text(answer.outputs[0].text) == ids[0]).all()


# --- the judge and the committed result -----------------------------------------------------------


def test_the_judge_measures_what_it_says(judge: Any) -> None:
    real = judge.real()
    assert real["accuracy"] > 0.96
    one = splits()["held out"].images[:1].repeat(BLOCK * CLASSES, axis=0)
    labels = np.repeat(np.arange(CLASSES, dtype=np.uint8), BLOCK)
    equal = judge.measure(Split(one, labels))
    assert equal["accuracy"] == 0.1
    assert equal["distance"] == pytest.approx(0)
    assert equal["kinds"] == pytest.approx(1)
    learned = judge.measure(Split(splits()["generator"].images[: len(labels)], labels))
    assert learned["equal_to_learned"] == learned["copies"] == 1


def test_the_page_has_the_table_of_the_result() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert "\n".join(table(result)) in PAGE.read_text(encoding="utf-8")
    assert {found["scale"] for found in result["points"]} == {point.scale for point in SCALES}
    shown = [text for found in result["points"] for texts in found["shown"] for text in texts]
    assert all(len(from_text(text)) == PIXELS for text in shown)


def test_the_configuration_is_valid() -> None:
    command = [sys.executable, "-m", "cfg_serve", "check", "examples/digits/digits.yaml"]
    done = subprocess.run(command, cwd=PAGE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_model_is_small_and_has_the_vocabulary() -> None:
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == len(VOCABULARY)
    assert (MODEL / "model.safetensors").stat().st_size < 1_000_000
