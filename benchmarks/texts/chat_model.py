"""The model of configs/cfg.yaml under guidance: equal to Hugging Face, and what n-gram drafts give.

    python -m benchmarks.texts.chat_model equality [--requests 200] [--tokens 64]
    python -m benchmarks.texts.chat_model speed [--turns 3]

`equality`: greedy float32 texts of the requests of `instructions/`, at scales 0.5 to 3. They are
compared token for token with `generate(guidance_scale=...)` of transformers. vLLM generates them
alone (one request at a time), at once (up to 32 in a step), and at once with n-gram drafts.

transformers generates in padded batches. Padding and batching change the order of additions, so two
correct engines differ by about 1e-5 in log-probability. Where the two best tokens are closer than
that, rounding decides. So each text is also checked against forward passes over it, one for each
stream, without a cache or padding: its *shortfall* at a token is the guided score of the best token
less that of the chosen one. A text whose largest shortfall is below `rounding(scale)` is a greedy
text of the model within rounding. The table counts texts that are equal, that differ at such a tie,
and that are wrong.

`speed`: output tokens per second on summaries and on code, with and without n-gram drafts, plain
and guided. Both copy much of their prompts, which is what n-grams are for. Turns are interleaved.

Prints a card, a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .. import ROOT
from ..instructions.context import Item, items
from ..instructions.prompts import NEGATIVE, Prompt, conversation, prompts
from ..llm import CHAT, chat_ids, guidance, guided_llm
from ..peer import guided_generate
from ..report import Report, parser
from ..turns import take_turns

SCALES = (0.5, 1.25, 1.5, 2.0, 3.0)
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
HF_BATCH = 20
BATCHES = (1, 4)


@dataclass(frozen=True)
class Request:
    """Token ids of both streams, as the chat template renders them."""

    prompt: list[int]
    negative: list[int]
    scale: float


def engines() -> tuple[Any, Any]:
    """One engine without drafts and one with n-grams, for the life of this process.

    In this order: once n-grams have imported numba, vLLM 0.32 fails to start another engine in the
    process (`_rebind_kernels` reads every object of every module). Both stay alive: vLLM's process
    groups go with the first engine.
    """
    made = partial(guided_llm, CHAT, mib=1024, max_model_len=2048)
    return made(), made(speculative_config=NGRAMS)


def generate(
    llm: Any, requests: Sequence[Request], *, max_tokens: int, guided: bool = True
) -> list[list[int]]:
    """Greedy token ids of all requests, in one call. Each text has `max_tokens`."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=guidance(request.scale, request.negative) if guided else None,
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


# --- equality


def rounding(scale: float) -> float:
    """How much two correct float32 engines may differ in a guided score.

    They differ by up to 1e-5 without guidance. The blend multiplies that by |s| + |1 - s|; a
    shortfall is a difference of two scores, and 4e-5 leaves a factor of two for each.
    """
    return 4e-5 * (abs(scale) + abs(1 - scale))


def equality_requests(tokenizer: Any, number: int) -> list[Request]:
    """The first `number` requests of the two tables of benchmarks/instructions; scales in turn."""
    chosen: list[Prompt | Item] = [*prompts(), *items()]
    return [
        Request(
            chat_ids(tokenizer, item.conditional()),
            chat_ids(tokenizer, item.negative()),
            SCALES[i % len(SCALES)],
        )
        for i, item in enumerate(chosen[:number])
    ]


def hf_texts(model: Any, requests: Sequence[Request], max_tokens: int) -> list[list[int]]:
    """`generate(guidance_scale=...)`: one call for HF_BATCH requests of one scale."""
    texts: list[list[int]] = [[] for _ in requests]
    for scale in sorted({request.scale for request in requests}):
        same = [i for i, request in enumerate(requests) if request.scale == scale]
        same.sort(key=lambda i: len(requests[i].prompt))
        for start in range(0, len(same), HF_BATCH):
            indices = same[start : start + HF_BATCH]
            made = guided_generate(
                model,
                [requests[i].prompt for i in indices],
                [requests[i].negative for i in indices],
                scale,
                max_tokens,
            )
            for i, text in zip(indices, made, strict=True):
                texts[i] = text
            print(f"transformers: scale {scale:g}, {len(indices)} texts", file=sys.stderr)
    return texts


def shortfall(model: Any, request: Request, text: list[int]) -> tuple[float, float]:
    """The largest shortfall of the tokens of `text`, and the least gap of the two best tokens."""
    import torch

    rows = []
    with torch.inference_mode():
        for start in (request.prompt, request.negative):
            logits = model(torch.tensor([[*start, *text[:-1]]])).logits[0, len(start) - 1 :]
            rows.append(torch.log_softmax(logits.double(), dim=-1))
    conditional, negative = rows
    guided = negative + request.scale * (conditional - negative)
    best = guided.topk(2, dim=-1).values
    chosen = guided.gather(1, torch.tensor(text)[:, None])[:, 0]
    return float((best[:, 0] - chosen).max()), float((best[:, 0] - best[:, 1]).min())


def equality(args: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    requests = equality_requests(tokenizer, args.requests)
    ways = vllm_texts(requests, args.tokens)
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(
        CHAT, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = hf_texts(model, requests, args.tokens)
    rows = []
    known: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}  # most texts are the same
    report.head(
        *("way", "equal", "differ at a tie", "wrong", "largest shortfall, in units of rounding")
    )
    for way, texts in (("transformers itself", expected), *ways.items()):
        row: dict[str, Any] = {"way": way, "equal": 0, "tie": 0, "wrong": 0, "shortfall": 0.0}
        for i, (request, text, want) in enumerate(zip(requests, texts, expected, strict=True)):
            if (i, tuple(text)) not in known:
                known[i, tuple(text)] = shortfall(model, request, text)
            short, gap = known[i, tuple(text)]
            row["shortfall"] = max(row["shortfall"], short / rounding(request.scale))
            kind = "equal" if text == want else "tie"
            if short > rounding(request.scale):
                kind = "wrong"
            row[kind] += 1
            if kind != "equal":
                pairs = enumerate(zip(text, want, strict=True))
                first = next((k for k, (a, b) in pairs if a != b), None)
                print(
                    f"{way}: request {i} is {kind} from token {first}, least gap {gap:.1e}",
                    file=sys.stderr,
                )
        rows.append(row)
        report.row(*list(row.values())[:-1], f"{row['shortfall']:.3f}")
    return rows


def vllm_texts(requests: Sequence[Request], max_tokens: int) -> dict[str, list[list[int]]]:
    plain, drafting = engines()
    texts = {
        "at once": generate(plain, requests, max_tokens=max_tokens),
        "at once, n-gram drafts": generate(drafting, requests, max_tokens=max_tokens),
        "alone": [],
    }
    for i, request in enumerate(requests):
        texts["alone"] += generate(plain, [request], max_tokens=max_tokens)
        if i % 20 == 19:
            print(f"alone: {i + 1} texts", file=sys.stderr)
    return texts


# --- speed


def documents() -> Iterator[str]:
    """Sections of this project's documentation of 600 to 2,000 characters."""
    for page in ("guidance", "sampling", "embeddings", "operations"):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        for section in text.split("\n## ")[1:]:
            if 600 <= len(section) <= 2000 and "|" not in section:
                yield section


def functions() -> Iterator[str]:
    """Functions of this project of 400 to 1,500 characters."""
    for file in sorted((ROOT / "cfg_core").glob("*.py")):
        source = file.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node) or ""
                if 400 <= len(text) <= 1500:
                    yield text


TASKS = {
    "summaries": ("Summarize the text of the user. Use its own words.", documents),
    "code": ("Repeat the Python function of the user with a comment on each line.", functions),
}


def speed(args: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    plain, drafting = engines()
    llms = {"no drafts": plain, "n-grams": drafting}
    tokenizer = plain.get_tokenizer()
    rows: list[dict[str, Any]] = []
    report.head(
        *("task", "batch", "plain", "plain, n-grams", "ratio"),
        *("guided", "guided, n-grams", "ratio"),
    )
    for task, (instruction, texts) in TASKS.items():
        requests = [
            Request(
                chat_ids(tokenizer, conversation(instruction, text)),
                chat_ids(tokenizer, conversation(NEGATIVE, text)),
                1.5,
            )
            for text in texts()
        ]
        for batch in BATCHES:
            row = {"task": task, "batch": batch, **rates(llms, requests[:batch], args)}
            cells = [task, batch]
            for kind in ("plain", "guided"):
                cells += [f"{row['rates'][f'{kind}, {name}']:.1f}" for name in llms]
                cells.append(f"{row['ratios'][kind]:.2f}")
            rows.append(row)
            report.row(*cells)
    return rows


def rates(
    llms: dict[str, Any], requests: Sequence[Request], args: argparse.Namespace
) -> dict[str, Any]:
    """Medians of tokens/s, of the ratio of drafts to none in one turn, and all turns."""

    def rate(llm: Any, guided: bool) -> float:
        start = time.perf_counter()
        texts = generate(llm, requests, max_tokens=args.speed_tokens, guided=guided)
        return sum(map(len, texts)) / (time.perf_counter() - start)

    ways: dict[str, Callable[[], float]] = {
        f"{kind}, {name}": partial(rate, llm, kind == "guided")
        for kind in ("plain", "guided")
        for name, llm in llms.items()
    }
    turns = take_turns(ways, args.turns)  # the first one also fills the prefix caches
    kinds = ("plain", "guided")
    ratios = {kind: turns.ratio(f"{kind}, n-grams", f"{kind}, no drafts") for kind in kinds}
    return {"rates": turns.medians(), "ratios": ratios, "turns": turns.took}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("part", choices=("equality", "speed"), nargs="?", default="speed")
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--tokens", type=int, default=64, help="a text of the equality table")
    options.add_argument("--speed-tokens", type=int, default=96, help="a text of the speed table")
    options.add_argument("--turns", type=int, default=3)
    args = options.parse_args()
    report = Report(f"chat model, {args.part}", args)
    report.end(rows={"equality": equality, "speed": speed}[args.part](args, report))


if __name__ == "__main__":
    main()
