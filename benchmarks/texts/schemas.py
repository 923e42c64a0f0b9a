"""Which JSON schemas are served, beside vLLM alone, and what the first use of each costs.

    python -m benchmarks.texts.schemas FOLDER [--vocabulary 151936] [--most 500] [--seed 1]

FOLDER has public schemas: files with one schema each, or files of the JSON Schema Test Suite (lists
of objects with a `schema`). Both can be had from the package index: the source distribution of
`jsonschema` contains the suite, and `check-jsonschema` contains schemas of real projects.

For each schema, vLLM's own validation and compilation run in a forked process with a limit of
CPU time (`--stock-s`). Then our sandbox tries it (frontend/grammar_sandbox.py of the plugin), and
what passes is compiled as the engine core does. Printed are the schemas that vLLM serves and we
refuse, with the reasons, and one line of JSON: a card, counts, and the CPU-seconds of both.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.real_size import VOCABULARY, real_size_model

from ..llm import set_environment
from ..report import Report, parser

set_environment(OMP_NUM_THREADS="1", VLLM_REGEX_COMPILATION_TIMEOUT_S="0")

SERVED, REFUSED, ENDED = "served", "refused", "ended"


def schemas_in(folder: Path) -> Iterator[Any]:
    """The schemas of all files, each once."""
    seen: set[str] = set()
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text())
        except (ValueError, UnicodeDecodeError):
            continue
        found = content if isinstance(content, list) else [{"schema": content}]
        for item in found:
            schema = item.get("schema") if isinstance(item, dict) else None
            text = json.dumps(schema, sort_keys=True)
            if isinstance(schema, dict) and schema and text not in seen:
                seen.add(text)
                yield schema


class Stock:
    """vLLM's own validation and compilers, for one model."""

    def __init__(self, model: Path, cpu_s: float) -> None:
        from vllm.engine.arg_utils import EngineArgs

        from cfg_core.vllm_plugin.grammar_helper.settings import settings_of
        from cfg_core.vllm_plugin.grammar_helper.trial import Trial

        self.config = EngineArgs(
            model=str(model), dtype="float32", max_model_len=4096
        ).create_engine_config()
        self._trial, self._cpu_s = Trial(settings_of(self.config)), cpu_s
        self._trial.warm_up()

    def tried(self, schema: Any) -> tuple[str, float]:
        """What vLLM does with a schema, and the CPU-seconds of that. It runs in a fork."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        pid = os.fork()
        if pid == 0:
            signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
            os._exit(0 if self._serves(schema) else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {0: SERVED, 1: REFUSED}.get(status, ENDED), spent

    def _serves(self, schema: Any) -> bool:
        try:
            config = self._trial._config.structured_outputs_config
            self._trial._compiled(self._trial._validated({"json": schema}, config))
        except Exception:
            return False
        return True

    def compiled_cpu_s(self, outputs: Any) -> float:
        """The CPU-seconds in which the engine core compiles what passed our trial."""
        started = time.process_time()
        self._trial._compiled(outputs)
        return time.process_time() - started


async def measured(stock: Stock, schemas: list[Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from cfg_core.errors import RequestError
    from cfg_core.vllm_plugin.frontend.grammar_sandbox import GrammarSandbox

    sandbox, rows = GrammarSandbox(stock.config), []
    await sandbox.start()
    for number, schema in enumerate(schemas):
        alone, stock_s = stock.tried(schema)
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
        helper = sandbox._process._process.pid  # type: ignore[union-attr]
        before = ended_cpu_s(helper)
        try:
            await sandbox.check(params)
            ours, reason = SERVED, ""
            compiled_s = stock.compiled_cpu_s(params.structured_outputs)
        except RequestError as error:
            ours, reason, compiled_s = REFUSED, str(error), 0.0
        backend = getattr(params.structured_outputs, "_backend", None)
        spent = ended_cpu_s(helper) - before + compiled_s
        rows.append(
            {"number": number, "alone": alone, "alone_s": round(stock_s, 3), "ours": ours}
            | {"ours_s": round(spent, 3), "backend": backend, "reason": reason}
        )
        print(f"{number}: {rows[-1]}", file=sys.stderr, flush=True)
    sandbox.close()
    return rows


def ended_cpu_s(pid: int) -> float:
    """CPU-seconds of a process and of its ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for row in rows:
        key = f"vLLM alone {row['alone']}, ours {row['ours']}"
        counts[key] = counts.get(key, 0) + 1
    both = [row for row in rows if row["alone"] != REFUSED and row["ours"] == SERVED]
    beyond = [row["ours_s"] - row["alone_s"] for row in both]
    return {
        "schemas": len(rows),
        **counts,
        "beyond_s_max": round(max(beyond, default=0.0), 3),
        "alone_s_max": max((row["alone_s"] for row in both), default=0.0),
        "ours_s_max": max((row["ours_s"] for row in both), default=0.0),
        "by_backend": {
            name: sum(row["backend"] == name for row in both)
            for name in sorted({str(row["backend"]) for row in both})
        },
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--vocabulary", type=int, default=VOCABULARY)
    options.add_argument("--most", type=int, default=500)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--stock-s", type=float, default=20.0)
    args = options.parse_args()
    schemas = list(schemas_in(args.folder))
    random.Random(args.seed).shuffle(schemas)
    stock = Stock(real_size_model(args.vocabulary), args.stock_s)
    rows = asyncio.run(measured(stock, schemas[: args.most]))
    report = Report("schemas", args)
    for row in rows:
        if row["ours"] == REFUSED and row["alone"] != REFUSED:
            print(f"{row['number']}: vLLM alone {row['alone']}: {row['reason']}")
    report.end(**summary(rows))


if __name__ == "__main__":
    main()
