"""Memory: what a guided engine takes beyond one for plain requests.

    python benchmarks/bench_memory.py [--requests 32] [--tokens 64]

The physics. Both streams of a group live in the same KV pool, which has a fixed size and is counted
by bench_capacity.py. Beyond it, guidance needs the code of the plugin, tables of groups, and the
tensors of the blend. Those are one float32 row of the hidden size for each group where the head is
affine, and one float32 row of the vocabulary for each where it is not (`guidance_logprobs`, logits
processors, a repetition penalty).

Each load runs in a process of its own, with the same model, pool and threads: `stock, 2B plain` on
an engine without the plugin, `2B plain` with it, `B groups`, and `B groups, late blend`, which have
a repetition penalty. Told are the resident memory before the requests and its peak, in MiB, each
without the pool's size, and the growth between them. What is there before differs by some 70 MiB
from start to start. Prints a card, a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

from card import card  # noqa: E402

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
POOL_BYTES = 256 << 20
LIMIT_S = 300
LOADS = ("stock, 2B plain", "2B plain", "B groups", "B groups, late blend")


def resident_mib(field: str) -> float:
    """VmRSS is what is resident, VmHWM the most that ever was."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def run(load: str, requests: int, tokens: int) -> dict[str, float]:
    """In a process of its own: MiB before the requests, and at the peak."""
    from vllm import LLM, SamplingParams

    from cfg_core.vllm_plugin import guided_engine_args

    engine = LLM(
        str(MODEL),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=2 * requests,
        max_num_batched_tokens=1024,
        enforce_eager=True,
        kv_cache_memory_bytes=POOL_BYTES,
        **({} if load.startswith("stock") else guided_engine_args()),
    )
    numbers = random.Random(0)

    def ids() -> list[int]:
        return [numbers.randrange(100, 40_000) for _ in range(48)]

    def params() -> Any:
        penalty = 1.1 if "late" in load else 1.0
        extra = {"guidance_scale": 1.5, "negative_prompt_token_ids": ids()}
        return SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0.0,
            repetition_penalty=penalty,
            extra_args=extra if "groups" in load else None,
        )

    count = requests if "groups" in load else 2 * requests
    engine.generate([{"prompt_token_ids": ids()}], SamplingParams(max_tokens=2), use_tqdm=False)
    before = resident_mib("VmRSS")
    prompts: Any = [{"prompt_token_ids": ids()} for _ in range(count)]
    engine.generate(prompts, [params() for _ in range(count)], use_tqdm=False)
    return {"before": before, "peak": resident_mib("VmHWM")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--load", choices=LOADS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    if args.load:
        print(json.dumps(run(args.load, args.requests, args.tokens)))
        return
    print(json.dumps(card()))
    print("| load | before the requests, MiB | peak, MiB | growth |\n|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for load in LOADS:
        options = ["--requests", str(args.requests), "--tokens", str(args.tokens)]
        child = subprocess.run(
            [sys.executable, str(Path(__file__)), "--load", load, *options],
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=LIMIT_S,
        )
        found = json.loads(child.stdout.splitlines()[-1])
        rows.append({"load": load, **found})
        pool = POOL_BYTES / 2**20
        growth = found["peak"] - found["before"]
        cells = f"{found['before'] - pool:.0f} | {found['peak'] - pool:.0f} | {growth:+.0f}"
        print(f"| {load} | {cells} |", flush=True)
    line = {"benchmark": "memory", "card": card(), "requests": args.requests, "rows": rows}
    result = json.dumps({**line, "pool_mib": POOL_BYTES / 2**20})
    print(result)
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
