"""Heads for multi-token prediction (MTP) under guidance: drafts kept, and what they are worth.

    python -m benchmarks.texts.mtp [--train 90] [--batches 1 4 16] [--turns 3]

The target is the embedded story model, with a head that is trained first (`mtp_head.py`). Its
stories are sampled and greedy, plain and guided at several scales, in float32. `kept` are drafts
accepted of those made, with the drafter's rows blended. Tokens a second are those of an engine with
the last number of `--drafts`, over those of one without, in interleaved turns: with a constant cost
of a draft of 0 (nothing backs off), and with the cost that is measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ..llm import guided_llm, set_environment
from ..report import Report, parser
from ..turns import take_turns
from .mtp_head import save, trained
from .speculation import SCALES, stats, stories

set_environment()

LENGTH = 60
SCALE = 2.0


def register() -> None:
    """Tell transformers of MiMo's configuration, which its checkpoints bring as code."""
    own = AutoConfig.for_model("qwen2").__class__
    AutoConfig.register("mimo", type("MiMoConfig", (own,), {"model_type": "mimo"}))


def engine(folder: Path, drafts: int, draft_cost: float | None = None) -> Any:
    """drafts: how many the head makes; 0 for none."""
    options: dict[str, Any] = {"max_model_len": 512, "enable_prefix_caching": False}
    if drafts:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    return guided_llm(folder, dtype="float32", draft_cost=draft_cost, **options)


def kept(llm: Any, scale: float, temperature: float, number: int) -> tuple[float, float]:
    """The share of drafts that are kept, and the tokens of a step."""
    before, kind = stats(llm), "plain" if scale == 1 else "guided"
    prompts, params = stories(llm, scale, temperature, number, LENGTH)
    llm.generate(prompts, params, use_tqdm=False)
    after = stats(llm)
    steps, drafts, accepted = (
        after[f"{kind}_{name}"] - before[f"{kind}_{name}"]
        for name in ("draft_steps", "drafts", "drafts_accepted")
    )
    return accepted / drafts, 1 + accepted / steps


def seconds(llm: Any, scale: float, batch: int) -> float:
    """What `batch` sampled stories take. With a seed, no cost would be measured."""
    prompts, params = stories(llm, scale, 1.0, batch, LENGTH)
    for one in params:
        one.seed = None
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def acceptance(llms: dict[int, Any], args: argparse.Namespace, report: Report) -> list[Any]:
    report.head("drafts", "temperature", "scale", "kept", "tokens a step")
    rows = []
    for drafts, llm in llms.items():
        for temperature in (0.0, 1.0):
            for scale in SCALES:
                share, tokens = kept(llm, scale, temperature, args.number)
                report.row(drafts, temperature, scale, f"{share:.0%}", f"{tokens:.2f}")
                rows.append([drafts, temperature, scale, share, tokens])
    return rows


def speed(
    llms: dict[str, Any], without: Any, args: argparse.Namespace, report: Report
) -> list[Any]:
    report.head("B", "scale", "draft cost", "tokens/s over no drafts")
    rows = []
    for batch in args.batches:
        for scale in (1.0, SCALE):
            ways = {"none": partial(seconds, without, scale, batch)}
            ways |= {name: partial(seconds, llm, scale, batch) for name, llm in llms.items()}
            took = take_turns(ways, args.turns)
            for name in llms:
                ratio = took.ratio("none", name)
                report.row(batch, scale, name, f"{ratio:.2f}")
                rows.append([batch, scale, name, ratio])
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--train", type=float, default=90.0, help="seconds of training")
    options.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--number", type=int, default=40, help="stories of each row")
    options.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    options.add_argument("--turns", type=int, default=3)
    args = options.parse_args()
    register()
    with tempfile.TemporaryDirectory() as folder:
        target, head, loss = trained(args.train)
        save(target, head, Path(folder))
        report = Report("mtp", args, loss=round(loss, 3))
        # All stay alive to the end: vLLM's one set of process groups goes with the first engine.
        never = {drafts: engine(Path(folder), drafts, draft_cost=0) for drafts in args.drafts}
        best = args.drafts[-1]
        measured, without = engine(Path(folder), best), engine(Path(folder), 0)
        kept_rows = acceptance(never, args, report)
        costs = {"0": never[best], "measured": measured}
        speeds = speed(costs, without, args, report)
        report.end(loss=loss, acceptance=kept_rows, speed=speeds)


if __name__ == "__main__":
    main()
