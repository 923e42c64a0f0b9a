"""What guidance is for, on the embedded model: how the share of on-topic words moves with the
scale.

    python -m benchmarks.texts.on_topic [--stories 240] [--scales 1 1.5 2 3 5]

Each point samples stories through vLLM with the plugin, at temperature 1, evenly over the model's
topics. The conditional prompt names a topic; the negative names none ("topic-free") or another one
("opposing"). The model's training text lets the topic decide only some of the words, so at scale 1
about half of them are off topic; `guided = negative + s * (conditional - negative)` removes what
the two prompts have in common.

Prints a card, a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from models.training.measure import TOPIC_NAMES, measure_point, negative_ids, prompt_ids

from ..llm import STORIES, guidance, guided_llm
from ..report import Report, parser

NEGATIVES = {"topic-free": "free", "opposing": "opposing"}
MAX_TOKENS = 250


def sample(llm: Any, kind: str, negative: str, scale: float, num_stories: int) -> list[list[int]]:
    """`num_stories` stories as token ids; story i is about topic i modulo the number of topics."""
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    prompts, params = [], []
    for i in range(num_stories):
        topic = TOPIC_NAMES[i % len(TOPIC_NAMES)]
        extra = None
        if scale != 1:
            extra = guidance(scale, negative_ids(tokenizer, kind, negative, topic))
        prompts.append({"prompt_token_ids": prompt_ids(tokenizer, kind, topic)})
        params.append(
            SamplingParams(temperature=1.0, seed=i, max_tokens=MAX_TOKENS, extra_args=extra)
        )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def measure(llm: Any, args: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    """One row per negative and scale."""
    rows = []
    for name, negative in NEGATIVES.items():
        for scale in args.scales:
            start = time.perf_counter()
            texts = sample(llm, args.kind, negative, scale, args.stories)
            seconds = time.perf_counter() - start
            point = measure_point(llm.get_tokenizer(), texts)
            tokens = sum(map(len, texts))
            rows.append(
                {"negative": name, "scale": scale, **vars(point), "tokens_per_s": tokens / seconds}
            )
            shares = (f"{share:.1%}" for share in vars(point).values())
            report.row(name, f"{scale:g}", *shares, f"{tokens / seconds:.0f}")
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--stories", type=int, default=240)
    options.add_argument("--kind", choices=("completion", "chat"), default="completion")
    options.add_argument("--scales", type=float, nargs="+", default=[1.0, 1.5, 2.0, 3.0, 5.0])
    args = options.parse_args()
    report = Report("on_topic", args)
    report.head(
        *("negative", "scale", "on topic", "on the opposing topic", "grammatical", "ended"),
        "output tokens/s",
    )
    llm = guided_llm(STORIES, mib=256, max_model_len=512)
    report.end(rows=measure(llm, args, report))


if __name__ == "__main__":
    main()
