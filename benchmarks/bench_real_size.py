"""What vocabularies and prompts of real size cost the host: plain requests beside guided ones.

    python benchmarks/bench_real_size.py [--parts decode first http structured]
        [--vocabularies 151936 262144] [--lengths 1000 8000 32000 100000] [--batches 1 8 32]

The model (models/real_size.py) has one small layer, so its own work is nearly nothing. What is left
grows with the vocabulary (rows of logits, masks of grammars, tables of the tokenizer) or with the
length of the prompts (ids that are checked, copied, hashed and looked up). A group of two streams
should cost the host what two plain requests cost:

- `decode`: ms of a step of B groups, beside steps of B and of 2B plain requests. `parity` is that
  of 2B plain requests over that of B groups: at least 1.
- `first`: ms to the first token, and for 16 tokens more, of one request whose prompts are cached,
  in an engine of this process. Guided over plain: at most 2.
- `http`: the same over HTTP, with configs/cfg.yaml, and the ms of another client's tiny requests:
  the median alone, and the longest beside plain and beside guided requests of that length.
- `structured`: the first and the second use of a grammar, and a guided one, over HTTP: the status,
  ms, and the CPU-seconds of the generator's processes. Nothing is sampled but four tokens, so the
  first use is what a grammar costs, and should not grow with the vocabulary.

All ways take turns in one engine, because the machine's speed changes: believe the ratios. Each
part takes one to four minutes for each vocabulary. Prints a card, tables, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "models"), str(HERE)]

from card import card, vllm_version  # noqa: E402
from real_size import LARGEST_VOCABULARY, VOCABULARY, real_size_model  # noqa: E402
from table import table  # noqa: E402

PARTS = ("decode", "first", "http", "structured")
Rows = list[dict[str, Any]]


def measured(args: argparse.Namespace, vocabulary: int) -> dict[str, Rows]:
    """The rows of each part, printed as they come."""
    found: dict[str, Rows] = {}
    model, parts = real_size_model(vocabulary), set(args.parts)
    if parts & {"decode", "first"}:
        from real_size_engine import RealSize, close

        longest = max(args.lengths) if "first" in parts else 0
        bench = RealSize(model, args.batches, longest)
        if "decode" in parts:
            found["decode"] = told("decode", vocabulary, bench.decoding(args.batches, args.turns))
        if "first" in parts:
            rows = bench.first_tokens(args.lengths, args.turns)
            found["first"] = told("first", vocabulary, rows)
        close(bench)
    if parts & {"http", "structured"}:
        from real_size_server import started

        with started(model, vocabulary) as server:
            if "http" in parts:
                rows = server.long_prompts(args.lengths, args.turns)
                found["http"] = told("http", vocabulary, rows)
            if "structured" in parts:
                found["structured"] = told("structured", vocabulary, server.structured())
    return found


def told(part: str, vocabulary: int, rows: Iterable[dict[str, Any]]) -> Rows:
    """Collect the rows, and print each with its name of part, and then all as a table."""
    found: Rows = []
    for row in rows:
        found.append({"vocabulary": vocabulary, **row})
        print(f"{part}: {json.dumps(found[-1])}", file=sys.stderr, flush=True)
    print(f"\n{part}\n\n{table(found)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    sizes = [VOCABULARY, LARGEST_VOCABULARY]
    parser.add_argument("--vocabularies", type=int, nargs="+", default=sizes)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 8000, 32_000, 100_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    described = {**card(), "vllm": vllm_version()}
    print(json.dumps(described))
    parts: dict[str, Rows] = {}
    for vocabulary in args.vocabularies:
        for part, rows in measured(args, vocabulary).items():
            parts.setdefault(part, []).extend(rows)
    options = {key: value for key, value in vars(args).items() if key not in ("out", "parts")}
    result = json.dumps({"benchmark": "real-size", "card": described, **options, **parts})
    print(result)
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
