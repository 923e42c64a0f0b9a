"""Every benchmark runs, at its smallest size.

Nothing else runs them, and they read private names of the engine: one that is not run for a week
may not run any more. `pytest --survey tests/package/test_benchmarks.py` runs them. What they
measure at these sizes means nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S = 500

SMALL = {
    "embeddings": ["--scale 0.05 --rounds 1 --documents 40"],
    "engine.blend_error": ["--scales 2"],
    "engine.capacity": ["--blocks 200 --groups 10 --prompts 64 --negatives 1 --answer 8"],
    "engine.decode": ["--model stories --batches 1 --turns 1 --tokens 12 --dtype float32"],
    "engine.first_token": ["--model stories --prompt 100 --turns 1 --dtype float32"],
    "engine.formulas": ["--model stories --batches 1 --turns 1 --tokens 12 --dtype float32"],
    "engine.gates": ["--batches 1 --shares 0.5 --tokens 6 --suffix 2 --waves 1 --turns 1"],
    "engine.memory": ["--requests 2 --tokens 4"],
    "engine.plain": ["--batches 1 --turns 1"],
    "engine.scheduler": ["--groups 1 --turns 1 --steps 2"],
    "engine.strength_error": ["--vocabularies 1000 --rows 1"],
    "instructions": ["--scales 1 2 --prompts 2 --samples 0"],
    "instructions.frontier": ['--prompts 2 --settings [{},{"guidance_scale":2}]'],
    "instructions.passages": ['--settings [{},{"guidance_scale":2}]'],
    "plots.frontier": ["RESULT:frontier OUT.svg"],
    "plots.instructions": ["RESULT:instructions OUT.svg"],
    "plots.real_size": ["RESULT:real-size OUT.svg"],
    "plots.scale": ["RESULT:scale RESULT:start OUT.svg"],
    "plots.speed": [
        "RESULT:decode-greedy RESULT:decode-sampled RESULT:http RESULT:ceiling OUT.svg"
    ],
    "real_size": ["--vocabularies 2048 --lengths 64 --batches 1 --turns 1"],
    "routing.engines": ["--replicas 2 --prefixes 4 --requests 8 --words 20 --clients 2"],
    "routing.scale": ["--replicas 4 --routers 2 --measured 2"],
    "routing.simulation": ["--replicas 2 --prefixes 4 --requests 50"],
    "serving.ceiling": ["--streams 2 --tokens 20 --turns 1"],
    "serving.http": ["--modes proxy --clients 1 --requests 4 --turns 1"],
    "serving.start": ["--runs 1 --after 1"],
    "tables": ["", "RESULT:decode-greedy"],
    "texts.chat_model": ["equality --requests 2 --tokens 4", "speed --speed-tokens 8 --turns 1"],
    "texts.mtp": ["--train 1 --number 2 --drafts 1 --batches 1 --turns 1"],
    "texts.on_topic": ["--stories 4 --scales 1 2"],
    "texts.schemas": ["SCHEMAS --vocabulary 2048 --most 2"],
    "texts.scoring": ["equality --texts 2", "speed --turns 1", "harness --scales 1"],
    "texts.speculation": [
        "acceptance --stories 2",
        "speed embedded --turns 1 --tokens 8",
        "costs embedded --turns 1 --tokens 8",
    ],
}
"""The arguments of short runs. RESULT:NAME is the newest file of that benchmark."""

TAKES_LONG = {"__main__": "runs those above, for twelve minutes", "embeddings.engines": "a child"}
CASES = [(module, line) for module, lines in SMALL.items() for line in lines]


def test_each_benchmark_has_a_short_run():
    paths = (ROOT / "benchmarks").rglob("*.py")
    found = {
        ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts)
        for path in paths
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    known = SMALL.keys() | TAKES_LONG.keys()
    assert {name.removesuffix(".__main__") for name in found} == known


@pytest.mark.survey
@pytest.mark.parametrize(("module", "line"), CASES, ids=lambda value: value.partition(" ")[0])
def test_it_runs(module, line, tmp_path):
    (tmp_path / "schema.json").write_text(
        '{"type": "object", "properties": {"a": {"type": "null"}}}'
    )
    words = [_word(word, tmp_path) for word in line.split()]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *words],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def _word(word: str, folder: Path) -> str:
    if word.startswith("RESULT:"):
        return str(max(RESULTS.glob(f"{word.removeprefix('RESULT:')}_*.json")))
    places = {"OUT.svg": folder / "out.svg", "SCHEMAS": folder}
    return str(places.get(word, word))
