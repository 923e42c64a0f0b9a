"""Encoders: this project's engine beside vLLM's pooling, on the same texts.

    python -m tools.gpu.encoders_beside_vllm [--texts 4096] [--model FOLDER]

Each engine embeds the same token ids twice, and the second time counts. Tells texts and tokens a
second, and the least cosine between their vectors. Prints a line of JSON, and fails if the vectors
differ.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.embeddings.workloads import minilm
from benchmarks.report import Report, parser

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

LENGTHS = (3, 17, 64, 128, 200, 256)
IDS = (1000, 30_000)
"""Of MiniLM's vocabulary: whole words."""
CLASS, SEPARATOR = 101, 102
LEAST = 0.999
"""Cosine of the two vectors of a text, both in bfloat16."""

Embed = Callable[[list[list[int]]], Any]


def ours(model: str, device: str) -> Embed:
    from cfg_core.prefill_only.engine import Engine

    engine = Engine.load(model, device=device)
    return lambda texts: np.asarray(engine.embed(texts), dtype=np.float32)


def vllms(model: str) -> Embed:
    from vllm import LLM

    llm = LLM(model, runner="pooling", enforce_eager=True, gpu_memory_utilization=0.3)

    def embed(texts: list[list[int]]) -> Any:
        prompts: Any = [{"prompt_token_ids": ids} for ids in texts]
        found = llm.embed(prompts, use_tqdm=False)
        return np.asarray([one.outputs.embedding for one in found], dtype=np.float32)

    return embed


def timed(embed: Embed, texts: list[list[int]]) -> tuple[Any, float]:
    embed(texts)
    began = time.perf_counter()
    vectors = embed(texts)
    return vectors, time.perf_counter() - began


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--texts", type=int, default=4096)
    options.add_argument("--model", help="a folder; default: MiniLM")
    args = options.parse_args()
    report = Report("encoders beside vllm", args)
    rng, model = random.Random(0), args.model or str(minilm())
    lengths = [rng.choice(LENGTHS) for _ in range(args.texts)]
    texts = [[CLASS, *(rng.randrange(*IDS) for _ in range(n - 2)), SEPARATOR] for n in lengths]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mine, mine_s = timed(ours(model, device), texts)
    theirs, theirs_s = timed(vllms(model), texts)
    unit = [v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (mine, theirs)]
    least = float((unit[0] * unit[1]).sum(-1).min())
    report.end(
        headline=f"{args.texts / mine_s:.0f} texts/s, vLLM {args.texts / theirs_s:.0f}; least"
        f" cosine {least:.5f}",
        tokens=sum(lengths),
        ours_s=round(mine_s, 3),
        vllm_s=round(theirs_s, 3),
        least_cosine=least,
    )
    return int(least < LEAST)


if __name__ == "__main__":
    sys.exit(main())
