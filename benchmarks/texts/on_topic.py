"""What guidance is for, on the embedded model: how the share of on-topic words moves with the
scale.

    python benchmarks/bench_on_topic.py [--stories 240] [--scales 1 1.5 2 3 5]

Each point samples stories through vLLM with the plugin, at temperature 1, evenly over the model's
topics. The conditional prompt names a topic; the negative names none ("topic-free") or another one
("opposing"). The model's training text lets the topic decide only some of the words, so at scale 1
about half of them are off topic; `guided = negative + s * (conditional - negative)` removes what
the two prompts have in common.

Prints a card, a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "models" / "training")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

NEGATIVES = {"topic-free": "free", "opposing": "opposing"}
MAX_TOKENS = 250


def make_engine() -> LLM:
    from vllm import LLM

    from cfg_core.vllm_plugin import guided_engine_args

    return LLM(
        str(ROOT / "models" / "stories"),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=64,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        **guided_engine_args(),
    )


def sample(llm: LLM, kind: str, negative: str, scale: float, num_stories: int) -> list[list[int]]:
    """`num_stories` stories as token ids; story i is about topic i modulo the number of topics."""
    from measure import TOPIC_NAMES, negative_ids, prompt_ids
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    prompts, params = [], []
    for i in range(num_stories):
        topic = TOPIC_NAMES[i % len(TOPIC_NAMES)]
        extra: dict[str, Any] = {"guidance_scale": scale}
        if scale != 1:
            extra["negative_prompt_token_ids"] = negative_ids(tokenizer, kind, negative, topic)
        prompts.append({"prompt_token_ids": prompt_ids(tokenizer, kind, topic)})
        params.append(
            SamplingParams(temperature=1.0, seed=i, max_tokens=MAX_TOKENS, extra_args=extra)
        )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def measure(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per negative and scale."""
    from measure import measure_point

    rows = []
    for name, negative in NEGATIVES.items():
        for scale in args.scales:
            start = time.perf_counter()
            texts = sample(llm, args.kind, negative, scale, args.stories)
            seconds = time.perf_counter() - start
            point = measure_point(llm.get_tokenizer(), texts)
            tokens = sum(map(len, texts))
            rows.append(
                {"negative": name, "scale": scale, **vars(point), "tokens_per_s": tokens / seconds}
            )
            print(table_row(rows[-1]), flush=True)
    return rows


def table_row(row: dict[str, Any]) -> str:
    shares = " | ".join(
        f"{row[name]:.1%}" for name in ("on_topic", "on_opposite", "grammatical", "ended")
    )
    return f"| {row['negative']} | {row['scale']:g} | {shares} | {row['tokens_per_s']:.0f} |"


def card(args: argparse.Namespace) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    return (
        f"on-topic share of {args.stories} stories a point, {args.kind} prompts, temperature 1, "
        f"commit {commit.strip() or '?'}, {os.cpu_count()} x {platform.machine()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stories", type=int, default=240)
    parser.add_argument("--kind", choices=("completion", "chat"), default="completion")
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 1.5, 2.0, 3.0, 5.0])
    args = parser.parse_args()
    llm = make_engine()
    print(card(args))
    print(
        "| negative | scale | on topic | on the opposing topic | grammatical | ended | output"
        " tokens/s |"
    )
    print("|---|---|---|---|---|---|---|")
    rows = measure(llm, args)
    print(
        json.dumps(
            {"benchmark": "on_topic", "kind": args.kind, "stories": args.stories, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
