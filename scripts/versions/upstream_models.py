"""Make the models that vLLM's own tests name, without a network. For upstream_tests.py.

vLLM takes `facebook/opt-125m` from the working directory, if there is such a folder. Most tests
read only the configuration, so most models have no weights. Two tests start an engine; their models
have random weights and two layers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "engine"))
import tiny_models  # type: ignore[import-not-found] # vLLM's own tests are `tests` here

POSITIONS = 40960  # more than any test asks for
IMAGE_TOKENS = 576  # as many as LLaVA has
IMAGE = "<image>"


def plain() -> dict[str, PretrainedConfig]:
    """Models of text: name on the hub -> configuration. transformers' defaults are their sizes."""
    opt = transformers.OPTConfig(architectures=["OPTForCausalLM"])
    return {
        "facebook/opt-125m": opt,
        "facebook/opt-350m": opt,
        "Qwen/Qwen1.5-7B": transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"]),
        "Qwen/Qwen3-Next-80B-A3B-Instruct": transformers.Qwen3NextConfig(
            architectures=["Qwen3NextForCausalLM"]
        ),
    }


def with_weights() -> dict[str, PretrainedConfig]:
    """Models that engines run, with random weights. Their heads can be split over eight ranks."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    fields = tiny_models.DECODER | heads | {"max_position_embeddings": POSITIONS}
    return {
        "Qwen/Qwen3-0.6B": transformers.Qwen3Config(**fields),
        "hmellor/tiny-random-LlamaForCausalLM": transformers.LlamaConfig(**fields),
    }


WITH_IMAGES = ("llava-hf/llava-1.5-7b-hf", "Qwen/Qwen2.5-VL-3B-Instruct")
"""Models with images. The tests take no more from them than that, and the number of tokens."""


def make(folder: Path) -> None:
    """Make all models in `folder`."""
    transformers.utils.logging.disable_progress_bar()
    for name, config in plain().items():
        save(folder / name, config)
    for name, config in with_weights().items():
        save_with_weights(folder / name, config)
    for name in WITH_IMAGES:
        save_with_images(folder / name)


def save(folder: Path, config: PretrainedConfig, tokenizer: Any = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    (tokenizer or tiny_models.make_tokenizer()).save_pretrained(folder)


def save_with_weights(folder: Path, config: PretrainedConfig) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tiny_models.draw_weights(model, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    tiny_models.make_tokenizer().save_pretrained(folder)


def save_with_images(folder: Path) -> None:
    """BLIP-2, which in vLLM needs no torchvision (it has no public build for a CPU torch)."""
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    tokenizer = tiny_models.make_tokenizer()
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    text = {"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": POSITIONS}
    config = transformers.Blip2Config(
        architectures=["Blip2ForConditionalGeneration"],
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        text_config=text,
    )
    save(folder, config, tokenizer)
    transformers.Blip2Processor(
        BlipImageProcessorPil(), tokenizer, num_query_tokens=IMAGE_TOKENS
    ).save_pretrained(folder)
