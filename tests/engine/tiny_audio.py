"""A random-weight model that hears: Qwen2-Audio. Its processor is made here, too: no hub.

Sounds last 0.2 to 0.6 seconds, and have 5 to 15 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2Config,
    WhisperFeatureExtractor,
)
from typing_extensions import override

from tests.engine.tiny_models import DECODER, HIDDEN, SPECIAL_IDS, VOCAB_SIZE, make_tokenizer
from tests.engine.tiny_vision import Streams, draw

PLACE = "<|audio_bos|><|AUDIO|><|audio_eos|>"
"""How a prompt shows where its sound is."""
RATE = 16_000
MELS, SECONDS = 16, 30  # vLLM takes windows of 30 seconds only


def audio(seed: int = 0) -> tuple[Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor]:
    names = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    config = Qwen2AudioConfig(
        audio_config=Qwen2AudioEncoderConfig(
            num_mel_bins=MELS,
            encoder_layers=2,
            encoder_attention_heads=2,
            encoder_ffn_dim=2 * HIDDEN,
            d_model=HIDDEN,
            max_source_positions=50 * SECONDS,
        ),
        text_config=Qwen2Config(**{**DECODER, "vocab_size": VOCAB_SIZE + len(names)}),
        audio_token_index=VOCAB_SIZE,
        **SPECIAL_IDS,
    )
    config.dtype = "float32"
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    hears = WhisperFeatureExtractor(feature_size=MELS, chunk_length=SECONDS)
    model = Qwen2AudioForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    draw(model, torch.Generator().manual_seed(seed))
    return model, Qwen2AudioProcessor(hears, tokenizer)


def build_audio(folder: Path) -> Path:
    """Write the model and its processor to `folder`, float32, and return it.

    Published checkpoints, and so vLLM, call the decoder otherwise than transformers does now.
    """
    model, processor = audio()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    file, now = folder / "model.safetensors", "language_model.model.model."
    weights = {key.replace(now, "language_model.model."): x for key, x in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    return folder


def sound(seed: int, seconds: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Three tones."""
    rng = np.random.default_rng(seed)
    at = np.arange(int(seconds * RATE)) / RATE
    tones = [np.sin(2 * np.pi * hertz * at) for hertz in rng.uniform(100, 4000, 3)]
    return np.sum(tones, axis=0, dtype=np.float64).astype(np.float32) / 3


class AudioStreams(Streams):
    """What transformers says of a prompt with sounds, as a function of the tokens after it."""

    def __init__(self) -> None:
        self.model, self.processor = audio()

    @override
    def prompt(
        self, text: str, images: list[Any], is_chat: bool = False
    ) -> dict[str, torch.Tensor]:
        """Inputs of the model. images: here they are sounds."""
        given = {"audio": images, "sampling_rate": RATE} if images else {}
        return dict(self.processor(text=text, return_tensors="pt", **given))
