"""Guidance between markers: the tokens are those of the reference, and what the frontend refuses.

Pairs, plain requests and requests with markers run in one batch. The markers are taken from the
texts, so windows open, close, and begin anew in the middle of them.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cfg_core.errors import GuidanceError
from cfg_core.params import GuidanceParams
from cfg_core.params.between import Between
from cfg_core.reference import Formula, weighted_generate
from tests.engine.engines import ROOMY, TIGHT, Engine, differences, guided, plain, tokens
from tests.engine.oracle import CASES, NEW_TOKENS, PROMPTS, Case, Oracle, rounding

pytestmark = pytest.mark.slow

PLAIN = PROMPTS[::3]
SCALE = 3.0


@dataclass(frozen=True)
class Marked:
    """A request with markers, and the reference's text."""

    case: Case
    formula: Formula
    text: list[int]

    @property
    def entry(self) -> dict[str, Any]:
        start, end = self.formula.between or (0, 0)
        restart = self.formula.restart
        return {"start_token_id": start, "end_token_id": end, "restart_negative": restart}

    def guided(self, length: int) -> list[bool]:
        """Of each of the first tokens, whether it is guided."""
        text = self.text[:length]
        return [self.formula.guides_after(self.case.prompt, text[:i]) for i in range(len(text))]


def _marked(oracle: Oracle, case: Case, restart: bool, **window: Any) -> Marked | None:
    """The case with markers of its own text, if they matter; None if none are found."""
    rng = random.Random(f"{case} {restart}")
    seen = [*case.prompt[-2:], *oracle.hf(case.prompt)]
    for _ in range(60):
        start, end = rng.sample(sorted(set(seen)), 2)
        formula = Formula(
            scales=((0, case.scale),), between=(start, end), restart=restart, **window
        )
        found = weighted_generate(
            oracle.model, case.prompt, [case.negative], formula, max_new_tokens=NEW_TOKENS
        )
        one = Marked(case, formula, found.token_ids)
        inside = one.guided(9)
        changes = sum(a != b for a, b in itertools.pairwise(inside))
        restarts = restart and start in one.text[:8]
        seen += one.text
        is_clear = found.min_gap > 2 * rounding(case.scale)
        matters = restarts if restart else changes
        if is_clear and matters and one.text != oracle.hf(case.prompt):
            return one
    return None


@functools.lru_cache(maxsize=1)
def all_marked(oracle: Oracle) -> list[Marked]:
    """With and without restarts, and in a window."""
    cases = [Case(case.prompt, case.negative, SCALE) for case in CASES[::6]]
    found = [_marked(oracle, case, restart) for case in cases for restart in (False, True)]
    found += [_marked(oracle, case, False, start=1, end=8) for case in cases[:4]]
    made = [one for one in found if one is not None]
    assert len(made) >= 14
    assert sum(one.formula.restart for one in made) >= 5
    return made


def check(engine: Engine, oracle: Oracle) -> None:
    v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    length = 9 if v2 else NEW_TOKENS
    marked, pairs = all_marked(oracle)[:: 2 if v2 else 1], CASES[::18]
    prompts = [one.case.prompt for one in marked] + [case.prompt for case in pairs] + PLAIN
    params = [asking(one, length) for one in marked]
    params += [guided(case, max_tokens=length) for case in pairs]
    params += [plain(max_tokens=length) for _ in PLAIN]
    want = [one.text for one in marked] + oracle.guided[::18] + oracle.plain[::3]
    before = engine.stats()
    got = tokens(engine.generate(prompts, params))
    assert differences(got, [text[:length] for text in want]) == []
    inside = sum(sum(one.guided(length)) for one in marked) + length * len(pairs)
    assert engine.stats()["guided_tokens"] - before["guided_tokens"] == inside


def asking(one: Marked, length: int, **options: Any) -> Any:
    params = guided(one.case, max_tokens=length, **options)
    params.extra_args = {**params.extra_args, "guidance_between": one.entry}
    if one.formula.end is not None:
        params.extra_args |= {"guidance_start": 1, "guidance_end": one.formula.end}
    return params


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    engine = Engine(model_folder("llama"), **ROOMY)
    yield engine
    engine.close()


@pytest.mark.v2
def test_in_one_batch(engine: Engine, llama: Oracle) -> None:
    check(engine, llama)


@pytest.mark.v2
def test_logprobs_of_tokens_outside_are_vllms_alone(engine: Engine, llama: Oracle) -> None:
    one = all_marked(llama)[0]
    params = asking(one, 9, logprobs=0)
    params.extra_args["guidance_logprobs"] = True
    (output,) = engine.generate([one.case.prompt], [params])
    shown = [
        hasattr(row[token], "conditional")
        for token, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    ]
    assert shown == one.guided(9)


@pytest.mark.parametrize("options", [TIGHT, {**ROOMY, "async_scheduling": True}], ids=str)
def test_chunked_and_preempted_and_async(
    model_folder: Callable[[str], Path], llama: Oracle, options: dict[str, Any]
) -> None:
    engine = Engine(model_folder("llama"), **options)
    try:
        check(engine, llama)
    finally:
        engine.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_with_drafts(
    model_folder: Callable[[str], Path], llama: Oracle, asynchronous: bool
) -> None:
    folder = model_folder("llama")
    speculation = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    engine = Engine(folder, speculative_config=speculation, async_scheduling=asynchronous, **ROOMY)
    try:
        check(engine, llama)
        assert engine.stats()["guided_drafts_accepted"] > 0
    finally:
        engine.close()


# --- the frontend ---------------------------------------------------------------------------------


class Tokenizer:
    """The tokens of a reasoning model, and a text of two."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return {"<think>": [7], "</think>": [8], "two words": [3, 4]}[text]

    def get_vocab(self) -> dict[str, int]:
        return {"<think>": 7, "</think>": 8}


def resolved(fields: dict[str, Any], parser: str = "", tokenizer: Any = None) -> Between | None:
    from cfg_core.vllm_plugin.frontend.markers import with_token_ids

    config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: 50),
        structured_outputs_config=SimpleNamespace(reasoning_parser=parser),
    )
    processor: Any = SimpleNamespace(
        vllm_config=config, renderer=SimpleNamespace(tokenizer=tokenizer)
    )
    params = GuidanceParams.from_fields({"guidance_scale": 2, **fields})
    assert params is not None
    return with_token_ids(processor, params).between


def between(start: Any, end: Any) -> dict[str, Any]:
    return {"guidance_between": {"start_token_id": start, "end_token_id": end}}


def test_texts_and_parts_become_token_ids() -> None:
    assert resolved({}) is None
    assert resolved(between(1, 2)) == Between(1, 2)
    assert resolved(between("<think>", 2), tokenizer=Tokenizer()) == Between(7, 2)
    parser = {"parser": "deepseek_r1", "tokenizer": Tokenizer()}
    assert resolved({"guidance_in": "thinking"}, **parser) == Between(7, 8)
    assert resolved({"guidance_in": "answer"}, **parser) == Between(8, 7)


REFUSED: Sequence[tuple[dict[str, Any], dict[str, Any], str]] = [
    (between(50, 2), {}, r"in \[0, 50\)"),
    (between("<think>", 2), {}, "needs a tokenizer"),
    (between("two words", 2), {"tokenizer": Tokenizer()}, "is 2 tokens"),
    (between("<think>", 7), {"tokenizer": Tokenizer()}, "both token 7"),
    ({"guidance_in": "answer"}, {"tokenizer": Tokenizer()}, "needs a reasoning parser"),
]


@pytest.mark.parametrize(
    ("fields", "options", "words"), REFUSED, ids=[words for _, _, words in REFUSED]
)
def test_what_the_model_does_not_have_is_refused(
    fields: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(GuidanceError, match=words):
        resolved(fields, **options)
