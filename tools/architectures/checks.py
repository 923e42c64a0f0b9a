"""All that is checked of one architecture.

Three engines run its tiny model: stock vLLM; a roomy guided one, in which all cases are one batch,
are repeated on prefixes from the cache, and are mixed with plain requests; and a tight guided one,
with 16 tokens a step and so few blocks that groups are preempted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.engine.engines import ROOMY, Engine, guided, plain, tokens
from tests.engine.oracle import Case
from tools.architectures.reference_model import (
    NEW_TOKENS,
    SOME_CASES,
    SOME_PROMPTS,
    Texts,
    changed,
    reference_texts,
)
from tools.architectures.rows import HF, Row
from tools.architectures.sizes import write_config, write_tokenizer
from tools.architectures.stock_oracle import verify

Report = dict[str, Any]
Note = Callable[[str], None]

MAX_MODEL_LEN = 256
LONGEST = max(len(prompt) for prompt in SOME_PROMPTS) + NEW_TOKENS
AS_CASES = [Case(prompt, prompt[:1], 1.0) for prompt in SOME_PROMPTS]
"""Plain requests in the words of guided ones: at scale 1, the negative has no weight."""
MOST_INEXACT = 0.1
"""The largest part of tokens that rounding in bfloat16 may have chosen. In float32 it is none."""
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
        write_tokenizer(row, folder)
    bench = Bench(row, folder, texts)
    note("stock engine")
    bench.stock()
    note("roomy engine")
    bench.roomy()
    note("tight engine")
    bench.tight()
    note("comparison")
    bench.compare()
    return {**bench.report, "problems": bench.problems}


def differing(got: Sequence[Sequence[int]], want: Sequence[Sequence[int]]) -> str:
    """How many texts differ. Empty if none does."""
    count = sum(list(a) != list(b) for a, b in zip(got, want, strict=True))
    return f"{count} of {len(want)} texts differ" if count else ""


class Bench:
    """The engines of one row, what they produced, and what was wrong with it."""

    def __init__(self, row: Row, folder: Path, texts: Texts | None) -> None:
        self.row, self.folder, self.texts = row, folder, texts
        self.report: Report = {"oracle": row.oracle, "seed": texts.seed if texts else 0}
        self.problems: list[str] = []
        self.guided: dict[str, list[list[int]]] = {}
        """Texts of SOME_CASES, by the way in which they were produced."""
        self.plain: dict[str, list[list[int]]] = {}
        """Texts of SOME_PROMPTS, beside guided ones."""
        self.drawn: dict[str, Any] = {}
        if texts is None:
            from tools.architectures.loader import FORMAT

            extra = {"seed": 0, "gains": dict(row.gains)}
            self.drawn = {"load_format": FORMAT, "model_loader_extra_config": extra}

    def start(self, **options: Any) -> Engine:
        own = {"dtype": self.row.dtype, "max_model_len": MAX_MODEL_LEN, **self.row.options}
        return Engine(self.folder, **{**self.drawn, **options, **own})

    # ---- engines ---------------------------------------------------------------------------------

    def stock(self) -> None:
        """The plain texts of vLLM without the plugin, beside those of transformers."""
        engine = self.start(guided=False, **ROOMY)
        self.report["model"] = model_class(engine)
        params = [plain(max_tokens=NEW_TOKENS)] * len(SOME_PROMPTS)
        self.expected = tokens(engine.generate(SOME_PROMPTS, params))
        engine.close()  # two engines of one process share their groups of workers
        if self.texts and (found := differing(self.expected, self.texts.plain)):
            self.report["stock_differs"] = found
            if self.row.oracle == HF:
                self.problems.append(f"stock vLLM is not what transformers is: {found}")

    def roomy(self) -> None:
        engine = self.start(**ROOMY)
        self.guided["one batch"] = engine.guide(SOME_CASES, max_tokens=NEW_TOKENS)
        with engine.prefix_hits() as hits:
            self.guided["repeated"] = engine.guide(SOME_CASES, max_tokens=NEW_TOKENS)
        self.mix(engine, "mixed")
        config = engine.llm.llm_engine.vllm_config
        self.report |= {
            "prefix_hits": sum(map(bool, hits.values())),
            "groups": len(block_sizes(engine)),
            "affine_head": runner(engine)._head.affine,
            "chunked": bool(config.scheduler_config.enable_chunked_prefill),
        }
        self.pool, self.grows = 1 + blocks(block_sizes(engine)), min(block_sizes(engine)) < LONGEST
        engine.close()

    def tight(self) -> None:
        engine = self.start(
            num_gpu_blocks_override=self.pool,
            max_num_batched_tokens=16 if self.report["chunked"] else MAX_MODEL_LEN,
            max_num_seqs=16,
        )
        with engine.whole_preemptions():
            self.guided["preempted"] = engine.guide(SOME_CASES, max_tokens=NEW_TOKENS)
            self.mix(engine, "preempted, mixed")
        stats = engine.stats()
        preempted = stats["group_preemptions"]
        self.report |= {"preemptions": preempted, "solo_rows": stats["solo_rows"]}
        if self.grows and not preempted:
            self.problems.append("no group was preempted")
        engine.close()

    def mix(self, engine: Engine, name: str) -> None:
        """Guided texts, and plain ones, all from one batch."""
        prompts = [*(case.prompt for case in SOME_CASES), *SOME_PROMPTS]
        params = [guided(case, max_tokens=NEW_TOKENS) for case in SOME_CASES]
        params += [plain(max_tokens=NEW_TOKENS)] * len(SOME_PROMPTS)
        texts = tokens(engine.generate(prompts, params))
        self.guided[name], self.plain[name] = texts[: len(SOME_CASES)], texts[len(SOME_CASES) :]

    # ---- comparison ------------------------------------------------------------------------------

    def compare(self) -> None:
        self.report["changed"] = changed(self.guided["one batch"], self.expected)
        if self.report["changed"] < LEAST_CHANGED:
            self.problems.append(f"guidance changed {self.report['changed']} texts alone")
        if self.row.dtype == "float32":
            self.report_differing(self.plain, self.expected)
        if self.row.oracle == HF:
            assert self.texts is not None
            self.report_differing(self.guided, self.texts.guided)
        else:
            self.verify()

    def report_differing(
        self, texts: dict[str, list[list[int]]], expected: list[list[int]]
    ) -> None:
        for name, got in texts.items():
            if found := differing(got, expected):
                self.problems.append(f"{name}: {found}")

    def verify(self) -> None:
        """Look at each different text once, with stock vLLM as the oracle."""
        pairs = [(SOME_CASES, got) for got in self.guided.values()]
        if self.row.dtype != "float32":
            pairs += [(AS_CASES, got) for got in self.plain.values()]
        found = {
            (case, tuple(text)): None
            for cases, got in pairs
            for case, text in zip(cases, got, strict=True)
        }
        engine = self.start(guided=False, max_logprobs=-1, **ROOMY)
        verdict = verify(engine, list(found), self.row.dtype)
        engine.close()
        self.report["verdict"] = verdict._asdict() | {"wrong": len(verdict.wrong)}
        self.problems += verdict.wrong[:5]
        if verdict.inexact > MOST_INEXACT * verdict.tokens:
            self.problems.append(f"{verdict.inexact} of {verdict.tokens} tokens are not the best")


def runner(engine: Engine) -> Any:
    return engine.core.model_executor.driver_worker.worker.model_runner


def model_class(engine: Engine) -> str:
    cls = type(runner(engine).get_model())
    return f"{cls.__module__}.{cls.__name__}"


def block_sizes(engine: Engine) -> list[int]:
    """Tokens in a block of each group of layers."""
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    return [group.kv_cache_spec.block_size for group in groups]


def blocks(sizes: Sequence[int]) -> int:
    """Blocks for the largest group of SOME_CASES, and some more."""
    most = max(
        sum(
            math.ceil((len(start) + NEW_TOKENS) / size)
            for size in sizes
            for start in (case.prompt, case.negative)
        )
        for case in SOME_CASES
    )
    return most + 2 * len(sizes)
