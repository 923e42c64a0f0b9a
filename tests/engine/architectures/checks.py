"""All that is checked of one architecture.

Three engines run its tiny model: stock vLLM; a roomy guided one, in which all cases are one batch,
are repeated on prefixes from the cache, and are mixed with plain requests; and a tight guided one,
with 16 tokens a step and so few blocks that groups are preempted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from architectures.reference_model import (
    NEW_TOKENS,
    SOME_CASES,
    SOME_PROMPTS,
    Texts,
    changed,
    reference_texts,
)
from architectures.rows import HF, STOCK, Row
from architectures.sizes import write_config
from architectures.stock_oracle import verify
from engines import ROOMY, Engine, guided, plain, tokens
from tiny_models import make_tokenizer

Report = dict[str, Any]
Note = Callable[[str], None]

MAX_MODEL_LEN = 256
LEAST_CHANGED = len(SOME_CASES) * 3 // 4
"""Guidance must change so many texts. Otherwise an engine without it would pass, too."""


def measure(row: Row, folder: Path, note: Note) -> Report:
    """Run all checks of a row, with files in `folder`. Raises whatever fails on the way.

    note: told what is done next.
    """
    note("reference")
    texts = None
    if row.hf_class or row.oracle == HF:
        texts = reference_texts(row, folder)
    else:
        write_config(row, folder)
        make_tokenizer().save_pretrained(folder)
    bench = Bench(row, folder, texts)
    note("stock engine")
    stock = bench.start(guided=False, max_logprobs=-1, **ROOMY)
    report: Report = {"seed": texts.seed if texts else 0, "model": bench.model_class(stock)}
    plain_texts = bench.plain(stock)
    stock.close()  # two engines of one process share their groups of workers
    against = row.oracle
    if texts is not None and (found := differing(plain_texts, texts.plain)):
        report["stock_differs"] = found  # from transformers, without guidance
        against = STOCK
    note("roomy engine")
    produced, problems = bench.roomy(plain_texts, report)
    note("tight engine")
    problems += bench.tight(produced, plain_texts, report)
    report["changed"] = changed(produced["one batch"], plain_texts)
    if report["changed"] < LEAST_CHANGED:
        problems.append(f"guidance changed {report['changed']} texts alone")
    note("comparison")
    if against == HF:
        assert texts is not None
        problems += [
            f"{name}: {found}"
            for name, got in produced.items()
            if (found := differing(got, texts.guided))
        ]
    else:
        stock = bench.start(guided=False, max_logprobs=-1, **ROOMY)
        problems += bench.verify(stock, produced, report)
        stock.close()
    if against != row.oracle:
        problems.append("stock vLLM is not what transformers is, and the row does not say so")
    return {**report, "oracle": against, "problems": problems}


def differing(got: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> str:
    """How many texts differ. Empty if none does."""
    count = sum(list(a) != list(b) for a, b in zip(got, want, strict=True))
    return f"{count} of {len(want)} texts differ" if count else ""


class Bench:
    """The engines of one row."""

    def __init__(self, row: Row, folder: Path, texts: Texts | None) -> None:
        self.row, self.folder = row, folder
        self.drawn: dict[str, Any] = {}
        if texts is None:
            from architectures.loader import FORMAT

            extra = {"seed": 0, "gains": dict(row.gains)}
            self.drawn = {"load_format": FORMAT, "model_loader_extra_config": extra}

    def start(self, **options: Any) -> Engine:
        own = {"dtype": self.row.dtype, "max_model_len": MAX_MODEL_LEN, **self.row.options}
        return Engine(self.folder, **{**self.drawn, **options, **own})

    def model_class(self, engine: Engine) -> str:
        runner = engine.core.model_executor.driver_worker.worker.model_runner
        cls = type(runner.get_model())
        return f"{cls.__module__}.{cls.__name__}"

    def plain(self, engine: Engine) -> list[list[int]]:
        params = plain(max_tokens=NEW_TOKENS)
        return tokens(engine.generate(SOME_PROMPTS, [params] * len(SOME_PROMPTS)))

    def guide(self, engine: Engine) -> list[list[int]]:
        return engine.guide(SOME_CASES, max_tokens=NEW_TOKENS)

    def mixed(self, engine: Engine) -> tuple[list[list[int]], list[list[int]]]:
        """Guided texts, and plain ones, all from one batch."""
        prompts = [*(case.prompt for case in SOME_CASES), *SOME_PROMPTS]
        params = [guided(case, max_tokens=NEW_TOKENS) for case in SOME_CASES]
        params += [plain(max_tokens=NEW_TOKENS)] * len(SOME_PROMPTS)
        texts = tokens(engine.generate(prompts, params))
        return texts[: len(SOME_CASES)], texts[len(SOME_CASES) :]

    def roomy(
        self, plain_texts: list[list[int]], report: Report
    ) -> tuple[dict[str, list[list[int]]], list[str]]:
        engine = self.start(**ROOMY)
        produced = {"one batch": self.guide(engine)}
        with engine.prefix_hits() as hits:
            produced["repeated"] = self.guide(engine)
        produced["mixed"], beside = self.mixed(engine)
        head = getattr(self.runner(engine), "_head", None)
        report |= {
            "prefix_hits": sum(map(bool, hits.values())),
            "groups": len(engine.scheduler.kv_cache_config.kv_cache_groups),
            "affine_head": None if head is None else head.affine,
        }
        self.pool = 1 + self.blocks(engine)
        config = engine.llm.llm_engine.vllm_config
        report["chunked"] = bool(config.scheduler_config.enable_chunked_prefill)
        engine.close()
        found = differing(beside, plain_texts)
        return produced, [f"plain beside guided: {found}"] if found else []

    def tight(
        self, produced: dict[str, list[list[int]]], plain_texts: list[list[int]], report: Report
    ) -> list[str]:
        engine = self.start(
            num_gpu_blocks_override=self.pool,
            max_num_batched_tokens=16 if report["chunked"] else MAX_MODEL_LEN,
            max_num_seqs=16,
        )
        with engine.whole_preemptions():
            produced["preempted"] = self.guide(engine)
            produced["preempted, mixed"], beside = self.mixed(engine)
        stats = engine.stats()
        report |= {"preemptions": stats["group_preemptions"], "solo_rows": stats["solo_rows"]}
        engine.close()
        found = differing(beside, plain_texts)
        problems = [f"plain beside guided, preempted: {found}"] if found else []
        return problems + ["no group was preempted"] * (not report["preemptions"])

    def runner(self, engine: Engine) -> Any:
        return engine.core.model_executor.driver_worker.worker.model_runner

    def blocks(self, engine: Engine) -> int:
        """Blocks for the largest group of CASES, and some more."""
        sizes = [
            group.kv_cache_spec.block_size
            for group in engine.scheduler.kv_cache_config.kv_cache_groups
        ]
        most = max(
            sum(
                math.ceil((len(start) + NEW_TOKENS) / size)
                for size in sizes
                for start in (case.prompt, case.negative)
            )
            for case in SOME_CASES
        )
        return most + 2 * len(sizes)

    def verify(
        self, stock: Engine, produced: dict[str, list[list[int]]], report: Report
    ) -> list[str]:
        """Look at each different text once."""
        cases, texts, seen = [], [], set()
        for got in produced.values():
            for i, text in enumerate(got):
                if (i, *text) not in seen:
                    seen.add((i, *text))
                    cases.append(SOME_CASES[i])
                    texts.append(text)
        verdict = verify(stock, cases, texts, self.row.dtype)
        found = dataclasses.asdict(verdict)
        wrong = found.pop("wrong")
        report["verdict"] = found
        return wrong[:5]
