"""What guidance does to how a small instruct model follows instructions and passages.

    python -m benchmarks.instructions --answers ANSWERS.jsonl --out RESULT.json
    python -m benchmarks.plots.instructions RESULT.json PLOT.svg

Table 1, instructions: the conditional conversation has an instruction as its system message, and
the negative has "You are a helpful assistant." Checkers decide whether an answer obeys. Table 2,
context-aware decoding (Shi et al. 2023, arXiv:2305.14739; its alpha is scale - 1): only the
conditional conversation has the passage that answers the question.

Each table is measured greedily, and sampled at temperature 0.7. At temperature 1, a model of this
size often draws from the tail of its distribution. Guidance sharpens, so it would be credited there
with what a lower temperature gives as well. Scale 1 is a plain request without a negative. The rows
"negative alone" (greedy) answer without the instruction or the passage: so many answers would pass
by chance, or from memory.

With `--fields`, each guided request has further guidance fields:

    python -m benchmarks.instructions --scales 2 4 --fields '{"guidance_max_kl": 0.5}'

A rule computes the scale itself, so with one that does not read it, give one scale, which only
names the row: `--scales 2 --fields '{"guidance_rule": {"name": "adacad"}}'`.

With `--answers`, a run that was cut off goes on where it ended. Answers are kept for each batch,
which is one table, mode and scale.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cfg_core.params.rules import check_rule

from ..card import card
from ..llm import CHAT, chat_ids, guidance, guided_llm
from ..report import parser
from . import context, prompts
from .answers import NEGATIVE_ALONE, PLAIN, Answer, AnswerFile, Request
from .context import Item
from .fluency import Scorer, repetition
from .intervals import COVERAGE, RESAMPLES, SEED
from .prompts import Prompt
from .report import points, tables

for name, value in {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

SCALES = [0.5, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0]
TEMPERATURE = 0.7


def main() -> None:
    args = arguments()
    if not args.model.is_dir():
        sys.exit(f"{args.model} is missing: run `make setup`, which says why.")
    bench = Bench(args)
    print(json.dumps(bench.card, indent=1), flush=True)
    answers = bench.answers()
    found = points(answers, bench.tasks)
    print(f"\n{tables(found)}")
    if args.out:
        result = {"benchmark": "instructions", "card": bench.card, "points": found}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--scales", type=float, nargs="+", default=SCALES)
    options.add_argument("--prompts", type=int, help="of each table; all if left out")
    options.add_argument("--samples", type=int, default=2, help="for each prompt; 0: only greedy")
    options.add_argument("--model", type=Path, default=CHAT)
    options.add_argument("--answers", type=Path, help="JSON lines: keep answers, and resume")
    options.add_argument("--fields", type=json.loads, default={}, help="as JSON, see above")
    return options.parse_args()


class Bench:
    """The engine and the scorer start when the first batch needs them."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self._args = args
        self._dtype = model_dtype(str(args.model))
        self._tokenizer = AutoTokenizer.from_pretrained(str(args.model))
        self._file = AnswerFile(args.answers)
        self._engine: Any = None
        self._scorer: Scorer | None = None
        self._tables: dict[str, Sequence[Prompt | Item]] = {
            "instructions": prompts.prompts(args.prompts),
            "context": context.items(args.prompts),
        }
        self.tasks = {task.name: task for table in self._tables.values() for task in table}
        self.card: dict[str, Any] = card() | {
            "model": args.model.name,
            "dtype": self._dtype,
            "prompts": {name: len(tasks) for name, tasks in self._tables.items()},
            "samples": args.samples,
            "temperature": TEMPERATURE,
            "max_tokens": {
                "instructions": prompts.MAX_TOKENS,
                "context": context.MAX_TOKENS,
            },
            "perplexity": "of the unguided model after the conditional prompt",
            **({"fields": args.fields} if args.fields else {}),
            "intervals": f"{COVERAGE:.0%}, bootstrap of {RESAMPLES} over prompts, seed {SEED}",
        }

    def answers(self) -> list[Answer]:
        """Those of all batches. Prints a line for each batch."""
        start = time.perf_counter()
        found: list[Answer] = []
        batches = list(self._batches())
        for i, (table, mode, scale) in enumerate(batches, 1):
            batch = self._batch(table, mode, scale)
            kept, missing = self._kept(batch)
            speed = "kept"
            if missing:
                new, seconds, scoring = self._answer(missing)
                self._file.add(new)
                kept, _ = self._kept(batch)
                rate = sum(answer.tokens for answer in new) / seconds
                speed = f"{seconds:.1f} s, {rate:.0f} tokens/s, scored in {scoring:.1f} s"
            found += kept
            elapsed = time.perf_counter() - start
            print(
                f"{i}/{len(batches)} {table}, {mode}, scale {scale:g}: {len(batch)} answers,"
                f" {speed}; {elapsed / 60:.1f} min",
                flush=True,
            )
        return found

    def _batches(self) -> Iterator[tuple[str, str, float]]:
        """Greedy first, so that a run that is cut off has complete tables."""
        scales = sorted(set(self._args.scales))
        for table in self._tables:
            yield from ((table, "greedy", s) for s in sorted({NEGATIVE_ALONE, *scales}))
        for table in self._tables if self._args.samples else ():
            yield from ((table, "sampled", s) for s in scales)

    def _batch(self, table: str, mode: str, scale: float) -> list[Request]:
        samples = self._args.samples if mode == "sampled" else 1
        limit = prompts.MAX_TOKENS if table == "instructions" else context.MAX_TOKENS
        return [
            Request(
                table=table,
                prompt=task.name,
                mode=mode,
                scale=scale,
                sample=sample,
                conditional=chat_ids(self._tokenizer, task.conditional()),
                negative=chat_ids(self._tokenizer, task.negative()),
                temperature=TEMPERATURE if mode == "sampled" else 0.0,
                max_tokens=limit,
                seed=1000 * sample + i,
                fields={} if scale in (NEGATIVE_ALONE, PLAIN) else self._args.fields,
            )
            for i, task in enumerate(self._tables[table])
            for sample in range(samples)
        ]

    def _key(self, request: Request) -> str:
        return request.key(f"{self._args.model.name} {self._dtype}")

    def _kept(self, batch: Sequence[Request]) -> tuple[list[Answer], list[Request]]:
        """The answers of the file, and the requests that have none there."""
        kept, missing = [], []
        for request in batch:
            if answer := self._file.get(self._key(request)):
                kept.append(answer)
            else:
                missing.append(request)
        return kept, missing

    def _answer(self, batch: Sequence[Request]) -> tuple[list[Answer], float, float]:
        """The answers, and how many seconds it took to generate and to score them."""
        if self._engine is None:
            self._engine = guided_llm(self._args.model, dtype=self._dtype, max_model_len=1024)
        self._scorer = self._scorer or Scorer(str(self._args.model), self._dtype)
        start = time.perf_counter()
        texts = generate(self._engine, batch)
        generated = time.perf_counter()
        pairs = zip(batch, texts, strict=True)
        losses = self._scorer.losses([(asked.conditional, text[1]) for asked, text in pairs])
        scored = time.perf_counter()
        answers = [
            Answer(
                key=self._key(request),
                table=request.table,
                prompt=request.prompt,
                mode=request.mode,
                scale=request.scale,
                sample=request.sample,
                text=text,
                ended=ended,
                tokens=len(tokens),
                loss=loss,
                repetition=repetition(tokens),
            )
            for request, (text, tokens, ended), loss in zip(batch, texts, losses, strict=True)
        ]
        return answers, generated - start, scored - generated


def generate(llm: Any, batch: Sequence[Request]) -> list[tuple[str, list[int], bool]]:
    """For each request its text, its token ids without the one that ends it, and whether it
    ended."""
    from vllm import SamplingParams

    inputs, params = [], []
    for request in batch:
        is_negative = request.scale == NEGATIVE_ALONE
        inputs.append(
            {"prompt_token_ids": request.negative if is_negative else request.conditional}
        )
        guided = None
        if request.scale not in (NEGATIVE_ALONE, PLAIN):
            guided = {**guidance(request.scale, request.negative), **request.fields}
            if replaces_scale(request.fields):
                del guided["guidance_scale"]
        params.append(
            SamplingParams(
                temperature=request.temperature,
                seed=request.seed,
                max_tokens=request.max_tokens,
                extra_args=guided,
            )
        )
    found = []
    for output in llm.generate(inputs, params, use_tqdm=False):
        choice = output.outputs[0]
        ended = choice.finish_reason == "stop"
        tokens = list(choice.token_ids)
        found.append((choice.text, tokens[:-1] if ended else tokens, ended))
    return found


def replaces_scale(fields: Mapping[str, Any]) -> bool:
    """Whether these fields have a rule that does not read guidance_scale."""
    rule = (
        check_rule(fields["guidance_rule"], "guidance_rule") if "guidance_rule" in fields else None
    )
    return rule is not None and not rule.kind.reads_scale


def model_dtype(model: str) -> str:
    """The checkpoint's type, but float32 on a CPU without bfloat16 instructions."""
    from vllm.platforms import current_platform

    from cfg_core.cpu_features import CPUINFO, read
    from deployments.generator.engine.cpu_dtype import checkpoint_dtype, with_cpu_dtype

    engine: dict[str, Any] = {"model": model}
    if current_platform.is_cpu():
        engine = with_cpu_dtype(engine, cpuinfo=read(CPUINFO))
    return engine.get("dtype") or checkpoint_dtype(model) or "float32"


if __name__ == "__main__":
    main()
