"""How many groups one KV pool holds: the elastic pool against two even halves.

    python -m benchmarks.engine.capacity [--blocks 6000] [--groups 1000]

The physics. A group holds the blocks of its leader and of its follower. An even split gives each
role half of the pool (vLLM RFC #5825). With a negative of one token, the followers fill their half
more slowly by the length of the prompts, so nearly half of the pool is idle. An elastic pool has no
halves. So for prompts of P tokens, answers of A tokens and negatives of N, in the middle of the
answers, one expects

    elastic / even = (pool / (P + N + A)) / (pool / 2 / (max(P, N) + A / 2))
                   = 2 * (max(P, N) + A / 2) / (P + N + A)

What is counted is the groups that sample in a step, with a queue that never ends, over the whole
run without its beginning and end. The schedulers and the KV cache manager are the real ones; no
model is computed (tests/simulation). Negatives are all different, so that no prefix is
shared. There is no noise: a second run gives the same. Prints a card, a table, and one line of
JSON.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from cfg_core.vllm_plugin.wire import StepGuidance
from tests.simulation.paths import make_config
from tests.simulation.sim import Simulation

from ..report import Report, parser

SPLITS = ("elastic", "even")
OPTIONS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "hf_overrides": {"max_position_embeddings": 2048},
}


def groups_at_once(
    folder: Path, split: str, prompt: int, negative: int, args: argparse.Namespace
) -> float:
    """Mean number of groups that sample in a step."""
    simulation = Simulation(make_config(folder, split, **OPTIONS), args.blocks)
    for number in range(args.groups):

        def tokens(length: int, role: int, number: int = number) -> list[int]:
            first = [4 + number % 250, 4 + number // 250, 4 + role]
            return (first + [4 + k % 250 for k in range(length)])[:length]

        fields = {"scale": 2.0, "negative": tokens(negative, 1)}
        simulation.add(f"r{number}", tokens(prompt, 0), args.answer, **fields)
    joint = []
    schedule = simulation.scheduler.schedule

    def counted(*given: Any, **named: Any) -> Any:
        step = schedule(*given, **named)
        guidance = StepGuidance.of(step)
        joint.append(len(guidance.joint) if guidance is not None else 0)
        return step

    simulation.scheduler.schedule = counted
    simulation.run(max_steps=100_000)
    return statistics.mean(joint[len(joint) // 4 : 3 * len(joint) // 4])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--blocks", type=int, default=6000, help="of 16 tokens")
    options.add_argument("--groups", type=int, default=1000)
    options.add_argument("--answer", type=int, default=64)
    options.add_argument("--prompts", type=int, nargs="+", default=[256, 1024])
    options.add_argument("--negatives", type=int, nargs="+", default=[1, 32, 512])
    args = options.parse_args()
    report = Report("capacity", args)
    report.head("tokens of the prompt", "of the negative", *SPLITS, "elastic / even", "expected")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for prompt, negative in product(args.prompts, args.negatives):
            counts = [groups_at_once(Path(name), s, prompt, negative, args) for s in SPLITS]
            longest, whole = max(prompt, negative), prompt + negative + args.answer
            ratio, expected = counts[0] / counts[1], 2 * (longest + args.answer / 2) / whole
            row = {"prompt": prompt, "negative": negative, **dict(zip(SPLITS, counts, strict=True))}
            rows.append({**row, "ratio": ratio, "expected": expected})
            shown = (f"{count:.1f}" for count in counts)
            report.row(prompt, negative, *shown, f"{ratio:.2f}", f"{expected:.2f}")
    report.end(rows=rows)


if __name__ == "__main__":
    main()
