"""What rules do for answers from passages, beside constant scales: right passages and wrong ones.

    python -m benchmarks.instructions.passages [--settings JSON] [--out RESULT.json]

The questions of `benchmarks.instructions.context`, greedy. A setting is the guidance fields of a
request; the negative has the question alone. Four shares, each with its 95% interval:

contradicted   the passage contradicts memory: answered from the passage
from memory    the same questions: answered from memory all the same
invented       memory knows nothing: answered from the passage
irrelevant     the passage is that of another question: answered from memory, which is right. Where
               unguided answers are wrong already, guidance can hardly help.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..llm import CHAT, chat_ids, guided_llm
from ..report import Report, parser
from . import context
from .__main__ import model_dtype
from .context import Item
from .frontier import name_of
from .intervals import bootstrap

Fields = dict[str, Any]


def rule(name: str, **parameters: float) -> Fields:
    return {"guidance_rule": {"name": name, **parameters}}


NWCAD = {"max_divergence": 0.05, "negative_margin": 0.5, "conditional_margin": 0.9}
SETTINGS: tuple[Fields, ...] = (
    {},
    *({"guidance_scale": scale} for scale in (1.25, 1.5, 1.75, 2.0, 2.5, 3.0)),
    *(rule("adacad", offset=offset) for offset in (0.0, 0.25, 0.5, 1.0)),
    rule("arr"),
    *({"guidance_scale": scale, **rule("nwcad", **NWCAD)} for scale in (1.5, 2.0)),
    *({"guidance_scale": scale, "guidance_max_kl": 0.5} for scale in (1.5, 2.0, 3.0)),
    {"guidance_scale": 2.0, "guidance_min_entropy": 1.0},
    {"guidance_scale": 2.0, "guidance_min_p": 0.1},
)


@dataclass(frozen=True)
class Questions:
    """Questions that are asked once, and the shares of the answers that count, by name."""

    items: Sequence[Item]
    counted: Mapping[str, Callable[[Item, str], bool]]


def questions_of(items: Sequence[Item]) -> list[Questions]:
    contradicted = [item for item in items if item.family == "counterfactual"]
    invented = [item for item in items if item.family == "invented"]
    others = [*contradicted[1:], contradicted[0]]
    irrelevant = [
        replace(item, passage=other.passage)
        for item, other in zip(contradicted, others, strict=True)
    ]
    both = {"contradicted": Item.from_passage, "from memory": Item.from_memory}
    return [
        Questions(contradicted, both),
        Questions(invented, {"invented": Item.from_passage}),
        Questions(irrelevant, {"irrelevant": Item.from_memory}),
    ]


class Passages:
    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        self.dtype = model_dtype(str(model))
        self._tokenizer = AutoTokenizer.from_pretrained(str(model))
        self._engine = guided_llm(model, dtype=self.dtype, max_model_len=1024)

    def answers(self, setting: Fields, items: Sequence[Item]) -> list[str]:
        from vllm import SamplingParams

        def params(item: Item) -> SamplingParams:
            negative = chat_ids(self._tokenizer, item.negative())
            fields = {**setting, "negative_prompt_token_ids": negative} if setting else None
            return SamplingParams(temperature=0.0, max_tokens=context.MAX_TOKENS, extra_args=fields)

        asked = [chat_ids(self._tokenizer, item.conditional()) for item in items]
        inputs = [{"prompt_token_ids": ids} for ids in asked]
        outputs = self._engine.generate(inputs, list(map(params, items)), use_tqdm=False)
        return [output.outputs[0].text for output in outputs]


def shares(bench: Passages, setting: Fields, asked: Sequence[Questions]) -> dict[str, Any]:
    """Each share by its name, with its interval."""
    found: dict[str, Any] = {}
    for questions in asked:
        answers = list(zip(questions.items, bench.answers(setting, questions.items), strict=True))
        for name, counts in questions.counted.items():
            hits = [float(counts(item, text)) for item, text in answers]
            found[name] = {"share": sum(hits) / len(hits), "interval": bootstrap(hits)}
    return found


def main() -> None:
    args = arguments()
    settings = json.loads(args.settings) if args.settings else SETTINGS
    bench, asked = Passages(args.model), questions_of(context.items())
    questions = {name: len(one.items) for one in asked for name in one.counted}
    report = Report("passages", args, model=args.model.name, dtype=bench.dtype, questions=questions)
    report.head("setting", *questions)
    points = []
    for setting in settings:
        found = shares(bench, setting, asked)
        points.append({"setting": setting, **found})
        cells = (
            "{:.0%} ({:.0%} to {:.0%})".format(one["share"], *one["interval"])
            for one in found.values()
        )
        report.row(name_of(setting), *cells)
    report.end(model=args.model.name, points=points)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--settings", help="JSON: a list of guidance fields, in place of ours")
    options.add_argument("--model", type=Path, default=CHAT)
    return options.parse_args()


if __name__ == "__main__":
    main()
