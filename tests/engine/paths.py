"""Every path through vLLM.

These are the runners V1 and V2, sync and async scheduling, one process, two tensor-parallel ones,
and a pipeline of two. test_paths.py compares them with Hugging Face `generate`.

Each path is an engine in a process of its own (path_program.py) with a small budget and a small
pool, so that prompts are chunked and groups preempted. Its tokens must be those of Hugging Face
`generate`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.engine.engines import ASYNC
from tests.engine.formulas import Answer, answers, suffix_answers
from tests.engine.oracle import CASES, Oracle
from tests.engine.scored_texts import NAMES, is_right, scored

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
EVERY = 7  # every seventh case: 11 pairs, all scales
LIMIT_S = 580
LONGEST_SUFFIX = 32  # tokens of a step
SCORED = [(name, 0) for name in NAMES]
"""Names and seeds of the texts that are scored."""

PLACES: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2 mp": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "TP2 Ray actors": {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
    "PP2": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
}


@dataclass(frozen=True)
class EnginePath:
    """One path through vLLM.

    new_tokens: there are fewer on V2, whose kernels are interpreted here.
    step: of the formulas, each of so many is compared.
    """

    v2: bool
    asynchronous: bool
    place: str
    options: dict[str, Any] = field(hash=False, default_factory=dict)
    drafts: int = 0
    drafter: str = "draft_model"
    step: int = 1

    @property
    def name(self) -> str:
        name = f"V{1 + self.v2} {'async' if self.asynchronous else 'sync'} {self.place}"
        return f"{name}, {self.drafter.replace('_', ' ')}" if self.drafts else name

    def speculation(self, folder: Path) -> dict[str, Any]:
        """Engine options.

        The draft model is the model itself. N-grams are looked up from length 1.
        """
        if not self.drafts:
            return {}
        more: dict[str, Any] = {"model": str(folder)} if self.drafter == "draft_model" else {}
        if self.drafter.startswith("ngram"):
            more = {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
        return {
            "speculative_config": {
                "method": self.drafter,
                "num_speculative_tokens": self.drafts,
                **more,
            }
        }

    @property
    def new_tokens(self) -> int:
        return 8 if self.v2 else 24

    @property
    def missing(self) -> str | None:
        """Why vLLM does not support this combination. None if it does."""
        if not self.v2 and self.asynchronous and self.place == "PP2":
            return "vLLM has no async scheduling on the V1 runner with a pipeline"
        if self.drafts and self.place == "PP2":
            return (
                "vLLM builds the draft model in stages too, and dies at its first step, plugin"
                " or not"
            )
        return None


_WAYS = list(itertools.product((False, True), (False, True), PLACES.items()))
PATHS = [
    EnginePath(v2, asynchronous, place, options, drafts)
    for drafts in (0, 3)
    for v2, asynchronous, (place, options) in _WAYS
]

LOOKUPS = [
    EnginePath(False, False, "TP1", drafts=3, drafter="ngram"),
    EnginePath(True, True, "TP1", drafts=3, drafter="ngram_gpu"),
    EnginePath(False, False, "TP1", drafts=3, drafter="suffix"),
]
"""N-gram lookup, which on Model Runner V2 vLLM does on the device, and in a tree of all texts."""


def environment(path: EnginePath) -> dict[str, str]:
    """Environment of a process whose engines use this path (`engines.of_this_process` reads it)."""
    folders = [SUPPORT / "mrv2_cpu"] + [SUPPORT / "ray_cpu"] * (path.place == "TP2 Ray actors")
    if path.drafter == "suffix" and find_spec("arctic_inference") is None:
        folders.append(SUPPORT / "suffix_tree")
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    out = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, given)]),
        "VLLM_USE_V2_MODEL_RUNNER": str(int(path.v2)),
        ASYNC: str(int(path.asynchronous)),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "RAY_AUTH_MODE": "disabled",
    }
    if path.options:
        out["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if (os.cpu_count() or 1) > 1 else "nobind"
    return out


def run(path: EnginePath, folder: Path, oracle: Oracle, **more: Any) -> dict[str, Any]:
    """The report of path_program.py, which answers the oracle's cases and all formulas.

    more: engine options.

    Raises RuntimeError, with the output of the process, if it failed or took too long.
    """
    options = {**path.options, **path.speculation(folder), **more}
    setup = {
        "every": EVERY,
        "options": options,
        "new_tokens": path.new_tokens,
        "drafts": path.drafts,
        "formulas": [(a.request.name, a.seed) for a in ordered(path, oracle)],
        "scored": SCORED,
    }
    command = [sys.executable, "-m", "tests.engine.path_program", str(folder), json.dumps(setup)]
    with tempfile.TemporaryFile("w+") as log:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment(path),
                stdout=subprocess.PIPE,
                stderr=log,
                timeout=LIMIT_S,
                check=True,
            )
        except subprocess.SubprocessError as error:
            log.seek(0)
            raise RuntimeError(f"{path.name}: {error}\n{cause(log.read())}") from None
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def ordered(path: EnginePath, oracle: Oracle) -> list[Answer]:
    """The formulas, those first that are the same for each token and cut nothing.

    Where the engine takes suffixes, there are also these, as far as the small budget has room.
    """
    suffixed = [
        answer
        for answer in (suffix_answers(oracle) if oracle.takes_suffixes else ())
        if len(answer.request.formula.suffix) < LONGEST_SUFFIX
    ]
    every = sorted([*answers(oracle), *suffixed], key=lambda answer: bool(answer.request.fields))
    return every[:: path.step]


def cause(log: str) -> str:
    """The part of a log that says why its process failed: its first traceback, and its end.

    An engine that has failed logs more tracebacks while it shuts down.
    """
    first = log[max(log.find("Traceback"), 0) :]
    return first if len(first) <= 8000 else f"{first[:6000]}\n...\n{first[-2000:]}"


def differences(path: EnginePath, report: dict[str, Any], oracle: Oracle) -> list[str]:
    """The problems of a report, one line each.

    There are two kinds: another engine than requested, and other tokens.
    """
    wrong = []
    for key, want in (
        ("v2", path.v2),
        ("async", path.asynchronous),
        ("world_size", 1 if not path.options else 2),
    ):
        if report[key] != want:
            wrong.append(f"{key} is {report[key]}, not {want}")
    texts = [*oracle.guided[::EVERY], *oracle.plain, *(a.token_ids for a in ordered(path, oracle))]
    texts += oracle.guided[::EVERY]  # again, beside formulas that change
    expected = [text[: path.new_tokens] for text in texts]
    got = [*report["guided"], *report["plain"], *report["formulas"], *report["again"]]
    guided = 2 * len(CASES[::EVERY]) * path.new_tokens + sum(
        a.request.guided_tokens(path.new_tokens) for a in ordered(path, oracle)
    )
    if report["guided_tokens"] != guided:
        wrong.append(f"{report['guided_tokens']} tokens were guided, not {guided}")
    if path.drafts and report["stats"]["joint_steps"] >= report["stats"]["guided_tokens"]:
        wrong.append("no draft was accepted")
    wrong += [
        f"scores of {name} differ"
        for (name, seed), found in zip(SCORED, report["scores"], strict=True)
        if not is_right(scored(name, seed), oracle, found)
    ]
    wrong += [
        f"sequence {i} differs"
        for i, (a, b) in enumerate(zip(got, expected, strict=True))
        if a != b
    ]
    return wrong
