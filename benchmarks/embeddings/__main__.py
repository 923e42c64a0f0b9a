"""Embedding engines on one CPU core: tokens per CPU-second and texts per second, in one interleaved
run.

What bounds an encoder on a CPU. A token costs two multiplications for each weight of the layers, so
the matrix products at the model's shapes, measured in the same run, are a limit that no engine can
pass. What is lost on the way: padding (a batch computes its longest text for all), small batches
(matrix products of few rows), attention, and the cost of each request beside the model (tokenizing,
queues, copies between processes), which is all that matters for short texts.

Every engine runs in a process of its own on the same core with one thread, and they take turns, so
that other work on the machine hits all of them; each one's best round counts. CPU-seconds are those
of its whole process tree.

Speed alone can be bought with wrong vectors. So each engine also embeds the docstrings of Python's
standard library (retrieval.py), and the table says how well its vectors find them, and how far they
are from those of sentence-transformers in float32. `ours` and `openvino` choose the type to compute
in by themselves; the others compute in float32 if their name says nothing else.

    python -m benchmarks.embeddings                      all but the peers below, 20 minutes
    python -m benchmarks.embeddings --scale 0.25         a quarter of the texts
    python -m benchmarks.embeddings --long 2 --documents 20    texts of 8,192 tokens
    python -m benchmarks.embeddings --infinity-python P  and infinity 0.0.78, run by P
    python -m benchmarks.embeddings --peers-python P     and ONNX Runtime and OpenVINO; P has
                                                         sentence-transformers[onnx,openvino]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ..oracle import oracle_version
from ..report import Report, parser
from .engines import ENGINES, GEMM_TOKENS, OTHERS
from .retrieval import docstring_pairs, quality
from .workloads import long_model, long_texts, minilm, workloads

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

Load = tuple[str, int | None]
"""A workload, and how many clients send its texts: None if they come as one list."""


# ---- engines in processes ------------------------------------------------------------------------


class Child:
    """An engine in a process of its own, bound to one core."""

    def __init__(self, name: str, model: Path, python: str, core: int) -> None:
        self.name = name
        env = {**os.environ, **ENVIRONMENT}
        if not name.endswith("online"):
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._process = subprocess.Popen(
            [python, str(HERE / "engines.py"), name, str(model)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            text=True,
        )
        self._tree = psutil.Process(self._process.pid)
        self._answer()

    def run(
        self, texts: list[str], *clients: int, vectors: bool = False
    ) -> tuple[float, float, list[list[float]]]:
        """(CPU-seconds of the process tree, seconds, vectors if asked for).

        clients: how many send the texts, if the engine is online.
        """
        cpu, start = self._cpu_s(), time.perf_counter()
        assert self._process.stdin is not None
        order = {"texts": texts, "vectors": vectors, "clients": clients}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return self._cpu_s() - cpu, time.perf_counter() - start, answer["vectors"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: run it by hand to see why (engines.py)")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _cpu_s(self) -> float:
        total = 0.0
        for process in [self._tree, *self._tree.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def stop(self) -> None:
        processes = [*self._tree.children(recursive=True), self._tree]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait(timeout=20)


@contextlib.contextmanager
def children(
    names: list[str], model: Path, interpreters: dict[str, str], core: int
) -> Iterator[list[Child]]:
    started: list[Child] = []
    try:
        for name in names:
            print(f"starting {name}", file=sys.stderr, flush=True)
            try:
                python = interpreters[OTHERS[name]] if name in OTHERS else sys.executable
                started.append(Child(name, model, python, core))
            except RuntimeError as error:
                print(f"left out: {error}", file=sys.stderr)
        yield started
    finally:
        for child in started:
            child.stop()


# ---- measuring -----------------------------------------------------------------------------------


def measure(
    engines: list[Child], texts: dict[str, list[str]], clients: list[int], rounds: int
) -> dict[Load, dict[str, tuple[float, float]]]:
    """For each load and engine the smallest CPU-seconds and seconds of `rounds` turns; one turn is
    a warm-up."""
    best: dict[Load, dict[str, tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        for load, items in texts.items():
            for engine in engines:
                given = items[: max(1, len(items) // 40)] if "limit" in engine.name else items
                for num in clients if "online" in engine.name else (None,):
                    cpu_s, wall_s, _ = engine.run(given, *([] if num is None else [num]))
                    known = best.setdefault((load, num), {})
                    least = known.get(engine.name, (math.inf, math.inf))
                    if turn:
                        known[engine.name] = min(least[0], cpu_s), min(least[1], wall_s)
        print(f"turn {turn} of {rounds} done", file=sys.stderr, flush=True)
    return best


def rows_of(
    best: dict[Load, dict[str, tuple[float, float]]],
    texts: dict[str, list[str]],
    tokens: dict[str, int],
) -> list[dict[str, Any]]:
    rows = []
    for (load, num_clients), engines in best.items():
        for name, (cpu_s, wall_s) in engines.items():
            is_limit = "limit" in name
            num_texts = max(1, len(texts[load]) // 40) if is_limit else len(texts[load])
            num_tokens = num_texts * GEMM_TOKENS if is_limit else tokens[load]
            rows.append(
                {
                    "workload": load,
                    "engine": name,
                    "clients": num_clients,
                    "tokens_per_cpu_s": round(num_tokens / cpu_s),
                    "texts_per_cpu_s": None if is_limit else float(f"{num_texts / cpu_s:.3g}"),
                    "texts_per_s": None if is_limit else float(f"{num_texts / wall_s:.3g}"),
                }
            )
    return add_ratios(rows)


def add_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row beside sentence-transformers and beside the limit of its own number format, in the
    same workload."""
    speed = {(row["workload"], row["engine"]): row["tokens_per_cpu_s"] for row in rows}
    for row in rows:
        kind = {"float32": "fp32", "bfloat16": "bf16"}.get(ENGINES[row["engine"]][1])
        limit = speed.get((row["workload"], f"GEMM limit {kind}"))
        base = speed.get((row["workload"], "sentence-transformers"))
        row["of_limit"] = round(row["tokens_per_cpu_s"] / limit, 2) if limit else None
        row["x_sentence_transformers"] = round(row["tokens_per_cpu_s"] / base, 2) if base else None
    return rows


def qualities(engines: list[Child], num_documents: int) -> dict[str, dict[str, float]]:
    """What each engine's vectors are worth: retrieval.quality, and their smallest cosine to those
    of sentence-transformers."""
    queries, documents = zip(*docstring_pairs(num_documents), strict=True)
    found: dict[str, dict[str, float]] = {}
    vectors = {}
    for engine in engines:
        rows = np.array(engine.run([*queries, *documents], vectors=True)[2])
        found[engine.name] = quality(rows[: len(queries)], rows[len(queries) :])
        vectors[engine.name] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        print(f"quality of {engine.name}: {found[engine.name]}", file=sys.stderr, flush=True)
    oracle = vectors.get("sentence-transformers")
    for name, rows in vectors.items():
        if oracle is not None:
            found[name]["least cosine"] = float((rows * oracle).sum(1).min())
    return {name: {key: round(x, 5) for key, x in row.items()} for name, row in found.items()}


# ---- showing -------------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    found = parser(__doc__)
    found.add_argument(
        "--scale", type=float, default=1.0, help="share of the 400 mixed and 1200 short texts"
    )
    found.add_argument(
        "--long", type=int, metavar="N", help="N texts of 8,192 tokens instead, random weights"
    )
    found.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="online")
    found.add_argument("--rounds", type=int, default=4)
    found.add_argument("--engines", help="comma-separated names, default: all")
    found.add_argument("--infinity-python", help="an interpreter that has infinity-emb")
    found.add_argument(
        "--peers-python", help="an interpreter that has sentence-transformers[onnx,openvino]"
    )
    found.add_argument(
        "--documents", type=int, default=1000, help="docstrings for the quality of retrieval"
    )
    found.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    return found.parse_args()


def main() -> None:
    args = options()
    with tempfile.TemporaryDirectory() as folder:
        if args.long:
            model = long_model(Path(folder))
            compare(args, model, long_texts(model, args.long))
        else:
            compare(args, minilm(), workloads(minilm(), args.scale))


def compare(args: argparse.Namespace, model: Path, texts: dict[str, list[str]]) -> None:
    names = args.engines.split(",") if args.engines else list(ENGINES)
    given = {"infinity": args.infinity_python, "peers": args.peers_python}
    interpreters = {name: python for name, python in given.items() if python}
    for name in [name for name in names if OTHERS.get(name, "") not in ("", *interpreters)]:
        print(f"{name} is left out: give --{OTHERS[name]}-python", file=sys.stderr)
        names.remove(name)
    report = Report("embeddings", args, peer=oracle_version("sentence-transformers"))
    with children(names, model, interpreters, args.core) as started:
        offline = [e for e in started if "online" not in e.name and "limit" not in e.name]
        found = qualities(offline, args.documents)
        best = measure(started, texts, args.clients, args.rounds)
    tokens = num_tokens(model, texts)
    rows = rows_of(best, texts, tokens)
    columns = list(next(iter(found.values()), {}))
    report.head("engine", *columns)
    for name, row in found.items():
        report.row(name, *(f"{row[column]:.4f}" for column in columns))
    report.head(*rows[0])
    for row in rows:
        report.row(*("-" if value is None else value for value in row.values()))
    report.end(tokens=tokens, quality=found, rows=rows)


def num_tokens(model: Path, texts: dict[str, list[str]]) -> dict[str, int]:
    """The tokens of each workload, special tokens included."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return {
        load: sum(len(e.ids) for e in tokenizer.encode_batch(items))
        for load, items in texts.items()
    }


if __name__ == "__main__":
    main()
