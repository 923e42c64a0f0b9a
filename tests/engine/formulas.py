"""Requests beyond the pair with one scale: several streams, windows, schedules, cuts, suffixes.

The expected tokens are those of `cfg_core.reference.weighted_generate` in float32.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

from cfg_core.reference import Formula, weighted_generate
from tests.engine.oracle import Oracle, random_ids, rounding

NEW_TOKENS = 24
MAX_MODEL_LEN = 384
"""Room for prompts of up to 300 tokens."""


@dataclass(frozen=True)
class Request:
    """One request, as the reference and as the engine read it.

    fields: the guidance fields beside the followers.
    """

    name: str
    prompt: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]
    formula: Formula
    fields: dict[str, Any]

    @property
    def extra_args(self) -> dict[str, Any]:
        if self.formula.suffix:
            return {**self.fields, "negative_suffix_token_ids": list(self.formula.suffix)}
        if self.fields.keys() & {"guidance_schedule", "guidance_rule"}:
            return {**self.fields, "negative_prompt_token_ids": list(self.followers[0])}
        streams = [
            {"weight": weight, "token_ids": list(ids)}
            for weight, ids in zip(self.formula.weights, self.followers, strict=True)
        ]
        return {**self.fields, "guidance_streams": streams}

    def guided_tokens(self, num_tokens: int) -> int:
        """How many of so many tokens are guided."""
        return sum(self.formula.guides(token) for token in range(num_tokens))


MEDIAN_ENTROPY = 1.4
"""Nats. About half of the tiny model's tokens have a smaller entropy."""

UNCHANGED = "window behind the end"
"""The formula that guides no token."""

FORMULAS: dict[str, dict[str, Any]] = {
    "two streams": {"weights": (-0.5,)},
    "CAD": {"weights": (-1.0,), "lengths": (60, 7)},
    "PREADD": {"weights": (1.5,), "lengths": (12, 40)},
    "DExperts": {"weights": (1.0, -1.0)},
    "three streams, MusicGen": {"weights": (-6.0, -2.0), "lengths": (50, 20, 1)},
    "a weight of 0": {"weights": (-0.5, 0.0)},
    "four streams": {"weights": (-0.5, 0.25, 2.0), "lengths": (1, 33, 300, 64)},
    "sums beyond 1": {"weights": (1.5, 1.0, 0.5), "lengths": (150, 2, 31, 120)},
    "eight streams": {"weights": (-0.3, 0.2, -0.1, 0.4, 0.0, -1.0, 0.5)},
    "end": {"weights": (-0.5,), "end": 5},
    "start": {"weights": (-1.0,), "start": 3},
    "window": {"weights": (-1.5, 0.5), "start": 2, "end": 6, "lengths": (40, 100, 5)},
    "one token": {"weights": (-2.0,), "start": 4, "end": 5},
    UNCHANGED: {"weights": (-1.0,), "start": 90},
    "schedule": {"scales": ((0, 1.5), (3, 3.0), (4, 0.0), (7, -1.0))},
    "schedule in a window": {"scales": ((0, 3.0), (4, 1.5)), "start": 2, "end": 7},
    "top_k": {"weights": (-2.0,), "top_k": 3},
    "min_p, VCD": {"weights": (-1.0,), "min_p": 0.5},
    "filter_top_k, Dia": {"weights": (-2.0,), "filter_top_k": 4},
    "all cuts, three streams": {
        "weights": (-2.0, 1.0),
        "top_k": 20,
        "min_p": 0.01,
        "filter_top_k": 3,
    },
    "cuts in a window": {"weights": (-2.0,), "top_k": 2, "start": 1, "end": 4},
    "max_kl": {"weights": (-3.0,), "max_kl": 0.3},
    "max_kl, three streams": {"weights": (-6.0, -2.0), "max_kl": 1.5},
    "max_kl that never binds": {"weights": (-1.0,), "max_kl": 1e6},
    "min_entropy": {"weights": (-2.0,), "min_entropy": MEDIAN_ENTROPY},
    "adacad": {"scales": ((0, 1.0),), "rule": {"name": "adacad", "offset": 0.0}},
    "adacad, limits and a window": {
        "scales": ((0, 1.0),),
        "rule": {"name": "adacad", "offset": 2.0},
        "max_kl": 0.3,
        "min_entropy": MEDIAN_ENTROPY,
        "top_k": 40,
        "start": 1,
        "end": 6,
    },
    "arr": {"scales": ((0, 1.0),), "rule": {"name": "arr"}},
    "nwcad": {
        "scales": ((0, 3.0), (4, 2.0)),
        "rule": {
            "name": "nwcad",
            "max_divergence": 0.1,
            "negative_margin": 0.1,
            "conditional_margin": 0.5,
        },
    },
    "limits and cuts in a window": {
        "weights": (-2.0, 0.5),
        "max_kl": 0.5,
        "min_entropy": MEDIAN_ENTROPY,
        "min_p": 0.01,
        "start": 1,
        "end": 6,
    },
}
"""By name, the formula as the reference takes it, and `lengths` of the streams' prompts."""

SUFFIXES: dict[str, dict[str, Any]] = {
    "suffix of one token": {"scales": ((0, 3.0),), "suffix": 1, "lengths": (64,)},
    "suffix of seven": {"scales": ((0, 2.0),), "suffix": 7, "lengths": (1,)},
    "suffix of a block": {"scales": ((0, 1.5),), "suffix": 32, "lengths": (31,)},
    "suffix of forty, schedule": {
        "scales": ((0, 3.0), (3, 2.0), (5, -1.0)),
        "suffix": 40,
        "lengths": (150,),
    },
    "suffix in a window, cut": {
        "scales": ((0, 3.0),),
        "suffix": 5,
        "min_p": 0.05,
        "start": 2,
        "end": 6,
    },
    "suffix, adacad, limits": {
        "scales": ((0, 1.0),),
        "rule": {"name": "adacad", "offset": 2.0},
        "max_kl": 0.3,
        "min_entropy": MEDIAN_ENTROPY,
        "suffix": 12,
    },
    "suffix, gate, cuts": {
        "scales": ((0, 3.0),),
        "min_entropy": MEDIAN_ENTROPY,
        "top_k": 30,
        "filter_top_k": 20,
        "suffix": 20,
    },
    "suffix, gate in a window": {
        "scales": ((0, 3.0), (6, 1.5)),
        "min_entropy": 1.0,
        "suffix": 9,
        "start": 1,
        "end": 9,
    },
}
"""More formulas, with the number of tokens of a suffix. No engine with drafts takes them."""

_FIELDS = ("start", "end", "top_k", "min_p", "filter_top_k", "max_kl", "min_entropy", "rule")


def request(name: str, seed: int) -> Request:
    spec = dict({**FORMULAS, **SUFFIXES}[name])
    rng = random.Random(f"{name} {seed}")
    if "suffix" in spec:
        spec["suffix"], num_streams = random_ids(rng, spec["suffix"]), 1
    else:
        num_streams = 2 if "scales" in spec else 1 + len(spec["weights"])
    lengths = spec.pop("lengths", None) or [rng.randint(1, 80) for _ in range(num_streams)]
    prompt, *followers = (random_ids(rng, length) for length in lengths)
    fields = {f"guidance_{field}": spec[field] for field in _FIELDS if field in spec}
    if spec.get("scales") not in (None, ((0, 1.0),)):
        fields["guidance_schedule"] = [list(entry) for entry in spec["scales"]]
    return Request(name, prompt, tuple(followers), Formula(**spec), fields)


@dataclass(frozen=True)
class Answer:
    """A request, and the reference's greedy tokens.

    seed: with it, `request` makes the same request.
    """

    request: Request
    token_ids: list[int]
    seed: int


def answer(oracle: Oracle, name: str) -> Answer:
    """The first random request of this formula whose text guidance changes.

    Rounding must not decide a token of it.
    """
    for seed in range(40):
        one = request(name, seed)
        text = weighted_generate(
            oracle.model, one.prompt, one.followers, one.formula, max_new_tokens=NEW_TOKENS
        )
        plain = oracle.hf(one.prompt, max_new_tokens=NEW_TOKENS)
        is_plain = plain == text.token_ids
        if text.min_gap > 2 * error(one.formula) and is_plain == (name == UNCHANGED):
            return Answer(one, text.token_ids, seed)
    raise AssertionError(f"no request found for {name}")


def error(formula: Formula) -> float:
    """How far log-probabilities of two correct engines may differ: see `oracle.rounding`."""
    offset = (formula.rule or {}).get("offset", 0.0)
    scales = [s + offset for _, s in formula.scales] or [1 - sum(formula.weights)]
    return max(map(rounding, scales)) + rounding(0) * sum(map(abs, formula.weights[1:]))


@functools.lru_cache(maxsize=4)
def answers(oracle: Oracle) -> tuple[Answer, ...]:
    """An answer for each formula."""
    return tuple(answer(oracle, name) for name in FORMULAS)


@functools.lru_cache(maxsize=4)
def suffix_answers(oracle: Oracle) -> tuple[Answer, ...]:
    """An answer for each formula with a suffix."""
    return tuple(answer(oracle, name) for name in SUFFIXES)
