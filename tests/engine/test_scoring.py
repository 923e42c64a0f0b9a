"""Scores of a prompt's last tokens under guidance: they are the reference's.

The requests are those of formulas.py whose weights do not change, with a known text at the end of
each prompt.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cfg_core.reference import Formula
from tests.engine.engines import ROOMY, Engine, differences, guided, plain, tight_for_groups, tokens
from tests.engine.formulas import FORMULAS, MAX_MODEL_LEN, Request, request
from tests.engine.oracle import CASES, PROMPTS, Oracle, random_ids
from tests.engine.scored_texts import NAMES, Scored, scored

pytestmark = pytest.mark.slow

CUTS = ("top_k", "min_p", "filter_top_k")
EVERY = [scored(name, seed) for seed in range(2) for name in NAMES]


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    engine = Engine(model_folder("llama"), max_model_len=MAX_MODEL_LEN, **ROOMY)
    yield engine
    engine.close()


def check(oracle: Oracle, one: Scored, said: list[Any], top: int = 0) -> None:
    """None before the scored tokens; then the reference's log-probabilities and ranks."""
    assert len(said) == len(one.prompt)
    before = len(one.request.prompt)
    assert said[:before] == [None] * before
    is_cut = bool(set(CUTS) & FORMULAS[one.request.name].keys())
    rows = zip(one.continuation, said[before:], one.want(oracle), one.allowed(oracle), strict=True)
    for token, entries, row, allowed in rows:
        assert token in entries
        likeliest = row.topk(max(top, 1)).indices.tolist()
        assert len(entries) in (max(top, 1), top + 1)
        assert not top or int(likeliest[0]) in entries or row.max() - row[token] < allowed[token]
        if not is_cut:  # a cut token is far below, and not at minus infinity
            assert entries[token].rank == int((row >= row[token]).sum()) or allowed[token] > 1e-4
        for other, entry in entries.items():
            if row[other] == -torch.inf:
                assert entry.logprob < -100
            else:
                assert entry.logprob == pytest.approx(float(row[other]), abs=float(allowed[other]))


@pytest.mark.v2
@torch.inference_mode()
def test_in_one_batch(engine: Engine, llama: Oracle) -> None:
    """All at once, beside plain requests, and plain requests that ask for their whole prompts."""
    pair = CASES[9]
    neighbours = [plain(prompt_logprobs=1, max_tokens=3), plain(max_tokens=3)]
    params = [one.asking(top=i % 4) for i, one in enumerate(EVERY)]
    outputs = engine.generate(
        [*(one.prompt for one in EVERY), *PROMPTS[:2], pair.prompt],
        [*params, *neighbours, guided(pair, max_tokens=3)],
    )
    for i, (one, output) in enumerate(zip(EVERY, outputs, strict=False)):
        check(llama, one, output.prompt_logprobs, i % 4)
    whole = torch.log_softmax(llama.model(torch.tensor([PROMPTS[0]])).logits[0], -1)
    for i, entries in enumerate(outputs[len(EVERY)].prompt_logprobs[1:]):
        token = PROMPTS[0][i + 1]
        assert entries[token].logprob == pytest.approx(float(whole[i, token]), abs=1e-4)
    assert outputs[len(EVERY) + 1].prompt_logprobs is None
    assert tokens(outputs[-1:]) == [llama.guided[9][:3]]


def test_scored_requests_generate_what_others_do(engine: Engine, llama: Oracle) -> None:
    """The answer after the scored tokens is that of the same prompts without scores."""
    chosen = EVERY[:8]
    got = tokens(engine.generate([o.prompt for o in chosen], [o.asking() for o in chosen]))
    extended = []
    for one in chosen:
        streams = [
            {**entry, "token_ids": [*entry["token_ids"], *one.continuation]}
            for entry in one.request.extra_args["guidance_streams"]
        ]
        fields = {**one.request.fields, "guidance_streams": streams}
        extended.append(plain(extra_args=fields, max_tokens=2))
    assert differences(got, tokens(engine.generate([o.prompt for o in chosen], extended))) == []


@pytest.mark.v2
def test_contexts_come_from_the_prefix_cache(engine: Engine, llama: Oracle) -> None:
    """Hits end before the rows that are needed: every stream keeps its context."""
    base = request("CAD", 3)
    prompt = base.prompt + random_ids(random.Random(1), 40)  # 100 tokens: three blocks of 32
    rng = random.Random(5)
    formula = Formula(weights=(-1.0,))
    one = Request("CAD", prompt, base.followers, formula, {})
    texts = [Scored(one, random_ids(rng, length)) for length in (4, 40, 60)]
    engine.generate([texts[2].prompt], [texts[2].asking()])
    for text in texts:
        with engine.prefix_hits() as hits:
            (output,) = engine.generate([text.prompt], [text.asking()])
        check(llama, text, output.prompt_logprobs)
        assert hits[text.prompt] == 96
    whole = texts[2]  # all of it is cached now, but for the last block
    with engine.prefix_hits() as hits:
        (output,) = engine.generate([whole.prompt], [whole.asking()])
    check(llama, whole, output.prompt_logprobs)
    assert hits[whole.prompt] == 96


@pytest.mark.v2
def test_several_choices(engine: Engine, llama: Oracle) -> None:
    one = EVERY[0]
    (output,) = engine.generate([one.prompt], [one.asking(n=3, temperature=1.0, seed=4)])
    check(llama, one, output.prompt_logprobs)
    assert len(output.outputs) == 3


def test_default_negative_is_the_contexts_last_token(engine: Engine, llama: Oracle) -> None:
    prompt, continuation = PROMPTS[4][:20], PROMPTS[5][:6]
    params = plain(
        extra_args={"guidance_scale": 2.0, "guidance_score_tokens": 6},
        prompt_logprobs=0,
        max_tokens=1,
    )
    (output,) = engine.generate([prompt + continuation], [params])
    pair = Request("pair", prompt, (prompt[-1:],), Formula(scales=((0, 2.0),)), {})
    rows = Scored(pair, continuation).want(llama)
    for token, entries, row in zip(continuation, output.prompt_logprobs[20:], rows, strict=True):
        assert entries[token].logprob == pytest.approx(float(row[token]), abs=1e-4)


@torch.inference_mode()
def test_scale_1_is_plain(engine: Engine, llama: Oracle) -> None:
    prompt = PROMPTS[4]
    extra = {"guidance_scale": 1.0, "guidance_score_tokens": 4, "negative_prompt_token_ids": [7]}
    params = plain(extra_args=extra, prompt_logprobs=0, max_tokens=1)
    (output,) = engine.generate([prompt], [params])
    whole = torch.log_softmax(llama.model(torch.tensor([prompt])).logits[0], -1)
    assert len(output.prompt_logprobs) == len(prompt)
    for i in range(len(prompt) - 4, len(prompt)):
        entry = output.prompt_logprobs[i][prompt[i]]
        assert entry.logprob == pytest.approx(float(whole[i - 1, prompt[i]]), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt_logprobs": None}, "needs log-probabilities of the prompt"),
        ({"flat_logprobs": True}, "supports neither"),
        ({"score": 0}, "must be 1 or more"),
        ({"score": len(PROMPTS[0])}, "at least one token must come before"),
        ({"fields": {"guidance_end": 4}}, "leave out guidance_end"),
        ({"fields": {"guidance_start": 1}}, "leave out guidance_start"),
    ],
)
def test_refusals(engine: Engine, options: dict[str, Any], words: str) -> None:
    fields = {"guidance_score_tokens": options.pop("score", 2), **options.pop("fields", {})}
    extra = {"guidance_scale": 2.0, "negative_prompt_token_ids": [5], **fields}
    with pytest.raises(ValueError, match=words):
        engine.generate(
            [PROMPTS[0]], [plain(extra_args=extra, **{"prompt_logprobs": 0, **options})]
        )
    engine.assert_idle()


@pytest.mark.parametrize("rows", [7, 40])
def test_in_pieces(
    engine: Engine, llama: Oracle, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Pieces that end in the middle of a group, and pieces of several groups."""
    monkeypatch.setattr("cfg_core.vllm_plugin.worker.scoring.MOST_ROWS", rows)
    outputs = engine.generate([o.prompt for o in EVERY], [o.asking(top=2) for o in EVERY])
    for one, output in zip(EVERY, outputs, strict=True):
        check(llama, one, output.prompt_logprobs, 2)


def test_too_much_for_one_step_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cfg_core.vllm_plugin.frontend.scored_prompts.MOST_ROWS", 9)
    extra = {"guidance_scale": 2.0, "negative_prompt_token_ids": [5]}

    def ask(scored: int) -> None:
        fields = {**extra, "guidance_score_tokens": scored}
        engine.generate([PROMPTS[0]], [plain(extra_args=fields, prompt_logprobs=0, max_tokens=1)])

    ask(4)
    with pytest.raises(ValueError, match="at most 4 tokens of so many streams"):
        ask(5)
    cache = engine.llm.llm_engine.vllm_config.cache_config
    monkeypatch.setattr(cache, "kv_sharing_fast_prefill", True)
    with pytest.raises(ValueError, match="start the engine without it"):
        ask(4)
    engine.assert_idle()


def test_tokens_that_begin_in_the_context() -> None:
    """A token with characters of both is scored whole."""
    from transformers import AutoTokenizer

    from cfg_core.vllm_plugin.scoring import tokens_of

    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "stories")
    llm: Any = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    for context, text in (
        ("Tell me ", "a story."),
        ("The ki", "ng slept."),
        ("The king", " slept"),
    ):
        before, scored = tokens_of(llm, context, text)
        assert before + scored == tokenizer(context + text).input_ids
        assert tokenizer(context).input_ids[: len(before)] == before
        assert tokenizer.decode(scored).strip().endswith(text.strip())


def test_offline_scores(engine: Engine, llama: Oracle) -> None:
    """Any of the three as token ids; without a negative, the context's last token."""
    from cfg_core.vllm_plugin.scoring import score

    items = [
        (PROMPTS[4], PROMPTS[0], PROMPTS[5][:7]),
        (PROMPTS[0], None, PROMPTS[4][:1]),
        (PROMPTS[5], PROMPTS[5][:3], tuple(llama.plain[5][:6])),
    ]
    for scale in (1.0, 2.5):
        for item, one in zip(items, score(engine.llm, items, scale=scale), strict=True):
            context, negative, continuation = item
            formula = Formula(scales=((0, scale),))
            pair = Request("", context, (negative or context[-1:],), formula, {})
            rows = Scored(pair, continuation).want(llama)
            want = [float(row[token]) for token, row in zip(continuation, rows, strict=True)]
            assert one.token_ids == continuation
            assert list(one.log_probs) == pytest.approx(want, abs=2e-4)
            assert one.total == pytest.approx(sum(want), abs=1e-3)
            likeliest = [int(row.argmax()) for row in rows]
            assert one.greedy == (likeliest == list(continuation))
    assert score(engine.llm, items[2:], scale=1.0)[0].greedy
    with pytest.raises(ValueError, match="at least one token each"):
        score(engine.llm, [(PROMPTS[0], None, [])])


@pytest.mark.v2
def test_in_chunks_and_preempted(model_folder: Callable[[str], Path], llama: Oracle) -> None:
    """A small budget and a small pool: rows wait for each other, and groups are preempted.

    This test comes last, because its engine ends the other one.
    """
    few = tight_for_groups(drafts=0)
    few["num_gpu_blocks_override"] = 34
    engine = Engine(model_folder("llama"), max_model_len=MAX_MODEL_LEN, **few)
    short = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    chosen = EVERY[::3] if short else EVERY
    length = {"max_tokens": 2 if short else 40}
    try:
        outputs = engine.generate(
            [o.prompt for o in chosen], [o.asking(top=1, **length) for o in chosen]
        )
        for one, output in zip(chosen, outputs, strict=True):
            check(llama, one, output.prompt_logprobs, 1)
        assert short or engine.stats()["group_preemptions"] > 0
        counted = sum(len(one.continuation) for one in chosen)
        assert engine.stats()["scored_tokens"] == counted
    finally:
        engine.close()
