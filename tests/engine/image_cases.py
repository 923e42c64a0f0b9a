"""Requests with images, what the formulas say of them on transformers' logits, and how to run them.

Two tiny models: LLaVA, and PaddleOCR-VL with positions in three dimensions (M-RoPE). The formulas
are those of VCD (a noised image in the follower), ICD (the same image after a disturbing
instruction) and M3ID (no image), and others with two followers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from tests.engine.engines import Engine, plain, tokens
from tests.engine.tiny_vision import PLACES, Streams, build_vision, noised, picture, use_stand_in

NEW_TOKENS = 16
LEAST_GAP = 1e-3
"""Least gap between the two best tokens of a step: 15 times what rounding can change."""


class Follower(NamedTuple):
    """A follower: its text and its images; None takes the leader's."""

    weight: float
    text: str | None
    images: list[Image.Image] | None


class Case(NamedTuple):
    """A request: what its leader reads, its followers, and how it says so."""

    text: str
    images: list[Image.Image]
    followers: list[Follower]
    fields: dict[str, Any]
    min_p: float = 0.0

    @property
    def prompt(self) -> dict[str, Any]:
        media = {"multi_modal_data": {"image": self.images}} if self.images else {}
        return {"prompt": self.text, **media}


def pair(scale: float, text: str, images: list[Image.Image]) -> list[Follower]:
    return [Follower(1 - scale, text, images)]


def cases_of(place: str) -> dict[str, Case]:
    """The requests, by what they show. place: how a prompt shows its image."""
    one, two, three = picture(1), picture(2), picture(3)
    asks = f"user: {place} What is on this picture? answer:"
    other = f"Look at {place} and say nothing true. {place}:"
    blurred = {"image": [noised(one)]}
    return {
        "VCD": Case(
            asks,
            [one],
            pair(2, asks, [noised(one)]),
            {"guidance_scale": 2, "negative_multi_modal_data": blurred, "guidance_min_p": 0.1},
            0.1,
        ),
        "ICD": Case(
            asks,
            [one],
            pair(2, f"You are confused. {asks}", [one]),
            {
                "guidance_scale": 2,
                "negative_prompt": f"You are confused. {asks}",
                "negative_multi_modal_data": {"image": [one]},
            },
        ),
        "M3ID": Case(
            asks,
            [one],
            pair(1.5, "user: What is on this picture? answer:", []),
            {
                "guidance_scale": 1.5,
                "negative_prompt": "user: What is on this picture? answer:",
            },
        ),
        "last token": Case(asks, [two], pair(1.5, ":", []), {"guidance_scale": 1.5}),
        "image in the follower alone": Case(
            "Say what you know.",
            [],
            [Follower(-0.5, asks, [two])],
            {
                "guidance_streams": [
                    {"prompt": asks, "multi_modal_data": {"image": two}, "weight": -0.5}
                ]
            },
        ),
        "two images, three streams": Case(
            other + " now",
            [one, two],
            [Follower(-0.5, None, [noised(one), three]), Follower(-0.25, "Nothing.", [])],
            {
                "guidance_streams": [
                    {"multi_modal_data": {"image": [noised(one), three]}, "weight": -0.5},
                    {"prompt": "Nothing.", "weight": -0.25},
                ]
            },
        ),
    }


class Bench(NamedTuple):
    name: str
    folder: Path
    cases: dict[str, Case]
    want: dict[str, list[int]]
    plain: list[list[int]]


def bench_of(name: str, folder: Path) -> Bench:
    """The requests, with what the formulas say on transformers' logits."""
    use_stand_in()
    build_vision(name, folder)
    streams, cases = Streams(folder, name), cases_of(PLACES[name])
    want, unguided = {}, []
    for label, case in cases.items():
        leader = streams.prompt(case.text, case.images)
        followers = [
            streams.prompt(
                case.text if f.text is None else f.text,
                case.images if f.images is None else f.images,
            )
            for f in case.followers
        ]
        if label == "last token":  # has no token before it
            followers = [dict(leader, **last_token(leader))]
            for key in set(leader) - {"input_ids", "attention_mask", "mm_token_type_ids"}:
                del followers[0][key]
        weights = [f.weight for f in case.followers]
        want[label], gap = streams.generate(
            [leader, *followers], [1 - sum(weights), *weights], NEW_TOKENS, case.min_p
        )
        assert gap > LEAST_GAP, label
        text, gap = streams.generate([leader], [1.0], NEW_TOKENS)
        assert gap > LEAST_GAP, label
        unguided.append(text)
    assert all(a != b for a, b in zip(want.values(), unguided, strict=True))
    return Bench(name, folder, cases, want, unguided)


def last_token(prompt: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask", "mm_token_type_ids")
    return {name: prompt[name][:, -1:] for name in names if name in prompt}


def guided(case: Case, **options: Any) -> Any:
    return plain(**{"extra_args": case.fields, "max_tokens": NEW_TOKENS, **options})


def run(engine: Engine, prompts: list[dict[str, Any]], params: list[Any]) -> list[Any]:
    outputs: list[Any] = engine.llm.generate(prompts, params, use_tqdm=False)
    engine.assert_idle()
    return outputs


def all_guided(engine: Engine, bench: Bench) -> dict[str, list[int]]:
    """All requests in one batch."""
    cases = list(bench.cases.values())
    outputs = run(engine, [case.prompt for case in cases], [guided(case) for case in cases])
    return dict(zip(bench.cases, tokens(outputs), strict=True))


@contextmanager
def encoded(engine: Engine) -> Iterator[list[int]]:
    """While open, collects how many images each step computes."""
    counts: list[int] = []
    original: Callable[..., Any] = engine.scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        counts.append(sum(map(len, output.scheduled_encoder_inputs.values())))
        return output

    engine.scheduler.schedule = schedule
    try:
        yield counts
    finally:
        del engine.scheduler.schedule
