"""Memory: what a guided engine takes beyond one for plain requests.

    python -m benchmarks.engine.memory [--requests 32] [--tokens 64]

The physics. Both streams of a group live in the same KV pool, which has a fixed size and is counted
by capacity.py. Beyond it, guidance needs the code of the plugin, tables of groups, and the
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
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..llm import CHAT, guidance, guided_llm, set_environment
from ..report import Report, parser

set_environment(MALLOC_ARENA_MAX="1")

POOL_MIB = 256
LIMIT_S = 300
LOADS = ("stock, 2B plain", "2B plain", "B groups", "B groups, late blend")


def resident_mib(field: str) -> float:
    """VmRSS is what is resident, VmHWM the most that ever was."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


def run(load: str, requests: int, tokens: int) -> dict[str, float]:
    """In a process of its own: MiB before the requests, and at the peak."""
    from vllm import SamplingParams

    engine = guided_llm(
        CHAT,
        dtype="bfloat16",
        mib=POOL_MIB,
        guided=not load.startswith("stock"),
        max_model_len=512,
        max_num_seqs=2 * requests,
        max_num_batched_tokens=1024,
    )
    numbers = random.Random(0)

    def ids() -> list[int]:
        return [numbers.randrange(100, 40_000) for _ in range(48)]

    def params() -> Any:
        penalty = 1.1 if "late" in load else 1.0
        extra = guidance(1.5, ids())
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


def in_child(load: str, args: argparse.Namespace) -> dict[str, float]:
    """What `run` returns, in a new process."""
    options = ["--requests", str(args.requests), "--tokens", str(args.tokens)]
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine.memory", "--load", load, *options],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    found: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=32)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--load", choices=LOADS, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.load:
        print(json.dumps(run(args.load, args.requests, args.tokens)))
        return
    del args.load
    report = Report("memory", args)
    report.head("load", "before the requests, MiB", "peak, MiB", "growth")
    rows: list[dict[str, Any]] = []
    for load in LOADS:
        found = in_child(load, args)
        rows.append({"load": load, **found})
        before, peak = found["before"], found["peak"]
        report.row(
            load, f"{before - POOL_MIB:.0f}", f"{peak - POOL_MIB:.0f}", f"{peak - before:+.0f}"
        )
    report.end(rows=rows, pool_mib=POOL_MIB)


if __name__ == "__main__":
    main()
