"""The model of configs/cfg.yaml under guidance: equal to Hugging Face, and what n-gram drafts give.

    python benchmarks/bench_chat_model.py equality [--requests 200] [--tokens 64]
    python benchmarks/bench_chat_model.py speed [--turns 3]

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
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
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


def engine(**options: Any) -> Any:
    from vllm import LLM

    from cfg_core.vllm_plugin import guided_engine_args

    return LLM(
        str(MODEL),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=64,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        **options,
        **guided_engine_args(),
    )


def engines() -> tuple[Any, Any]:
    """One engine without drafts and one with n-grams, for the life of this process.

    In this order: once n-grams have imported numba, vLLM 0.32 fails to start another engine in the
    process (`_rebind_kernels` reads every object of every module). Both stay alive: vLLM's process
    groups go with the first engine.
    """
    return engine(), engine(speculative_config=NGRAMS)


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
            extra_args={
                "guidance_scale": request.scale,
                "negative_prompt_token_ids": request.negative,
            }
            if guided
            else None,
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


# --- equality


def rounding(scale: float) -> float:
    """How much two correct float32 engines may differ in a guided score.

    They differ by up to 1e-5 without guidance. The blend multiplies that by |s| + |1 - s|; a
    shortfall is a difference of two scores, and 4e-5 leaves a factor of two for each.
    """
    return 4e-5 * (abs(scale) + abs(1 - scale))


def equality_requests(tokenizer: Any, number: int) -> list[Request]:
    """The first `number` requests of the two tables of bench_instructions; scales in turn."""
    from instructions.context import Item, items
    from instructions.prompts import Prompt, prompts

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
            ids, mask = padded([requests[i].prompt for i in indices])
            negative, negative_mask = padded([requests[i].negative for i in indices])
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_tokens,
                guidance_scale=scale,
                negative_prompt_ids=negative,
                negative_prompt_attention_mask=negative_mask,
                pad_token_id=0,
            )
            for i, row in zip(indices, out[:, ids.shape[1] :].tolist(), strict=True):
                texts[i] = row
            print(f"transformers: scale {scale:g}, {len(indices)} texts", file=sys.stderr)
    return texts


def padded(prompts: list[list[int]]) -> tuple[Any, Any]:
    """Token ids and attention mask [B, T] int64, padded on the left."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


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


def equality(args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    requests = equality_requests(tokenizer, args.requests)
    ways = vllm_texts(requests, args.tokens)
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None  # as ignore_eos
    expected = hf_texts(model, requests, args.tokens)
    rows = []
    known: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}  # most texts are the same
    print("| way | equal | differ at a tie | wrong | largest shortfall, in units of rounding |")
    print("|---|---|---|---|---|")
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
        counts = " | ".join(str(row[kind]) for kind in ("equal", "tie", "wrong"))
        print(f"| {way} | {counts} | {row['shortfall']:.3f} |", flush=True)
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
    for file in ("reference.py", "lockstep.py", "params.py"):
        source = (ROOT / "cfg_core" / file).read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node) or ""
                if 400 <= len(text) <= 1500:
                    yield text


TASKS = {
    "summaries": ("Summarize the text of the user. Use its own words.", documents),
    "code": ("Repeat the Python function of the user with a comment on each line.", functions),
}


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    from instructions.prompts import NEGATIVE, conversation

    plain, drafting = engines()
    llms = {"no drafts": plain, "n-grams": drafting}
    tokenizer = plain.get_tokenizer()
    rows = []
    print("| task | batch | plain | plain, n-grams | ratio | guided | guided, n-grams | ratio |")
    print("|---|---|---|---|---|---|---|---|")
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
            rows.append({"task": task, "batch": batch, **rates(llms, requests[:batch], args)})
            print(line(rows[-1]), flush=True)
    return rows


def rates(
    llms: dict[str, Any], requests: Sequence[Request], args: argparse.Namespace
) -> dict[str, Any]:
    """Medians of tokens/s, of the ratio of drafts to none in one turn, and all turns."""
    turns = []
    for _ in range(args.turns + 1):
        turn = {}
        for guided in (False, True):
            for name, llm in llms.items():
                start = time.perf_counter()
                texts = generate(llm, requests, max_tokens=args.speed_tokens, guided=guided)
                took = time.perf_counter() - start
                turn[f"{'guided' if guided else 'plain'}, {name}"] = sum(map(len, texts)) / took
        turns.append(turn)
    turns = turns[1:]  # the first one warms up, and fills the prefix caches
    medians = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    ratios = {
        kind: statistics.median(t[f"{kind}, n-grams"] / t[f"{kind}, no drafts"] for t in turns)
        for kind in ("plain", "guided")
    }
    return {"rates": medians, "ratios": ratios, "turns": turns}


def line(row: dict[str, Any]) -> str:
    cells = [row["task"], str(row["batch"])]
    for kind in ("plain", "guided"):
        cells += [f"{row['rates'][f'{kind}, {name}']:.1f}" for name in ("no drafts", "n-grams")]
        cells.append(f"{row['ratios'][kind]:.2f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("equality", "speed"), nargs="?", default="speed")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="a text of the equality table")
    parser.add_argument("--speed-tokens", type=int, default=96, help="a text of the speed table")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a file for the line of JSON")
    args = parser.parse_args()
    described = card()
    print(json.dumps(described))
    rows = equality(args) if args.part == "equality" else speed(args)
    result = json.dumps(
        {
            "benchmark": f"chat model, {args.part}",
            "card": described,
            **{key: value for key, value in vars(args).items() if key != "out"},
            "rows": rows,
        }
    )
    print(result)
    if args.out:
        args.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
