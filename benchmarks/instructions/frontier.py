"""What a limit, a cut or a rule gives for what it costs: the share of instructions obeyed against
the fluency of the answers, for each setting.

    python -m benchmarks.instructions.frontier --answers ANSWERS.jsonl --out RESULT.json
    python -m benchmarks.plots.frontier RESULT.json PLOT.svg

All prompts of `benchmarks.instructions`, greedy, or those of `--questions arithmetic`. A setting is
the guidance fields of a request. `guided` is the share of tokens that a gate leaves guided. Fluency
is the perplexity of the unguided model, its 90th percentile over answers, once after the
conditional prompt, which finds obeying an odd instruction odd, and once after the same question
without the instruction (`neutral`). `*` marks the settings that no other one beats in both the
share and the first perplexity.

With `--answers`, a run that was cut off, by `--minutes` for example, goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..card import card
from ..llm import CHAT, chat_ids, guided_llm, set_environment
from ..report import parser
from . import prompts
from .__main__ import model_dtype
from .fluency import Scorer, repetition
from .intervals import bootstrap
from .prompts import Prompt

Fields = dict[str, Any]
Point = dict[str, Any]

QUESTIONS = {"instructions": prompts.prompts, "arithmetic": prompts.arithmetic}
SCALES = (1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
LIMITS: tuple[Fields, ...] = (
    {},
    {"guidance_max_kl": 0.25},
    {"guidance_max_kl": 0.5},
    {"guidance_max_kl": 1.0},
    {"guidance_max_kl": 2.0},
    {"guidance_min_entropy": 0.5},
    {"guidance_min_entropy": 1.0},
    {"guidance_min_p": 0.05},
    {"guidance_max_kl": 1.0, "guidance_min_p": 0.02},
    {"guidance_max_kl": 1.0, "guidance_min_entropy": 1.0},
)


def grid() -> list[Fields]:
    """The settings of a whole run: no guidance, and each limit at each scale."""
    guided = [{"guidance_scale": scale, **limit} for limit in LIMITS for scale in SCALES]
    return [{}, *guided]


def main() -> None:
    args = arguments()
    set_environment()
    settings = json.loads(args.settings) if args.settings else grid()
    bench = Frontier(args)
    points = bench.points(settings)
    print(f"\n{table(points)}")
    if args.out:
        result = {"benchmark": "frontier", "card": bench.card, "points": points}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--settings", help="JSON: a list of guidance fields, in place of the grid")
    options.add_argument("--questions", choices=list(QUESTIONS), default="instructions")
    options.add_argument("--prompts", type=int, help="all if left out")
    options.add_argument("--minutes", type=float, help="begin no further setting after so many")
    options.add_argument("--model", type=Path, default=CHAT)
    options.add_argument("--answers", type=Path, help="JSON lines: keep answers, and resume")
    return options.parse_args()


class Frontier:
    """The engine and the scorer start when the first setting needs them."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self._args = args
        self._dtype = model_dtype(str(args.model))
        self._tokenizer = AutoTokenizer.from_pretrained(str(args.model))
        self._prompts = QUESTIONS[args.questions](args.prompts)
        self._kept = _read(args.answers)
        self._engine: Any = None
        self._scorer: Scorer | None = None
        self.card: dict[str, Any] = card() | {
            "model": args.model.name,
            "dtype": self._dtype,
            "prompts": len(self._prompts),
            "max_tokens": prompts.MAX_TOKENS,
        }

    def points(self, settings: Sequence[Fields]) -> list[Point]:
        """The points of all settings that there was time for. Prints a line for each new one."""
        start, found = time.perf_counter(), []
        for i, setting in enumerate(settings, 1):
            key = self._key(setting)
            if key not in self._kept:
                minutes = (time.perf_counter() - start) / 60
                if self._args.minutes is not None and minutes > self._args.minutes:
                    continue
                self._kept[key] = self._answer(setting)
                self._keep(key)
                minutes = (time.perf_counter() - start) / 60
                print(f"{i}/{len(settings)} {name_of(setting)}; {minutes:.1f} min", flush=True)
            found.append(point(setting, self._kept[key], self._prompts))
        return on_frontier(found)

    def _key(self, setting: Fields) -> str:
        run = [self._args.model.name, self._dtype, len(self._prompts)]
        if self._args.questions != "instructions":  # as files of before have it
            run.append(self._args.questions)
        return json.dumps([*run, setting], sort_keys=True)

    def _keep(self, key: str) -> None:
        if self._args.answers:
            with self._args.answers.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "answers": self._kept[key]}) + "\n")

    def _answer(self, setting: Fields) -> list[dict[str, Any]]:
        """One answer to each prompt, with its losses in nats per token."""
        from vllm import SamplingParams

        if self._engine is None:
            self._engine = guided_llm(self._args.model, dtype=self._dtype, max_model_len=1024)
        self._scorer = self._scorer or Scorer(str(self._args.model), self._dtype)
        asked = [chat_ids(self._tokenizer, prompt.conditional()) for prompt in self._prompts]
        neutral = [chat_ids(self._tokenizer, prompt.negative()) for prompt in self._prompts]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=prompts.MAX_TOKENS,
                extra_args=_with_negative(setting, ids),
            )
            for ids in neutral
        ]
        inputs = [{"prompt_token_ids": ids} for ids in asked]
        scheduler = self._engine.llm_engine.engine_core.engine_core.scheduler
        before = scheduler.guidance_stats()
        texts, tokens, ended = [], [], []
        for output in self._engine.generate(inputs, params, use_tqdm=False):
            choice = output.outputs[0]
            ended.append(choice.finish_reason == "stop")
            texts.append(choice.text)
            tokens.append(list(choice.token_ids)[: -1 if ended[-1] else None])
        share = _share_guided(before, scheduler.guidance_stats())
        losses = self._scorer.losses(list(zip(asked, tokens, strict=True)))
        neutral_losses = self._scorer.losses(list(zip(neutral, tokens, strict=True)))
        return [
            {
                "text": text,
                "ended": end,
                "tokens": len(ids),
                "loss": loss,
                "neutral_loss": after_neutral,
                "repetition": repetition(ids),
                "guided": share,
            }
            for text, end, ids, loss, after_neutral in zip(
                texts, ended, tokens, losses, neutral_losses, strict=True
            )
        ]


def _with_negative(setting: Fields, negative: Sequence[int]) -> Fields | None:
    """A setting as a request has it. One with a suffix needs no other negative."""
    if not setting or "negative_suffix" in setting:
        return setting or None
    return {**setting, "negative_prompt_token_ids": negative}


def _share_guided(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Of the tokens of a setting, those that were guided."""
    tokens, closed = (after[n] - before[n] for n in ("guided_tokens", "gate_closed_tokens"))
    return 1 - closed / tokens if tokens else 0.0


def _read(path: Path | None) -> dict[str, list[dict[str, Any]]]:
    """The answers that a file has, by the key of their setting. A cut line is passed over."""
    kept = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path and path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        kept[row["key"]] = row["answers"]
    return kept


def point(setting: Fields, answers: Sequence[Mapping[str, Any]], asked: Sequence[Prompt]) -> Point:
    """What a setting gives and costs."""
    obeyed = [
        float(prompt.checker(answer["text"], answer["ended"]))
        for prompt, answer in zip(asked, answers, strict=True)
    ]
    repeated = [a["repetition"] for a in answers if a["repetition"] is not None]
    return {
        "setting": setting,
        "share": sum(obeyed) / len(obeyed),
        "interval": bootstrap(obeyed),
        **_perplexity("perplexity", [answer["loss"] for answer in answers]),
        **_perplexity("neutral", [answer["neutral_loss"] for answer in answers]),
        "repetition": sum(repeated) / len(repeated),
        "tokens": sum(answer["tokens"] for answer in answers) / len(answers),
        "guided": answers[0].get("guided"),  # files of before do not have it
    }


def _perplexity(name: str, losses: Sequence[float | None]) -> Point:
    """Over answers; those without tokens have none."""
    values = [math.exp(loss) for loss in losses if loss is not None]
    return {f"{name}_median": float(np.median(values)), f"{name}_p90": _p90(values)}


def _p90(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.9))


def on_frontier(points: Sequence[Point]) -> list[Point]:
    """The same points; `best` says that no other one obeys as much at a lower 90th percentile."""

    def is_beaten(one: Point) -> bool:
        return any(
            other["share"] >= one["share"]
            and other["perplexity_p90"] <= one["perplexity_p90"]
            and (other["share"], other["perplexity_p90"]) != (one["share"], one["perplexity_p90"])
            for other in points
        )

    return [{**one, "best": not is_beaten(one)} for one in points]


def name_of(setting: Fields) -> str:
    """A setting in the words of a request, without the prefix of its fields."""
    words = []
    for field, value in setting.items():
        if isinstance(value, dict):  # a rule
            numbers = [f"{name} {number:g}" for name, number in value.items() if name != "name"]
            words.append(" ".join([value["name"], *numbers]))
        elif isinstance(value, str):
            words.append(f"{field} {value!r}")
        else:
            words.append(f"{field.removeprefix('guidance_')} {value:g}")
    return ", ".join(words) or "no guidance"


def table(points: Sequence[Point]) -> str:
    lines = [
        "| setting | obeyed | 95% | guided | ppl 50 | ppl 90 | neutral 90 | repeated | tokens | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for p in points:
        low, high = p["interval"]
        guided = "-" if p["guided"] is None else f"{p['guided']:.0%}"
        lines.append(
            f"| {name_of(p['setting'])} | {p['share']:.1%} | {low:.1%} to {high:.1%} | {guided} |"
            f" {p['perplexity_median']:.2f} | {p['perplexity_p90']:.2f} | {p['neutral_p90']:.2f} |"
            f" {p['repetition']:.1%} | {p['tokens']:.0f} | {'*' if p['best'] else ''} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
