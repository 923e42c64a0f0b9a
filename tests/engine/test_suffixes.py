"""Negatives that are the leader with a suffix: the tokens are those of the reference.

Suffixes of different lengths, pairs and plain requests run in one batch.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cfg_core.errors import GuidanceError
from cfg_core.params import GuidanceParams, ResolvedGuidance, TokenIds
from cfg_core.reference import next_log_probs, weighted_generate
from tests.engine.engines import ROOMY, SMALL_POOL, Engine, differences, guided, plain, tokens
from tests.engine.formulas import (
    MAX_MODEL_LEN,
    MEDIAN_ENTROPY,
    NEW_TOKENS,
    Answer,
    suffix_answers,
)
from tests.engine.options import only
from tests.engine.oracle import CASES, PROMPTS, Oracle, random_ids
from tests.engine.test_requests import structured
from tests.support.fixed_cost import FixedCost

pytestmark = pytest.mark.slow

PLAIN, PAIRS = PROMPTS[::3], CASES[::18]
CHUNKED = {"num_gpu_blocks_override": 2048, "max_num_batched_tokens": 48, "max_num_seqs": 16}
"""Prompts take several steps. A suffix of 40 tokens takes almost a whole one."""


def asking(one: Answer, length: int, **options: Any) -> Any:
    return plain(**{"extra_args": one.request.extra_args, "max_tokens": length, **options})


IN_INTERPRETER = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
NEVER_OPEN = 1e9
THRESHOLDS = [1e-9, 0.7, MEDIAN_ENTROPY, NEVER_OPEN]
COUNTED = ["guided_tokens", "gate_closed_tokens", "full_strength_tokens"]
SAVING = ["gate_probes", "gate_saved_tokens"]


def check(engine: Engine, oracle: Oracle) -> None:
    length = 9 if IN_INTERPRETER else NEW_TOKENS
    answers = suffix_answers(oracle)
    prompts = [one.request.prompt for one in answers] + [case.prompt for case in PAIRS] + PLAIN
    params = [asking(one, length) for one in answers]
    params += [guided(case, max_tokens=length) for case in PAIRS]
    params += [plain(max_tokens=length) for _ in PLAIN]
    want = [one.token_ids for one in answers] + oracle.guided[::18] + oracle.plain[::3]
    before = engine.stats()["guided_tokens"]
    got = tokens(engine.generate(prompts, params))
    assert differences(got, [text[:length] for text in want]) == []
    inside = sum(one.request.guided_tokens(length) for one in answers) + length * len(PAIRS)
    assert engine.stats()["guided_tokens"] - before == inside


def counts(engine: Engine, before: dict[str, int], names: Sequence[str]) -> list[int]:
    after = engine.stats()
    return [after[name] - before[name] for name in names]


def check_saving(engine: Engine, seeded: bool = True) -> None:
    """Whether closed gates save the rows of suffixes or not, texts and what is told of them are the
    same: greedy and sampled, with penalties, cuts, rules, limits, windows and schedules.

    seeded: whether texts with a seed are the same in any batch. With drafts they are not where a
        small budget or pool leaves some out.
    """
    rng = random.Random(8)
    length = 6 if IN_INTERPRETER else 20
    more: list[dict[str, Any]] = [
        {"guidance_scale": 3.0, "guidance_min_p": 0.02},
        {"guidance_rule": {"name": "adacad", "offset": 1.0}, "guidance_max_kl": 0.5},
        {"guidance_schedule": [[0, 2.0], [4, 3.0]], "guidance_start": 2, "guidance_end": 13},
    ]
    prompts, params = [], []
    for threshold, fields in itertools.product(THRESHOLDS, more[: 1 if IN_INTERPRETER else None]):
        prompts += [random_ids(rng, rng.choice((1, rng.randint(2, 70))))] * 2
        suffix = list(random_ids(rng, rng.choice((1, 5, 30))))
        extra = {**fields, "negative_suffix_token_ids": suffix, "guidance_min_entropy": threshold}
        options = {"max_tokens": length, "extra_args": extra, "logprobs": 1}
        drawn = {"temperature": 1.0, "seed": len(params), "top_p": 0.95} if seeded else {}
        params += [plain(**options), plain(**options, **drawn, presence_penalty=0.5)]
    found, told = [], []
    engine.scheduler._probes.cost = FixedCost()
    for saves in (True, False):
        engine.scheduler._probes.saves = saves
        before = engine.stats()
        found.append(engine.generate(prompts, params))
        told.append(counts(engine, before, COUNTED))
        saved = counts(engine, before, SAVING)
        assert saves == (saved[0] > 20 / (1 + 4 * IN_INTERPRETER)) == (saved[1] > 0), saved
    engine.scheduler._probes.saves = True
    assert told[0] == told[1]
    assert 0 < told[0][1] < told[0][0]
    assert differences(*map(tokens, found)) == []
    for one, other in zip(*found, strict=True):
        pairs = zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
        for mine, its in pairs:
            assert {t: p.logprob for t, p in mine.items()} == pytest.approx(
                {t: p.logprob for t, p in its.items()}, abs=1e-4
            )


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    engine = Engine(model_folder("llama"), max_model_len=MAX_MODEL_LEN, **ROOMY)
    yield engine
    engine.close()


@pytest.mark.v2
def test_in_one_batch(engine: Engine, llama: Oracle) -> None:
    check(engine, llama)
    assert engine.stats()["follower_blocks"] == 0


@pytest.mark.v2
def test_closed_gates_save_the_suffix_and_change_nothing(engine: Engine) -> None:
    check_saving(engine)


@pytest.mark.survey
def test_500_sampled_texts_are_the_same_whether_or_not_gates_save(engine: Engine) -> None:
    """Each with a prompt, a suffix, a threshold, a scale and a seed of its own."""
    rng = random.Random(9)
    prompts, params = [], []
    for seed in range(500):
        fields = {
            "guidance_scale": rng.choice((1.5, 3.0)),
            "negative_suffix_token_ids": list(random_ids(rng, rng.randint(1, 40))),
            "guidance_min_entropy": rng.choice((*THRESHOLDS, 2.0, 3.0)),
        }
        prompts.append(random_ids(rng, rng.randint(1, 70)))
        params.append(plain(temperature=1.0, seed=seed, max_tokens=20, extra_args=fields))
    engine.scheduler._probes.cost = FixedCost()
    before = engine.stats()
    found = tokens(engine.generate(prompts, params))
    assert counts(engine, before, SAVING)[0] > 1000
    engine.scheduler._probes.saves = False
    try:
        want = tokens(engine.generate(prompts, params))
    finally:
        engine.scheduler._probes.saves = True
    assert differences(found, want) == []


def test_a_gate_that_never_opens_needs_the_suffix_once(engine: Engine, llama: Oracle) -> None:
    fields = {"guidance_scale": 3.0, "negative_suffix_token_ids": [5] * 30}
    params = plain(extra_args={**fields, "guidance_min_entropy": NEVER_OPEN}, max_tokens=9)
    engine.scheduler._probes.cost = FixedCost()
    before = engine.stats()
    found = tokens(engine.generate([PROMPTS[1]], [params]))
    assert found == [llama.hf(PROMPTS[1], max_new_tokens=9)]
    assert counts(engine, before, [*COUNTED, *SAVING, "joint_steps"]) == [9, 9, 0, 8, 240, 1]


def test_what_shows_the_negative_computes_it(engine: Engine) -> None:
    extra = {
        "guidance_scale": 3.0,
        "negative_suffix": "abc",
        "guidance_min_entropy": NEVER_OPEN,
        "guidance_logprobs": True,
    }
    before = engine.stats()
    (output,) = engine.generate([PROMPTS[1]], [plain(extra_args=extra, max_tokens=4, logprobs=0)])
    for shown in output.outputs[0].logprobs:
        assert all(len(entry.negatives) == 1 for entry in shown.values())
    assert counts(engine, before, SAVING) == [0, 0]


@torch.inference_mode()
def log_prob(oracle: Oracle, before: Sequence[int], token: int) -> float:
    """Of a token, without guidance."""
    return float(next_log_probs(oracle.model, before, torch.float32)[token])


@pytest.mark.v2
def test_logprobs_of_the_suffix_are_those_of_the_negative(engine: Engine, llama: Oracle) -> None:
    one = suffix_answers(llama)[0]
    params = asking(one, 6, logprobs=0)
    params.extra_args = {**params.extra_args, "guidance_logprobs": True}
    (output,) = engine.generate([one.request.prompt], [params])
    text = list(output.outputs[0].token_ids)
    assert text == one.token_ids[:6]
    for i, (token, shown) in enumerate(zip(text, output.outputs[0].logprobs, strict=True)):
        before = [*one.request.prompt, *text[:i]]
        own, negative = (
            log_prob(llama, ids, token) for ids in (before, [*before, *one.request.formula.suffix])
        )
        assert shown[token].conditional == pytest.approx(own, abs=1e-4)
        assert shown[token].negatives == (pytest.approx(negative, abs=1e-4),)


@pytest.mark.v2
def test_a_shared_prefix_is_cached_without_its_suffix(engine: Engine, llama: Oracle) -> None:
    """The suffix fills whole blocks behind the prompt, and no later request may find them."""
    rng = random.Random(3)
    prompt, suffix = random_ids(rng, 60), random_ids(rng, 70)
    fields = {"guidance_scale": 2.0, "negative_suffix_token_ids": list(suffix)}
    params = plain(extra_args=fields, max_tokens=8)
    with engine.prefix_hits() as hits:
        first = tokens(engine.generate([prompt], [params]))
        longer = (*prompt, *suffix, 7)
        (after,) = tokens(engine.generate([longer], [plain(max_tokens=8)]))
        again = tokens(engine.generate([prompt] * 2, [params] * 2))
    assert hits[longer] == 32
    assert again == first * 2
    assert after == llama.hf(longer, max_new_tokens=8)


@pytest.mark.v2
def test_n_choices_penalties_and_a_grammar(engine: Engine, llama: Oracle) -> None:
    """They see the guided distribution, and none of the suffix."""
    one = suffix_answers(llama)[1]
    letters = engine.llm.get_tokenizer().encode("abcdef", add_special_tokens=False)
    want = weighted_generate(
        llama.model,
        one.request.prompt,
        [],
        one.request.formula,
        max_new_tokens=6,
        processors=[only(letters)],
    )
    several = asking(one, 6, n=3, temperature=1.0, seed=5)
    alone = [asking(one, 6, temperature=1.0, seed=5 + i) for i in range(3)]
    prompts = [one.request.prompt] * 5
    outputs = engine.generate(
        prompts, [several, *alone, asking(one, 80, **structured(regex="[a-f]{6}"))]
    )
    assert [list(c.token_ids) for c in outputs[0].outputs] == tokens(outputs[1:4])
    assert len({tuple(c.token_ids) for c in outputs[0].outputs}) > 1
    assert tokens(outputs[4:])[0][:-1] == want.token_ids


REFUSED: Sequence[tuple[dict[str, Any], str]] = [
    ({"negative_suffix_token_ids": [5, 99999]}, "token ids of this model"),
    ({"negative_suffix_token_ids": [5] * 1025}, "can compute 1024 behind a token"),
    ({"negative_suffix_token_ids": [5] * 380}, "leave no room for an output token"),
    ({"negative_suffix": "a" * 20000}, "at most 16384"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_no_step_can_have_is_refused(
    engine: Engine, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        engine.generate([PROMPTS[0]], [plain(extra_args={"guidance_scale": 2.0, **fields})])
    engine.assert_idle()


def test_a_text_is_its_own_tokens_without_special_ones(engine: Engine) -> None:
    ids = engine.llm.get_tokenizer().encode("abc", add_special_tokens=False)
    texts = [
        {"guidance_scale": 3.0, "negative_suffix": "abc"},
        {"guidance_scale": 3.0, "negative_suffix_token_ids": ids},
    ]
    first, second = tokens(
        engine.generate([PROMPTS[0]] * 2, [plain(extra_args=fields) for fields in texts])
    )
    assert first == second


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache_config": SimpleNamespace(kv_sharing_fast_prefill=True)}, "kv_sharing"),
        ({"model_config": SimpleNamespace(is_hybrid=True)}, "recurrent state"),
        ({"scheduler_config": SimpleNamespace(enable_chunked_prefill=False)}, "chunked prefill"),
        (
            {
                "parallel_config": SimpleNamespace(
                    distributed_executor_backend="external_launcher", pipeline_parallel_size=2
                )
            },
            "external launcher",
        ),
    ],
)
def test_engines_that_cannot_forget_a_suffix_refuse_it(change: dict[str, Any], words: str) -> None:
    from cfg_core.vllm_plugin.frontend.suffixes import suffix_of

    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        model_config=SimpleNamespace(is_hybrid=False, has_inner_state=False),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        parallel_config=SimpleNamespace(
            distributed_executor_backend="mp", pipeline_parallel_size=2
        ),
    )
    vars(config).update(change)
    params = GuidanceParams(scale=2.0, negative_suffix_token_ids=[5])
    processor: Any = SimpleNamespace(vllm_config=config)
    request: Any = SimpleNamespace(prompt_embeds=None, mm_features=[])
    with pytest.raises(
        GuidanceError, match=f"negative_suffix_token_ids does not work with.*{words}"
    ):
        suffix_of(processor, request, params)


@pytest.mark.parametrize("given", [{"prompt_embeds": 1}, {"mm_features": [1]}], ids=str)
def test_prompts_of_more_than_tokens_are_refused(engine: Engine, given: dict[str, Any]) -> None:
    from cfg_core.vllm_plugin.frontend.suffixes import suffix_of

    request: Any = SimpleNamespace(**{"prompt_embeds": None, "mm_features": None, **given})
    params = GuidanceParams(scale=2.0, negative_suffix="abc")
    with pytest.raises(GuidanceError, match="needs a prompt of text or token ids"):
        suffix_of(engine.llm.llm_engine.input_processor, request, params)


def test_a_suffix_counts_once_as_a_negative_and_for_each_guided_token() -> None:
    from deployments.generator.engine.running_request import Choice

    params = GuidanceParams(scale=2.0, negative_suffix_token_ids=[4, 5, 6])
    guidance = ResolvedGuidance.of(params, (), suffix=TokenIds.of([4, 5, 6]))
    sampling = SimpleNamespace(extra_args=guidance.to_extra_args())
    request: Any = SimpleNamespace(sampling_params=sampling, mm_features=None)
    run: Any = None
    choice = Choice(request, run)
    assert (choice.streams, choice.rows, choice.negative_tokens) == (1, 4, 3)


# --- engines of their own: they end the other one


@pytest.mark.parametrize(
    "options", [{**ROOMY, "async_scheduling": True}, CHUNKED, SMALL_POOL], ids=str
)
def test_beside_drafts_of_pairs_and_plain_requests(
    model_folder: Callable[[str], Path], llama: Oracle, options: dict[str, Any]
) -> None:
    folder = model_folder("llama")
    drafter = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    engine = Engine(folder, max_model_len=MAX_MODEL_LEN, speculative_config=drafter, **options)
    try:
        asynchronous = engine.scheduler.scheduler_config.async_scheduling
        probes = IN_INTERPRETER or not asynchronous
        before = engine.stats()
        engine.scheduler._probes.cost = FixedCost()
        check(engine, llama)
        kinds = [f"{kind}_drafts_accepted" for kind in ("plain", "guided")]
        assert min(counts(engine, before, kinds)) > 0
        assert [count > 0 for count in counts(engine, before, SAVING)] == [probes, probes]
        assert options is not SMALL_POOL or engine.stats()["group_preemptions"] > 0
        if probes:
            check_saving(engine, seeded=False)
            check_drafts_behind_closed_gates(engine, llama)
    finally:
        engine.close()


def check_drafts_behind_closed_gates(engine: Engine, oracle: Oracle) -> None:
    """A gate that never opens leaves a plain text, of which a drafter that is the target knows all.

    Of 13 tokens the first one comes from the only joint step, and four from each of three probes.
    """
    fields = {"guidance_scale": 3.0, "negative_suffix_token_ids": [5] * 20}
    params = plain(extra_args={**fields, "guidance_min_entropy": NEVER_OPEN}, max_tokens=13)
    before = engine.stats()
    assert tokens(engine.generate([PROMPTS[1]], [params])) == [
        oracle.hf(PROMPTS[1], max_new_tokens=13)
    ]
    names = ["guided_tokens", *SAVING, "joint_steps", "guided_drafts_accepted"]
    if not engine.scheduler.scheduler_config.async_scheduling:  # it knows later of what was kept
        assert counts(engine, before, names) == [13, 3, 12 * 20, 1, 9]


@pytest.mark.parametrize(
    "options", [CHUNKED, SMALL_POOL, {**ROOMY, "async_scheduling": True}], ids=str
)
def test_chunked_and_preempted_and_async(
    model_folder: Callable[[str], Path], llama: Oracle, options: dict[str, Any]
) -> None:
    engine = Engine(model_folder("llama"), max_model_len=MAX_MODEL_LEN, **options)
    try:
        check(engine, llama)
        check_saving(engine)
        assert options is not SMALL_POOL or engine.stats()["group_preemptions"] > 0
    finally:
        engine.close()
