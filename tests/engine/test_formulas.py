"""Groups of several streams, windows, schedules and cuts: the tokens are the reference's.

Groups of different sizes, groups whose window opens and closes, pairs and plain requests run in one
batch. formulas.py has the requests. Without guidance their texts are
others, so an engine that ignored a formula would not pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cfg_core import recipes
from cfg_core.reference import combine, next_log_probs
from tests.engine.engines import ROOMY, SMALL_POOL, Engine, differences, guided, plain, tokens
from tests.engine.formulas import MAX_MODEL_LEN, NEW_TOKENS, Answer, answers
from tests.engine.oracle import CASES, PROMPTS, Oracle

pytestmark = pytest.mark.slow

BUDGET_32 = {**ROOMY, "max_num_batched_tokens": 32, "max_num_seqs": 32}
TINY_POOL = {**SMALL_POOL, "num_gpu_blocks_override": 26, "max_num_batched_tokens": 64}
"""25 blocks of 32 tokens. The group of four streams takes 20 of them."""


@pytest.fixture(scope="module")
def length() -> int:
    """Tokens of each text. There are fewer on V2, whose kernels are interpreted here."""
    return 9 if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else NEW_TOKENS


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    engine = Engine(model_folder("llama"), max_model_len=MAX_MODEL_LEN, **ROOMY)
    yield engine
    engine.close()


def asking(answer: Answer, length: int, **options: Any) -> Any:
    return plain(extra_args=answer.request.extra_args, max_tokens=length, **options)


def check(engine: Engine, llama: Oracle, length: int) -> None:
    """Answer everything at once: formulas, pairs and plain requests."""
    every = answers(llama)
    pairs = CASES[::9]
    prompts = [a.request.prompt for a in every] + [c.prompt for c in pairs] + PROMPTS
    params = [asking(a, length) for a in every]
    params += [guided(case, max_tokens=length) for case in pairs]
    params += [plain(max_tokens=length) for _ in PROMPTS]
    want = [a.token_ids for a in every] + llama.guided[::9] + llama.plain
    before = engine.stats()["guided_tokens"]
    got = tokens(engine.generate(prompts, params))
    names = [a.request.name for a in every]
    wrong = differences(got, [text[:length] for text in want])
    assert wrong == [], (wrong, names)
    inside = sum(a.request.guided_tokens(length) for a in every) + length * len(pairs)
    assert engine.stats()["guided_tokens"] - before == inside


@pytest.mark.v2
def test_in_one_batch(engine: Engine, llama: Oracle, length: int) -> None:
    before = engine.stats()
    check(engine, llama, length)
    after = engine.stats()
    windows = [a.request.formula for a in answers(llama) if a.request.formula.end is not None]
    assert after["windows_closed"] - before["windows_closed"] == len(windows)
    assert after["windows_opened"] > before["windows_opened"]


def test_blocks_are_free_behind_the_window(engine: Engine, llama: Oracle) -> None:
    """The followers hold blocks inside of the window only."""
    held: list[tuple[int, int]] = []
    (window,) = [a for a in answers(llama) if a.request.name == "window"]
    scheduler, schedule = engine.scheduler, engine.scheduler.schedule

    def record(*args: Any) -> Any:
        step = schedule(*args)
        leaders = [r for name, r in scheduler.requests.items() if "#" not in name]
        held.extend((r.num_output_tokens, engine.stats()["follower_blocks"]) for r in leaders)
        return step

    scheduler.schedule = record
    try:
        engine.generate([window.request.prompt], [asking(window, NEW_TOKENS)])
    finally:
        del scheduler.schedule
    formula = window.request.formula
    # With async scheduling, a step is scheduled while one token is in flight.
    ahead = int(engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    assert [blocks for token, blocks in held if token > formula.end] == [0] * (
        NEW_TOKENS - formula.end - 1
    )
    assert not any(blocks for token, blocks in held if token + ahead < formula.start)
    assert max(blocks for _, blocks in held) >= 100 // 32 + 1


@pytest.mark.v2
@torch.inference_mode()
def test_logprobs_of_all_streams(engine: Engine, llama: Oracle) -> None:
    """Columns for each stream and the divergence, in groups of different sizes and windows.

    Each request asks for another number of the streams' most likely tokens.
    """
    chosen = [
        a
        for a in answers(llama)
        if a.request.name in ("two streams", "eight streams", "window", "DExperts")
    ]
    params = [asking(a, 8, logprobs=number) for number, a in enumerate(chosen)]
    for one in params:
        one.extra_args = {**one.extra_args, "guidance_logprobs": True}
    neighbours = [plain(max_tokens=8, logprobs=2), plain(max_tokens=8)]
    outputs = engine.generate(
        [a.request.prompt for a in chosen] + PROMPTS[:2], [*params, *neighbours]
    )
    for number, (one, output) in enumerate(zip(chosen, outputs, strict=False)):
        request, text = one.request, list(output.outputs[0].token_ids)
        for i, (token, row) in enumerate(zip(text, output.outputs[0].logprobs, strict=True)):
            entry = row[token]
            if not request.formula.guides(i):
                assert not hasattr(entry, "negatives")
                continue
            rows = [
                next_log_probs(llama.model, [*start, *text[:i]], torch.float32)
                for start in (request.prompt, *request.followers)
            ]
            assert entry.conditional == pytest.approx(float(rows[0][token]), abs=1e-4)
            negatives = [pytest.approx(float(row[token]), abs=1e-4) for row in rows[1:]]
            assert list(entry.negatives) == negatives
            assert len(entry.rankings) == (len(rows) if number else 0)
            for ranking, row in zip(entry.rankings, rows, strict=False):
                best = row.topk(number)
                assert list(ranking) == best.indices.tolist()
                assert [said.logprob for said in ranking.values()] == [
                    pytest.approx(value, abs=1e-4) for value in best.values.tolist()
                ]
            blend = torch.log_softmax(combine(rows, request.formula, i), -1)
            assert entry.logprob == pytest.approx(float(blend[token]), abs=1e-3)
            kl = float((blend.exp() * (blend - rows[0])).sum())
            assert entry.kl == pytest.approx(kl, rel=1e-3, abs=1e-4)
    for output in outputs[len(chosen) :]:
        rows = output.outputs[0].logprobs or []
        assert not any(hasattr(entry, "kl") for row in rows for entry in row.values())


@pytest.mark.v2
@torch.inference_mode()
def test_a_mask_that_forbids_all_kept_tokens_leaves_the_best_of_the_others(
    engine: Engine, llama: Oracle
) -> None:
    """The cut keeps the leader's two best tokens, and bad words forbid both."""
    (cut,) = [a for a in answers(llama) if a.request.name == "top_k"]
    request = cut.request
    rows = [
        next_log_probs(llama.model, list(start), torch.float32)
        for start in (request.prompt, *request.followers)
    ]
    kept = rows[0].topk(request.formula.top_k).indices.tolist()
    others = combine(rows, type(request.formula)(weights=request.formula.weights), 0)
    others[kept] = -torch.inf
    allowed = [token for token in range(len(rows[0])) if token not in kept]
    (output,) = engine.generate([request.prompt], [asking(cut, 1, allowed_token_ids=allowed)])
    assert tokens([output]) == [[int(others.argmax())]]


C, U, E = CASES[0].prompt, CASES[0].negative, CASES[20].prompt
RECIPES = {
    # the recipe, and the paper's formula as weights of raw logits
    "cfg": (recipes.cfg(U, scale=2.5), [(2.5, C), (-1.5, U)]),
    "cad": (recipes.cad(U, alpha=0.75), [(1.75, C), (-0.75, U)]),
    "preadd, away": (recipes.preadd(E, alpha=-1.2), [(2.2, C), (-1.2, E)]),
    "preadd, towards": (recipes.preadd(E, alpha=1.5), [(-0.5, C), (1.5, E)]),
}


@pytest.mark.v2
@pytest.mark.parametrize("name", RECIPES)
@torch.inference_mode()
def test_a_recipe_is_its_papers_formula_on_raw_logits(
    engine: Engine, llama: Oracle, name: str
) -> None:
    """dexperts needs adapters, and is in test_lora_and_priority.py."""
    recipe, streams = RECIPES[name]
    (output,) = engine.generate(
        [C], [plain(extra_args=recipe.to_extra_args(), max_tokens=6, logprobs=1)]
    )
    text, rows = list(output.outputs[0].token_ids), output.outputs[0].logprobs or []
    for i, (token, row) in enumerate(zip(text, rows, strict=True)):
        logits = [
            weight * llama.model(torch.tensor([[*prompt, *text[:i]]])).logits[0, -1].float()
            for weight, prompt in streams
        ]
        expected = torch.log_softmax(torch.stack(logits).sum(0), -1)
        assert token == int(expected.argmax())
        assert row[token].logprob == pytest.approx(float(expected[token]), abs=1e-3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guidance_streams": [{"weight": 1, "token_ids": [5]}] * 9}, "has 10 streams.* takes 9"),
        ({"guidance_streams": [{"weight": 1, "token_ids": [99999]}]}, r"\[0\].token_ids\[0\]"),
        ({"guidance_streams": [{"weight": 1, "messages": [{}]}]}, "need a chat endpoint"),
        ({"guidance_streams": [{"weight": 1, "lora": "x"}]}, "must be vLLM's LoRARequest"),
        ({"guidance_streams": [{"weight": 1, "lora": ["x", 1, "y"]}]}, "has no adapters"),
        ({"guidance_streams": [{"weight": 1, "token_ids": [5] * 384}]}, "384 tokens"),
        ({"guidance_end": 5}, "guidance_scale is 1"),
    ],
)
def test_what_cannot_be_guided_is_refused_with_a_sentence(
    engine: Engine, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        engine.generate([(5, 6, 7)], [plain(extra_args=fields)])
    engine.assert_idle()


# --- engines of their own, which end the one above -------------------------------------------


@pytest.mark.parametrize("options", [BUDGET_32, TINY_POOL], ids=["chunked", "preempted"])
def test_chunked_and_preempted(
    model_folder: Callable[[str], Path], llama: Oracle, length: int, options: dict[str, Any]
) -> None:
    engine = Engine(model_folder("llama"), max_model_len=MAX_MODEL_LEN, **options)
    try:
        check(engine, llama, length)
        assert options is BUDGET_32 or engine.stats()["group_preemptions"] > 0
    finally:
        engine.close()


def test_the_even_split_gives_all_followers_one_half(
    model_folder: Callable[[str], Path], llama: Oracle, length: int
) -> None:
    options = {**TINY_POOL, "num_gpu_blocks_override": 45}
    engine = Engine(model_folder("llama"), max_model_len=MAX_MODEL_LEN, kv_split="even", **options)
    try:
        check(engine, llama, length)
    finally:
        engine.close()
