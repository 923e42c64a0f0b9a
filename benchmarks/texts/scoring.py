"""Scores under guidance: equality to the reference, speed, and the harness's accuracy by scale.

    python -m benchmarks.texts.scoring equality [--texts 200]
    python -m benchmarks.texts.scoring speed [--turns 5]
    python -m benchmarks.texts.scoring harness [--scales 1 1.25 1.5 2 3]

All use the chat model. `equality`: float32 scores of `cfg_core.vllm_plugin.scoring.score`, against
`cfg_core.reference.weighted_scores` on transformers in float64, so that all of the difference is
vLLM's rounding. For comparison, that of transformers in float32. The texts are answers to the
questions of instructions/context.jsonl, at scales 0.5 to 3; the negative lacks the passage.

`speed`: seconds for multiple choice, four endings for each context. Guided scoring reads B contexts
and B negatives. It is compared with vLLM's own `prompt_logprobs` of as many plain prompts as there
are streams, and of the conditional prompts alone. Turns are interleaved.

`harness`: lm-evaluation-harness, with `cfg_core.harness`, on a server. Each question of
instructions/context.jsonl has four endings: the passage's answer, what memory says (where it says
something), and answers to other questions. Guidance is away from the question without its passage
(`negative_from`), or from the context's last token.

Prints a card, a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools.serving.process import ServeProcess, shipped_config

from .. import oracle
from ..instructions.context import Item, items
from ..llm import CHAT, guided_llm
from ..report import Report, parser
from ..turns import take_turns

SCALES = (0.5, 1.25, 1.5, 2.0, 3.0)
CONTEXTS, ENDINGS = 24, 4
CONTEXT_TOKENS, NEGATIVE_TOKENS, ENDING_TOKENS = 200, 200, 16
NEGATIVES = {"without the passage": {"negative_from": "Question:"}, "last token": {}}
TASK = """\
task: passages
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_choice: endings
doc_to_target: gold
metric_list: [{{metric: acc}}]
"""


def engine(dtype: str) -> Any:
    return guided_llm(CHAT, dtype=dtype, mib=1024, max_model_len=2048, block_size=32)


# --- equality


def equality(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cfg_core.reference import Formula, weighted_scores
    from cfg_core.vllm_plugin.scoring import score

    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    texts = [
        (context_of(item, passage=True), context_of(item, passage=False), f" {answer}. It is so.")
        for item in items()
        for answer in [*item.answers[:1], *item.memory[:1], "a blue house", "nobody knows"]
    ][: args.texts]
    llm = engine("float32")
    found: list[Any] = [None] * len(texts)
    for at, scale in enumerate(SCALES):
        chosen = range(at, len(texts), len(SCALES))
        scores = score(llm, [texts[i] for i in chosen], scale=scale)
        for i, one in zip(chosen, scores, strict=True):
            found[i] = one
    single, double = (
        Prefixes(AutoModelForCausalLM.from_pretrained(CHAT, dtype=dtype).eval())
        for dtype in (torch.float32, torch.float64)
    )
    ours: list[float] = []
    theirs: list[float] = []
    for i, ((context, negative, _), one) in enumerate(zip(texts, found, strict=True)):
        scale, scored = SCALES[i % len(SCALES)], list(one.token_ids)
        streams = [tokenizer(text).input_ids for text in (context, negative)]
        rows = []
        for model in (double, single):
            model.read([[*stream, *scored] for stream in streams])
            formula = Formula(scales=((0, scale),))
            rows.append(
                weighted_scores(
                    model, streams[0], streams[1:], scored, formula, dtype=torch.float64
                )
            )
        for t, value, exact, rounded in zip(scored, one.log_probs, *rows, strict=True):
            ours.append(abs(float(exact[t]) - value))
            theirs.append(abs(float(exact[t] - rounded[t])))
    report.head(f"{len(texts)} texts", "tokens", "largest error, nats", "median", "within 1e-4")
    told: dict[str, Any] = {"texts": len(texts)}
    for who, errors in (("cfg-serve", ours), ("transformers", theirs)):
        within = sum(error < 1e-4 for error in errors)
        told[who] = {"tokens": len(errors), "largest": max(errors), "within": within}
        largest, middle = (f"{of(errors):.1e}" for of in (max, statistics.median))
        report.row(f"{who}, float32", len(errors), largest, middle, within)
    return told


class Prefixes:
    """A causal model that reads each stream once, and then answers for all beginnings of it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: list[tuple[list[int], Any]] = []

    def read(self, streams: list[list[int]]) -> None:
        import torch

        with torch.inference_mode():
            self._known = [(ids, self._model(torch.tensor([ids])).logits) for ids in streams]

    def __call__(self, input_ids: Any) -> Any:
        ids = input_ids[0].tolist()
        logits = next(rows for known, rows in self._known if known[: len(ids)] == ids)
        return SimpleNamespace(logits=logits[:, : len(ids)])


def context_of(item: Item, *, passage: bool) -> str:
    before = f"Answer from this passage only: {item.passage}\n\n" if passage else ""
    return f"{before}Question: {item.question}\nAnswer:"


# --- speed


def speed(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    from vllm import SamplingParams

    from cfg_core.vllm_plugin.scoring import score

    llm = engine("bfloat16")
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(count)]

    def load() -> list[tuple[list[int], list[int], list[int]]]:
        """New contexts in each turn, so that no cache has them before."""
        pairs = [(ids(CONTEXT_TOKENS), ids(NEGATIVE_TOKENS)) for _ in range(CONTEXTS)]
        return [(*pair, ids(ENDING_TOKENS)) for pair in pairs for _ in range(ENDINGS)]

    def plain(prompts: Sequence[list[int]]) -> None:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(inputs, params, use_tqdm=False)

    def took(kind: str) -> float:
        texts = load()
        start = time.perf_counter()
        if kind == "guided":
            score(llm, texts, scale=1.5)
        elif kind == "plain, conditional prompts":
            plain([context + ending for context, _, ending in texts])
        else:
            plain(
                [one + ending for context, negative, ending in texts for one in (context, negative)]
            )
        return time.perf_counter() - start

    kinds = ("guided", "plain, both prompts", "plain, conditional prompts")
    turns = take_turns({kind: partial(took, kind) for kind in kinds}, args.turns)
    scored = CONTEXTS * ENDINGS * ENDING_TOKENS
    print(
        f"{CONTEXTS} contexts of {CONTEXT_TOKENS} tokens, negatives of {NEGATIVE_TOKENS},"
        f" {ENDINGS} endings of {ENDING_TOKENS} for each"
    )
    report.head("", "seconds", "scored tokens/s", "guided is faster by")
    rows = {}
    for kind in kinds:
        seconds, ratio = turns.median(kind), turns.ratio(kind, "guided")
        rows[kind] = {"seconds": seconds, "ratio": ratio}
        report.row(kind, f"{seconds:.2f}", f"{scored / seconds:.0f}", f"{ratio:.2f}")
    return {"rows": rows}


# --- harness


def documents() -> list[dict[str, Any]]:
    """Multiple choice with four endings. The passage's answer stands at a random place."""
    rng, every = random.Random(1), items()
    found = []
    for item in every:
        right = f" {item.answers[0]}"
        wrong = [f" {word}" for word in item.memory[:1]]
        others = [f" {o.answers[0]}" for o in every if o is not item and o.family == item.family]
        endings = [right, *wrong, *rng.sample([o for o in others if o != right], 3 - len(wrong))]
        rng.shuffle(endings)
        found.append(
            {
                "context": context_of(item, passage=True),
                "endings": endings,
                "gold": endings.index(right),
            }
        )
    return found


def harness(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as name, ServeProcess(shipped_config("cfg")) as server:
        folder = Path(name)
        data = folder / "items.jsonl"
        docs = documents()
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        (folder / "passages.yaml").write_text(TASK.format(data=data))
        for negative, options in NEGATIVES.items():
            for scale in args.scales:
                accuracy = run_harness(folder, server.url, {"guidance_scale": scale, **options})
                rows.append({"negative": negative, "scale": scale, "accuracy": accuracy})
    print(f"{len(docs)} questions, accuracy by scale")
    report.head("negative", *(f"{scale:g}" for scale in args.scales))
    for negative in NEGATIVES:
        shown = [f"{100 * r['accuracy']:.1f}%" for r in rows if r["negative"] == negative]
        report.row(negative, *shown)
    return {"questions": len(docs), "rows": rows}


def run_harness(folder: Path, url: str, options: dict[str, Any]) -> float:
    """The accuracy."""
    out = folder / "out.json"
    arguments = {
        "model": CHAT.name,
        "tokenizer": str(CHAT),
        "base_url": f"{url}/v1/completions",
        "num_concurrent": 8,
        "max_length": 1024,
    }
    command = [sys.executable, "-m", "cfg_core.harness", "run", "--model=cfg-serve"]
    command += [f"--include_path={folder}", "--tasks=passages", f"--output_path={out}"]
    subprocess.run(
        [*command, "--model_args", json.dumps({**arguments, **options})],
        env={**os.environ, "PYTHONPATH": oracle.FOLDER, "HF_HOME": str(folder)},
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=600,
    )
    (results,) = folder.glob("out*.json")
    found: float = json.loads(results.read_text())["results"]["passages"]["acc,none"]
    results.unlink()
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("part", choices=["equality", "speed", "harness"])
    options.add_argument("--texts", type=int, default=200)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--scales", type=float, nargs="+", default=[1, 1.25, 1.5, 2, 3])
    args = options.parse_args()
    report = Report(f"scoring-{args.part}", args)
    parts = {"equality": equality, "speed": speed, "harness": harness}
    report.end(**parts[args.part](args, report))


if __name__ == "__main__":
    main()
