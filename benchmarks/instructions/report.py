"""From answers to points, and from points to tables.

A point is one table, mode and scale. Shares are means over prompts of the mean over a prompt's
samples. All shares are from 0 to 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .answers import NEGATIVE_ALONE, PLAIN, Answer
from .context import Item
from .intervals import bootstrap, paired_difference
from .prompts import Prompt

Point = dict[str, Any]


def points(answers: Sequence[Answer], tasks: Mapping[str, Prompt | Item]) -> list[Point]:
    """One point for each table, mode and scale, in that order. `tasks` are by name.

    `share` is what obeyed, or has the passage's answer. `memory` is the share of counterfactual
    items with memory's answer and not the passage's. `difference` is paired with scale 1 of the
    same table and mode.
    """
    groups: dict[tuple[str, str, float], list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[answer.table, answer.mode, answer.scale].append(answer)
    order = sorted(groups, key=lambda key: (key[0] != "instructions", key[1], key[2]))
    found = []
    for table, mode, scale in order:
        own = _by_prompt(groups[table, mode, scale], tasks)
        point: Point = {"table": table, "mode": mode, "scale": scale}
        point |= _share(own) | _families(own, tasks)
        if plain := groups.get((table, mode, PLAIN)):
            before = _by_prompt(plain, tasks)
            point["difference"], point["difference_interval"] = paired_difference(
                [_mean(own[name]) for name in sorted(own)],
                [_mean(before[name]) for name in sorted(own)],
            )
        if table == "context":
            point["memory"] = _memory(groups[table, mode, scale], tasks)
        found.append(point | _fluency(groups[table, mode, scale]))
    return found


def _by_prompt(
    answers: Sequence[Answer], tasks: Mapping[str, Prompt | Item]
) -> dict[str, list[bool]]:
    """Whether the answers to each prompt succeed."""
    found: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        task = tasks[answer.prompt]
        if isinstance(task, Prompt):
            success = task.checker(answer.text, answer.ended)
        else:
            success = task.from_passage(answer.text)
        found[answer.prompt].append(success)
    return found


def _share(by_prompt: Mapping[str, list[bool]]) -> Point:
    values = [_mean(by_prompt[name]) for name in sorted(by_prompt)]
    return {"prompts": len(values), "share": _mean(values), "interval": bootstrap(values)}


def _families(
    by_prompt: Mapping[str, list[bool]], tasks: Mapping[str, Prompt | Item]
) -> dict[str, dict[str, float]]:
    families: dict[str, list[float]] = defaultdict(list)
    for name, successes in by_prompt.items():
        families[tasks[name].family].append(_mean(successes))
    return {"families": {name: _mean(families[name]) for name in sorted(families)}}


def _memory(answers: Sequence[Answer], tasks: Mapping[str, Prompt | Item]) -> float | None:
    """Each item has as many samples as the others, so the mean over answers is that over items."""
    found = [
        task.from_memory(answer.text)
        for answer in answers
        if isinstance(task := tasks[answer.prompt], Item) and task.memory
    ]
    return _mean(found) if found else None


def _fluency(answers: Sequence[Answer]) -> Point:
    """Over answers; those without tokens have no perplexity, and those without 4-grams no
    repetition."""
    perplexities = [math.exp(answer.loss) for answer in answers if answer.loss is not None]
    repetitions = [answer.repetition for answer in answers if answer.repetition is not None]
    return {
        "answers": len(answers),
        "perplexity_median": float(np.quantile(perplexities, 0.5)) if perplexities else None,
        "perplexity_p90": float(np.quantile(perplexities, 0.9)) if perplexities else None,
        "repetition": _mean(repetitions) if repetitions else None,
        "ended": _mean([answer.ended for answer in answers]),
        "tokens": _mean([answer.tokens for answer in answers]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---- tables --------------------------------------------------------------------------------------

TITLES = {
    "instructions": "share of prompts that were obeyed",
    "context": "share of items with the passage's answer",
}
FLUENCY = "perplexity, median | its 90th percentile | repeated 4-grams | ended | tokens"


def tables(found: Sequence[Point]) -> str:
    """Every table as Markdown: for each table and mode its points, then shares by family."""
    parts = []
    for table, title in TITLES.items():
        for mode in ("greedy", "sampled"):
            rows = [p for p in found if (p["table"], p["mode"]) == (table, mode)]
            if rows:
                parts.append(f"{title}, {mode}:\n\n{_points_table(rows)}")
        greedy = [p for p in found if (p["table"], p["mode"]) == (table, "greedy")]
        if greedy:
            parts.append(f"{title}, greedy, by family:\n\n{_family_table(greedy)}")
    return "\n\n".join(parts)


def _points_table(rows: Sequence[Point]) -> str:
    memory = ["memory's answer instead"] if "memory" in rows[0] else []
    names = ["scale", "share", "difference to scale 1", *memory, *FLUENCY.split(" | ")]
    lines = [_line(names), _line(["---"] * len(names))]
    for p in rows:
        difference = "-"
        if "difference" in p and p["scale"] != PLAIN:
            low, high = p["difference_interval"]
            difference = f"{p['difference']:+.1%} ({low:+.1%} to {high:+.1%})"
        low, high = p["interval"]
        cells = [_scale(p["scale"]), f"{p['share']:.1%} ({low:.1%} to {high:.1%})", difference]
        if memory:
            cells.append(_cell(p["memory"], ".1%"))
        cells += [_cell(p["perplexity_median"], ".2f"), _cell(p["perplexity_p90"], ".2f")]
        cells += [_cell(p["repetition"], ".1%"), f"{p['ended']:.1%}", f"{p['tokens']:.1f}"]
        lines.append(_line(cells))
    return "\n".join(lines)


def _family_table(rows: Sequence[Point]) -> str:
    names = ["family", *(_scale(p["scale"]) for p in rows)]
    lines = [_line(names), _line(["---"] * len(names))]
    for family in rows[0]["families"]:
        lines.append(_line([family, *(f"{p['families'][family]:.0%}" for p in rows)]))
    return "\n".join(lines)


def _scale(scale: float) -> str:
    return "negative alone" if scale == NEGATIVE_ALONE else f"{scale:g}"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
