"""Make the embedded models: one tokenizer, the story model, and the smaller draft model for
speculative decoding.

    nice -n 10 python -m models.training.train [--out models]

Everything is seeded and runs on one thread, so the same versions on the same kind of CPU give the
same weights. One document per row (packing several documents into a row hides the prompt's weak
signal); rows of like length are batched together. Only the stories and the newline before them are
learned, not the prompts.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from .corpus import BOS, EOS, LESSONS, Row, Teller, rows
from .tokenizer import MAX_TOKENS, PAD, VOCAB_SIZE, save_tokenizer, train_tokenizer

SEED = 20240611
TOKENIZER_ROWS = 3000
ROWS_PER_CHUNK = 512  # sorted by length together
TOKENS_PER_BATCH = 2560
WARMUP_STEPS = 50
IGNORED = -100
ROPE_THETA = (
    1e6  # most of a head turns slowly: what attention learns on short texts holds at a distance too
)

SHAPES = {
    "stories": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
    },
    "stories-draft": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
    },
}
STEPS = {"stories": 1600, "stories-draft": 1600}
LESSON_SHARES = (0.13, 0.2, 0.67)
PEAK_RATE = {"stories": 2e-3, "stories-draft": 4e-3}

Encoded = tuple[list[int], list[int]]
"""Token ids and labels of one row."""


def encode(tokenizer: Tokenizer, row: Row) -> Encoded:
    ids: list[int] = []
    labels: list[int] = []
    encodings = tokenizer.encode_batch([text for text, _ in row.pieces], add_special_tokens=False)
    for encoding, (_, learn) in zip(encodings, row.pieces, strict=True):
        ids += encoding.ids
        labels += encoding.ids if learn else [IGNORED] * len(encoding.ids)
    return ids[:MAX_TOKENS], labels[:MAX_TOKENS]


def split(chunk: list[Encoded]) -> Iterator[list[Encoded]]:
    """Batches of like length, none over the token budget once it is padded."""
    batch: list[Encoded] = []
    for encoded in sorted(chunk, key=lambda encoded: len(encoded[0])):
        if batch and (len(batch) + 1) * len(encoded[0]) > TOKENS_PER_BATCH:
            yield batch
            batch = []
        batch.append(encoded)
    yield batch


def pad(batch: list[Encoded], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels, both [rows, tokens] int64, padded on the right (a causal model needs no mask
    for that)."""
    width = max(len(ids) for ids, _ in batch)
    ids = [ids + [pad_id] * (width - len(ids)) for ids, _ in batch]
    labels = [labels + [IGNORED] * (width - len(labels)) for _, labels in batch]
    return torch.tensor(ids), torch.tensor(labels)


def batches(
    tokenizer: Tokenizer, seed: int, tell: Teller
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The endless data of one lesson."""
    rng, source = random.Random(seed), rows(seed, tell)
    pad_id = tokenizer.token_to_id(PAD)
    assert pad_id is not None, "not our tokenizer"
    while True:
        chunk = [encode(tokenizer, row) for row in islice(source, ROWS_PER_CHUNK)]
        for batch in rng.sample(parts := list(split(chunk)), len(parts)):
            yield pad(batch, pad_id)


def make_model(name: str, tokenizer: Tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        **SHAPES[name],
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
        initializer_range=0.04,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config)


def rate_at(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine down to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 + 0.5 * math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))


def course(tokenizer: Tokenizer, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """All batches: one lesson after the other."""
    for lesson, (tell, share) in enumerate(zip(LESSONS, LESSON_SHARES, strict=True)):
        yield from islice(batches(tokenizer, SEED + lesson, tell), round(share * steps))


def fit(name: str, model: LlamaForCausalLM, tokenizer: Tokenizer, steps: int) -> None:
    """Train in place, in float32."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_RATE[name], betas=(0.9, 0.98), weight_decay=0.05
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    started, recent = time.monotonic(), 0.0
    for step, (ids, labels) in enumerate(course(tokenizer, steps), start=1):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent += loss.item()
        if step % 50 == 0:
            print(
                f"{name} step {step}/{steps} loss {recent / 50:.3f}"
                f" {time.monotonic() - started:.0f} s",
                flush=True,
            )
            recent = 0.0


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("models"), help="the folder that gets the model folders"
    )
    parser.add_argument("--only", choices=tuple(SHAPES), help="train one of the two")
    parser.add_argument("--steps", type=int, help="for a trial run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    texts = ("".join(text for text, _ in row.pieces) for row in islice(rows(SEED), TOKENIZER_ROWS))
    tokenizer = train_tokenizer(texts)
    for name in (args.only,) if args.only else tuple(SHAPES):
        model = make_model(name, tokenizer)
        print(f"{name}: {model.num_parameters():,} parameters")
        fit(name, model, tokenizer, args.steps or STEPS[name])
        save(model, tokenizer, args.out / name)


if __name__ == "__main__":
    main()
