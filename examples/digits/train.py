"""Train the picture model and write it, with its tokenizer, to examples/digits/model.

    .venv/bin/python -m examples.digits.train [--steps N] [--out FOLDER]

It is seeded, so the same versions on the same kind of CPU give the same weights. A row is a prompt
and 64 pixels, and only the pixels are learned. In one row of five the prompt is `<null>`: that
teaches the model what digits look like without a class, which is the negative under guidance.

1000 pictures are few: without what follows, the loss on pictures that were held out soon rises.
Pictures are shifted to the left or right by up to one pixel. One in ten of the pixels that the
model reads is a shade off, but never one that it predicts. What each block adds is dropped out at
random.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.digits.images import (
    CLASSES,
    LEVELS,
    MODEL,
    NULL_ID,
    PIXELS,
    SIDE,
    VOCABULARY,
    Array,
    Split,
    class_id,
    make_tokenizer,
    splits,
)

SEED = 0
STEPS = 700
ROWS = 64
NULL_SHARE = 0.2
PEAK_RATE = 2e-3
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.3
OFF_SHARE, OFF_BY = 0.15, 1
DROPOUT = 0.1
REPORT_EVERY = 100
IGNORED = -100
SHAPE = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 256,
}
CLASS_IDS = np.array([class_id(label) for label in range(CLASSES)])


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        **SHAPE,
        vocab_size=len(VOCABULARY),
        max_position_embeddings=2 * PIXELS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,  # a picture ends after 64 tokens, by max_tokens
    )
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config)


def shift(images: Array, columns: Array) -> Array:
    """Move each picture [n, 64] to the right by its number of columns, -1 to 1."""
    padded = np.pad(images.reshape(-1, SIDE, SIDE), ((0, 0), (0, 0), (1, 1)))
    moved = [image[:, 1 - by : 1 - by + SIDE] for image, by in zip(padded, columns, strict=True)]
    return np.stack(moved).reshape(-1, PIXELS)


def draw(split: Split, rng: np.random.Generator) -> torch.Tensor:
    """A batch of rows [ROWS, 1 + 64]."""
    chosen = rng.integers(len(split), size=ROWS)
    prompts = CLASS_IDS[split.labels[chosen]]
    prompts[rng.random(ROWS) < NULL_SHARE] = NULL_ID
    return rows(prompts, shift(split.images[chosen], rng.integers(-1, 2, size=ROWS)))


def rows(prompts: Array, images: Array) -> torch.Tensor:
    return torch.from_numpy(np.column_stack([prompts, images]).astype(np.int64))


def loss_of(
    model: LlamaForCausalLM, ids: torch.Tensor, read: torch.Tensor | None = None
) -> torch.Tensor:
    """Nats per pixel of `ids`, where the model reads `read` in their place."""
    labels = ids.clone()
    labels[:, 0] = IGNORED
    loss: torch.Tensor = model(input_ids=ids if read is None else read, labels=labels).loss
    return loss


def a_little_off(ids: torch.Tensor) -> torch.Tensor:
    """`ids` with some of the pixels lighter or darker."""
    noise = torch.randint(-OFF_BY, OFF_BY + 1, ids.shape) * (torch.rand(ids.shape) < OFF_SHARE)
    read = (ids + noise).clamp(0, LEVELS - 1)
    read[:, 0] = ids[:, 0]
    return read


@contextmanager
def dropout(model: LlamaForCausalLM) -> Iterator[None]:
    """Within the block, what each attention and each MLP adds is dropped out at random."""

    def drop(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, DROPOUT, training=torch.is_grad_enabled())

    parts = [part for layer in model.model.layers for part in (layer.self_attn.o_proj, layer.mlp)]
    hooks = [part.register_forward_hook(drop) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, split: Split) -> tuple[float, float]:
    """Of pictures as they are: with their class, and with `<null>`."""
    prompts = CLASS_IDS[split.labels], np.full(len(split), NULL_ID)
    with_class, without = (loss_of(model, rows(p, split.images)).item() for p in prompts)
    return with_class, without


def rate_at(step: int, steps: int) -> float:
    """Share of the peak rate: a linear warm-up, then a cosine down to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 + 0.5 * math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))


def fit(model: LlamaForCausalLM, parts: dict[str, Split], steps: int) -> list[float]:
    """Train in place. Returns the loss of each step."""
    with dropout(model):
        return _fit(model, parts, steps)


def _fit(model: LlamaForCausalLM, parts: dict[str, Split], steps: int) -> list[float]:
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    losses: list[float] = []
    started = time.monotonic()
    for step in range(1, steps + 1):
        ids = draw(parts["generator"], rng)
        loss = loss_of(model, ids, a_little_off(ids))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % REPORT_EVERY == 0 or step == steps:
            with_class, without = held_out_loss(model, parts["held out"])
            print(
                f"step {step}/{steps}: loss {np.mean(losses[-REPORT_EVERY:]):.3f}, "
                f"held out {with_class:.3f}, with {without:.3f} for <null>, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
    return losses


def save(model: LlamaForCausalLM, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=MODEL)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = make_model()
    print(f"{model.num_parameters():,} parameters")
    fit(model, splits(), args.steps)
    save(model, args.out)


if __name__ == "__main__":
    main()
