"""The model of `cfg_core.reference` for models that take a second to read a text again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache


class Reference:
    """A model in transformers that computes the last row of logits only.

    All rows of a prompt of 32,000 tokens would take 19 GB. It remembers the keys and values of the
    streams that it has read, so that a stream is not read again for each of its tokens.
    """

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._read: dict[tuple[int, ...], Any] = {}

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor) -> SimpleNamespace:
        ids = tuple(input_ids[0].tolist())
        cache = self._read.pop(ids[:-1], None)
        fresh = input_ids if cache is None else input_ids[:, -1:]
        cache = cache or DynamicCache(config=self._model.config)
        logits = self._model(fresh, past_key_values=cache, logits_to_keep=1).logits
        self._read[ids] = cache
        return SimpleNamespace(logits=logits)

    def forget(self) -> None:
        """Free what the streams' keys and values take."""
        self._read.clear()
