"""The model of configs/cfg.yaml: are guided texts those of Hugging Face, and what do n-grams give?

    python benchmarks/bench_chat_model.py equality [--prompts 200] [--alone 200]
    python benchmarks/bench_chat_model.py speed

`equality`: guided greedy texts of 64 tokens in float32, from prompts and passages of
benchmarks/instructions, at four scales: one request at a time, all at once, and all at once with
n-gram drafts. Hugging Face's model then reads each text, once for each stream, and computes the
guided scores in front of each token. A token is equal if it has the highest one: then its greedy
`generate` with `guidance_scale` has chosen it, too. A token whose lead over the second is within
the rounding of two correct engines is a tie.

`speed`: output tokens/s of guided requests with and without n-gram drafts, for two tasks that
repeat what is in the prompt (a summary of a long text, and code with a changed name) and one that
does not (a story), in the type of configs/cfg.yaml. Turns of the two engines are interleaved, and
medians count.

Prints a card, a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)

from card import card  # noqa: E402
from instructions.engine import dtype, token_ids  # noqa: E402
from instructions.passages import PASSAGES  # noqa: E402
from instructions.prompts import NEUTRAL, PROMPTS, conversation  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
SCALES = (0.5, 1.5, 2.5, 4.0)
NEW_TOKENS = 64
ROUNDING = 2e-5
"""Difference of log-probabilities of two correct engines in float32 (tests/engine/oracle.py)."""
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
TURNS = 3


class Request(NamedTuple):
    prompt: tuple[int, ...]
    negative: tuple[int, ...]
    scale: float


class Told(NamedTuple):
    """What Hugging Face's model says about one text.

    wrong: tokens that do not have the highest guided score, ties left out.
    ties: tokens that are not the first, but within rounding of it.
    lead: the least lead of a text's tokens over the next best, in units of the rounding.
    """

    wrong: int
    ties: int
    lead: float


def engine(drafts: bool, precision: str) -> Any:
    from vllm import LLM

    from cfg_core.vllm_plugin import guided_engine_args

    return LLM(
        str(MODEL),
        dtype=precision,
        max_model_len=2048,
        max_num_seqs=64,
        enforce_eager=True,
        kv_cache_memory_bytes=2 << 30,
        speculative_config=NGRAMS if drafts else None,
        **guided_engine_args(),
    )


def generate(llm: Any, requests: Sequence[Request], new_tokens: int) -> list[list[int]]:
    """Greedy texts of requests that are sent at once."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0,
            max_tokens=new_tokens,
            detokenize=False,
            extra_args={
                "guidance_scale": request.scale,
                "negative_prompt_token_ids": list(request.negative),
            },
        )
        for request in requests
    ]
    prompts: Any = [{"prompt_token_ids": list(request.prompt)} for request in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


# --- equality -------------------------------------------------------------------------------------


def requests_of(llm: Any, number: int) -> list[Request]:
    """`number` different requests: instructions, passages, then the same at further scales."""
    pairs = [
        (conversation(p.instruction, p.task), conversation(NEUTRAL, p.task)) for p in PROMPTS
    ] + [
        (conversation(NEUTRAL, p.with_passage), conversation(NEUTRAL, p.question)) for p in PASSAGES
    ]
    rounds = itertools.count()
    made: list[Request] = []
    for turn in rounds:
        for i, (prompt, negative) in enumerate(pairs):
            if len(made) == number:
                return made
            scale = SCALES[(i + turn) % len(SCALES)]
            made.append(Request(token_ids(llm, prompt), token_ids(llm, negative), scale))
    raise AssertionError("unreachable")


def judge(model: Any, request: Request, text: Sequence[int]) -> Told:
    """Compare each token of a text with the guided scores of Hugging Face's model."""
    import torch

    rows = []
    with torch.inference_mode():
        for start in (request.prompt, request.negative):
            logits = model(torch.tensor([[*start, *text[:-1]]])).logits[0, len(start) - 1 :]
            rows.append(torch.log_softmax(logits.double(), dim=-1))
    conditional, negative = rows
    scores = negative + request.scale * (conditional - negative)
    chosen = scores.gather(1, torch.tensor(text).unsqueeze(1)).squeeze(1)
    best = scores.topk(2, dim=-1).values
    unit = ROUNDING * (abs(request.scale) + abs(1 - request.scale))
    behind = best[:, 0] - chosen
    return Told(
        wrong=int((behind > unit).sum()),
        ties=int(((behind > 0) & (behind <= unit)).sum()),
        lead=float((best[:, 0] - best[:, 1]).min() / unit),
    )


def equality(number: int, alone: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    llm = engine(drafts=False, precision="float32")
    requests = requests_of(llm, number)
    texts = {
        "at once": generate(llm, requests, NEW_TOKENS),
        "alone": [generate(llm, [request], NEW_TOKENS)[0] for request in requests[:alone]],
    }
    del llm
    texts["at once, n-grams"] = generate(engine(True, "float32"), requests, NEW_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    told = [judge(model, r, t) for r, t in zip(requests, texts["at once"], strict=True)]
    print(f"{'texts':<18}{'requests':>9}{'tokens':>8}{'wrong':>7}{'ties':>6}{'as at once':>12}")
    lines = []
    for kind, made in texts.items():
        again = [
            first if text == base else judge(model, request, text)
            for request, text, base, first in zip(
                requests, made, texts["at once"], told, strict=False
            )
        ]
        same = sum(a == b for a, b in zip(made, texts["at once"], strict=False))
        line = {
            "texts": kind,
            "requests": len(made),
            "tokens": sum(map(len, made)),
            "wrong": sum(one.wrong for one in again),
            "ties": sum(one.ties for one in again),
            "as_at_once": same,
        }
        lines.append(line)
        print(
            "{texts:<18}{requests:>9}{tokens:>8}{wrong:>7}{ties:>6}{as_at_once:>12}".format(**line)
        )
    close = sum(one.lead < 1 for one in told)
    print(f"texts with a token whose lead is within rounding: {close} of {len(told)}")
    print(json.dumps({"equality": lines, "close": close}))


# --- speed ----------------------------------------------------------------------------------------

CODE = """def total_price(items, discount):
    price_sum = 0
    for item in items:
        price_sum += item.price * item.count
    price_sum = price_sum - price_sum * discount
    if price_sum < 0:
        price_sum = 0
    return price_sum
"""


def tasks(llm: Any) -> dict[str, list[Request]]:
    """Eight requests for each task, at scale 1.5."""
    story = " ".join(passage.text for passage in PASSAGES[:6])
    texts = {
        "summary": [
            f"Repeat the important sentences of this text word by word:\n{story}\nPart {i}."
            for i in range(8)
        ],
        "code": [
            f"Write this code again and rename price_sum to sum{i}:\n{CODE}" for i in range(8)
        ],
        "story": [f"Tell a story about the number {i}." for i in range(8)],
    }
    instruction = "Do exactly what the user asks for, and nothing else."
    return {
        name: [
            Request(
                token_ids(llm, conversation(instruction, text)),
                token_ids(llm, conversation(NEUTRAL, text)),
                1.5,
            )
            for text in users
        ]
        for name, users in texts.items()
    }


def speed() -> None:
    engines = {kind: engine(kind == "n-grams", dtype()) for kind in ("none", "n-grams")}
    print(f"{'task':<10}{'clients':>8}{'none, tok/s':>13}{'n-grams, tok/s':>16}{'ratio':>7}")
    lines = []
    for task, requests in tasks(engines["none"]).items():
        for clients in (1, 8):
            rates: dict[str, list[float]] = {kind: [] for kind in engines}
            for _, (kind, llm) in itertools.product(range(TURNS), engines.items()):
                began = time.perf_counter()
                made = generate(llm, requests[:clients], 128)
                rates[kind].append(sum(map(len, made)) / (time.perf_counter() - began))
            none, ngrams = (statistics.median(rates[kind]) for kind in engines)
            ratio = statistics.median(
                b / a for a, b in zip(rates["none"], rates["n-grams"], strict=True)
            )
            lines.append({"task": task, "clients": clients, "none": none, "ngrams": ngrams})
            print(f"{task:<10}{clients:>8}{none:>13.1f}{ngrams:>16.1f}{ratio:>7.2f}")
    print(json.dumps({"speed": lines}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["equality", "speed"])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--alone", type=int, default=200)
    options = parser.parse_args()
    precision = "float32" if options.what == "equality" else dtype()
    for name, value in {**card(), "model": MODEL.name, "dtype": precision}.items():
        print(f"{name}: {value}")
    if options.what == "equality":
        equality(options.prompts, min(options.alone, options.prompts))
    else:
        speed()


if __name__ == "__main__":
    main()
