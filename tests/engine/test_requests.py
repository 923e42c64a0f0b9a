"""The options of one guided request: negatives, logprobs, stop conditions, grammars, limits.

Sampling options are in test_options.py, random grammars in test_structured.py. The oracle is the
reference loop with the same processors after the blend: guidance changes the model's logits, and
everything after it treats them as those of an ordinary model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError

from tests.engine.engines import ROOMY, Engine, differences, guided, plain, tokens
from tests.engine.options import forbid, only
from tests.engine.oracle import CASES, NEW_TOKENS, PAIRS, PROMPTS, SCALES, Case, Oracle, rounding

SAMPLE = CASES[::5]
"""15 cases, every scale and every pair among them."""


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    grammar = {"backend": "xgrammar", "disable_any_whitespace": True}
    engine = Engine(
        model_folder("llama"), structured_outputs_config=grammar, max_logprobs=-1, **ROOMY
    )
    yield engine
    engine.close()


@pytest.fixture
def most_requests(engine: Engine) -> Iterator[list[int]]:
    """The number of requests in the scheduler at each step.

    A follower would count as one.
    """
    counts: list[int] = []
    original = engine.scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        counts.append(len(engine.scheduler.requests))
        return original(*args, **kwargs)

    engine.scheduler.schedule = schedule
    yield counts
    del engine.scheduler.schedule


# --- what makes a group


@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {},
        {"guidance_scale": 1.0},
        {"guidance_scale": 1},
        {"other": 5},
        {"guidance_scale": 1, "negative_prompt": ""},
        {"negative_prompt_token_ids": [5, 6]},
    ],
)
def test_no_guidance_makes_no_follower(
    engine: Engine, llama: Oracle, most_requests: list[int], extra_args: dict[str, Any] | None
) -> None:
    prompt = PROMPTS[0]
    assert tokens(engine.generate([prompt], [plain(extra_args=extra_args)])) == [llama.plain[0]]
    assert max(most_requests) == 1


def test_guidance_makes_one_follower(
    engine: Engine, llama: Oracle, most_requests: list[int]
) -> None:
    assert engine.guide([CASES[3]]) == [llama.guided[3]]
    assert max(most_requests) == 2


def test_default_negative_is_the_last_prompt_token(engine: Engine, llama: Oracle) -> None:
    """Hugging Face `generate(guidance_scale=...)` does the same without negative_prompt_ids."""
    params = [plain(extra_args={"guidance_scale": scale}) for scale in (0.5, 3.0) for _ in PROMPTS]
    want = [llama.hf(prompt, scale=scale) for scale in (0.5, 3.0) for prompt in PROMPTS]
    assert differences(tokens(engine.generate(PROMPTS * 2, params)), want) == []


def test_a_negative_of_text_is_read_as_a_prompt_is(engine: Engine, llama: Oracle) -> None:
    """It gets the tokenizer's beginning-of-sequence token, as `prompt` does. é is two tokens."""
    text = "A café at night: no éclairs."
    ids = engine.llm.get_tokenizer().encode(text)
    assert ids[0] == 0
    assert len(ids) == 1 + len(text.encode())
    case = Case(PROMPTS[0], tuple(ids), 3.0)
    as_text = plain(extra_args={"guidance_scale": 3.0, "negative_prompt": text})
    got = tokens(engine.generate([case.prompt, case.prompt], [as_text, guided(case)]))
    assert differences(got, [llama.reference(case).token_ids] * 2) == []


def test_synonyms(engine: Engine, llama: Oracle) -> None:
    case = CASES[3]
    params = plain(extra_args={"cfg_scale": case.scale, "negative_prompt_ids": list(case.negative)})
    assert tokens(engine.generate([case.prompt], [params])) == [llama.guided[3]]


def test_params_of_the_caller_are_left_alone(engine: Engine) -> None:
    """One SamplingParams object is used for many prompts.

    The default negative of one prompt must not become that of the next.
    """
    params = plain(extra_args={"guidance_scale": 3.0})
    together = tokens(engine.generate(PROMPTS[:3], [params] * 3))
    assert params.extra_args == {"guidance_scale": 3.0}
    assert params.max_tokens == NEW_TOKENS
    assert together == [
        tokens(engine.generate([p], [plain(extra_args={"guidance_scale": 3.0})]))[0]
        for p in PROMPTS[:3]
    ]


# --- log-probabilities


@pytest.mark.v2
def test_logprobs_are_the_guided_ones(engine: Engine, llama: Oracle) -> None:
    """The tolerance is 1e-4 up to scale 1.5.

    Above, it grows with the rounding error: at scale 7.5, values go down to -290.
    """
    outputs = engine.generate(
        [c.prompt for c in SAMPLE], [guided(c, logprobs=5, max_tokens=8) for c in SAMPLE]
    )
    for case, output in zip(SAMPLE, outputs, strict=True):
        want = llama.reference(case, max_new_tokens=8, keep_log_probs=True)
        got = output.outputs[0]
        assert list(got.token_ids) == want.token_ids
        for row, said in zip(want.log_probs, got.logprobs, strict=True):
            assert set(row.topk(5).indices.tolist()) <= set(said)
            worst = max(abs(entry.logprob - row[token].item()) for token, entry in said.items())
            assert worst < 2 * rounding(case.scale), case.scale


@torch.inference_mode()
def along(oracle: Oracle, start: tuple[int, ...], output: list[int]) -> list[float]:
    """log p of each token of `output` after `start`, without guidance."""
    logits = (
        oracle.model(torch.tensor([[*start, *output[:-1]]])).logits[0, len(start) - 1 :].float()
    )
    picked: list[float] = torch.log_softmax(logits, -1)[range(len(output)), output].tolist()
    return picked


@pytest.mark.v2
def test_guidance_logprobs_are_those_of_the_single_streams(engine: Engine, llama: Oracle) -> None:
    """Other guided and plain requests of the batch ask for logprobs of their own.

    One of them asks for the whole vocabulary. They get the same logprobs as without this request.
    """

    def asking(case: Case) -> Any:
        params = guided(case, logprobs=2, max_tokens=8)
        params.extra_args = {**params.extra_args, "guidance_logprobs": True}
        return params

    neighbours = [
        guided(SAMPLE[0], logprobs=3, max_tokens=8),
        plain(logprobs=-1, max_tokens=8),
        plain(max_tokens=8),
    ]
    prompts = [SAMPLE[0].prompt, PROMPTS[2], PROMPTS[3]]
    alone = engine.generate(prompts, neighbours)
    outputs = engine.generate(
        [c.prompt for c in SAMPLE] + prompts, [asking(c) for c in SAMPLE] + neighbours
    )
    for case, output in zip(SAMPLE, outputs, strict=False):
        text = list(output.outputs[0].token_ids)
        said = [row[token] for row, token in zip(output.outputs[0].logprobs, text, strict=True)]
        want = zip(along(llama, case.prompt, text), along(llama, case.negative, text), strict=True)
        for entry, (conditional, negative) in zip(said, want, strict=True):
            assert entry.conditional == pytest.approx(conditional, abs=1e-4)
            assert entry.negatives == (pytest.approx(negative, abs=1e-4),)
    for before, after in zip(alone, outputs[len(SAMPLE) :], strict=True):
        rows = [output.outputs[0].logprobs or [] for output in (before, after)]
        assert before.outputs[0].token_ids == after.outputs[0].token_ids
        assert [row.keys() for row in rows[0]] == [row.keys() for row in rows[1]]
        for a, b in zip(*rows, strict=True):
            assert all(
                abs(a[t].logprob - b[t].logprob) < 1e-4 and a[t].rank == b[t].rank for t in a
            )
            assert not any(hasattr(entry, "conditional") for entry in b.values())


@pytest.mark.v2
@pytest.mark.parametrize(
    "asked", [{"prompt_logprobs": 2}, {"prompt_logprobs": 0}, {"prompt_logprob_token_ids": [[7]]}]
)
def test_prompt_logprobs_of_a_guided_request_are_refused(
    engine: Engine, asked: dict[str, Any]
) -> None:
    """They would be the conditional stream's."""
    words = "would be the conditional"
    if "prompt_logprob_token_ids" in asked:
        asked = {"prompt_logprob_token_ids": [[7]] * (len(CASES[4].prompt) - 1)}
        if not engine.llm.llm_engine.vllm_config.use_v2_model_runner:
            words = "requires the V2 model runner"  # vLLM refuses them on V1, guided or not
    with pytest.raises((ValueError, VLLMValidationError), match=words):
        engine.generate([CASES[4].prompt], [guided(CASES[4], **asked)])
    engine.assert_idle()


@pytest.mark.v2
def test_prompt_logprobs_of_a_plain_request_beside_a_group(engine: Engine, llama: Oracle) -> None:
    case = CASES[4]
    prompts, params = [case.prompt, PROMPTS[2]], [guided(case), plain(prompt_logprobs=2)]
    group, alone = engine.generate(prompts, params)
    assert tokens([group]) == [llama.guided[4]]
    check_prompt_logprobs(llama, PROMPTS[2], alone.prompt_logprobs)


@torch.inference_mode()
def check_prompt_logprobs(oracle: Oracle, prompt: tuple[int, ...], said: list[Any]) -> None:
    want = torch.log_softmax(oracle.model(torch.tensor([prompt])).logits[0], dim=-1)
    assert len(said) == len(prompt)
    assert said[0] is None
    for i in range(1, len(prompt)):
        assert prompt[i] in said[i]
        assert all(
            abs(entry.logprob - want[i - 1, token]) < 1e-4 for token, entry in said[i].items()
        )


@pytest.mark.v2
def test_logprobs_of_chosen_tokens_are_the_guided_ones(engine: Engine, llama: Oracle) -> None:
    """They work together with `guidance_logprobs`."""
    case, ids = CASES[4], [7, 70, 170]
    params = guided(case, logprob_token_ids=ids, logprobs=len(ids), max_tokens=8)
    params.extra_args = {**params.extra_args, "guidance_logprobs": True}
    (output,) = engine.generate([case.prompt], [params])
    want = llama.reference(case, max_new_tokens=8, keep_log_probs=True)
    assert tokens([output]) == [want.token_ids]
    conditional = along(llama, case.prompt, want.token_ids)
    for i, (row, token, said) in enumerate(
        zip(want.log_probs, want.token_ids, output.outputs[0].logprobs, strict=True)
    ):
        assert {token, *ids} == set(said)
        assert all(
            abs(entry.logprob - row[t].item()) < 2 * rounding(case.scale)
            for t, entry in said.items()
        )
        assert said[token].conditional == pytest.approx(conditional[i], abs=1e-4)


# --- what runs after the blend


def test_hf_applies_the_repetition_penalty_after_guidance_too(
    engine: Engine, llama: Oracle
) -> None:
    want = [
        llama.hf(c.prompt, scale=c.scale, negative=c.negative, repetition_penalty=1.7)
        for c in SAMPLE[:5]
    ]
    assert differences(engine.guide(SAMPLE[:5], repetition_penalty=1.7), want) == []


def test_bad_words(engine: Engine, llama: Oracle) -> None:
    """For each case, one letter that its text uses is forbidden.

    The words are printable ASCII characters: one token each.
    """
    decode = engine.llm.get_tokenizer().decode
    tried = 0
    for case, text in zip(SAMPLE, llama.guided[::5], strict=True):
        letter = next((t for t in text if decode([t]).isascii() and decode([t]).isalnum()), None)
        if letter is None:
            continue
        tried += 1
        want = llama.reference(case, processors=[forbid(letter)])
        assert want.token_ids != text
        assert engine.guide([case], bad_words=[decode([letter])]) == [want.token_ids]
    assert tried >= 5


@pytest.mark.v2
def test_stop_token_and_min_tokens(engine: Engine, llama: Oracle) -> None:
    """A stop token ends the text.

    Within the first min_tokens tokens, it is forbidden.
    """
    case, text = CASES[4], llama.guided[4]
    stop = text[4]
    (output,) = engine.generate([case.prompt], [guided(case, stop_token_ids=[stop])])
    assert list(output.outputs[0].token_ids) == text[: text.index(stop) + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    late = llama.reference(
        case, processors=[forbid(stop, first_tokens=10)], eos_token_id=stop
    ).token_ids
    assert len(late) > 10
    assert engine.guide([case], stop_token_ids=[stop], min_tokens=10) == [late]


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=lambda o: next(iter(o))
)
def test_sampling_that_leaves_one_token_is_greedy(
    engine: Engine, llama: Oracle, options: dict[str, Any]
) -> None:
    assert (
        differences(engine.guide(SAMPLE, temperature=1.0, seed=3, **options), llama.guided[::5])
        == []
    )


# --- grammars: blending masked rows would give NaN at scale 0, and +inf below


TEXTS = ["Once upon a time", "The sun rose over", "A grey cat and a", "q"]
"""Prompts of whole characters.

vLLM's detokenizer joins a cut-off character of the prompt to the answer's text.
"""


def text_cases(engine: Engine, scale: float) -> list[Case]:
    """Each of TEXTS, with the next one as its negative."""
    ids = [tuple(engine.llm.get_tokenizer().encode(text)) for text in TEXTS]
    return [
        Case(prompt, negative, scale)
        for prompt, negative in zip(ids, ids[1:] + ids[:1], strict=True)
    ]


def structured(**grammar: Any) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {
        "structured_outputs": StructuredOutputsParams(**grammar),
        "max_tokens": 80,
        "ignore_eos": False,
    }


@pytest.mark.v2
@pytest.mark.parametrize("scale", SCALES)
def test_regex_equals_the_reference_under_the_same_mask(
    engine: Engine, llama: Oracle, scale: float
) -> None:
    letters = engine.llm.get_tokenizer().encode("abcdef", add_special_tokens=False)
    cases = text_cases(engine, scale)
    want = [
        llama.reference(case, processors=[only(letters)], max_new_tokens=12).token_ids
        for case in cases
    ]
    prompts = [case.prompt for case in cases]
    outputs = engine.generate(
        prompts, [guided(case, **structured(regex="[a-f]{12}")) for case in cases]
    )
    assert differences([text[:-1] for text in tokens(outputs)], want) == []
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    assert all(re.fullmatch("[a-f]{12}", output.outputs[0].text) for output in outputs)


# --- limits and refusals


@pytest.mark.parametrize(("prompt", "negative"), [(20, 250), (250, 20), (1, 255)])
def test_the_output_ends_where_the_longer_stream_fills_the_context(
    engine: Engine, llama: Oracle, prompt: int, negative: int
) -> None:
    """max_model_len is 256: with 250 tokens in one stream there is room for 6."""
    long = (PAIRS[9][0] + PAIRS[9][1])[:255]
    case = Case(long[:prompt], long[:negative], 1.5)
    room = 256 - max(prompt, negative)
    (output,) = engine.generate([case.prompt], [guided(case, max_tokens=50)])
    assert list(output.outputs[0].token_ids) == llama.reference(case, max_new_tokens=room).token_ids
    assert output.outputs[0].finish_reason == "length"


NEGATIVE = [5, 6, 7]
BAD = {
    "not-finite": {"guidance_scale": math.nan},
    "infinite": {"guidance_scale": math.inf},
    "text-for-a-number": {"guidance_scale": "2"},
    "boolean": {"guidance_scale": True},
    "ids-outside-the-vocabulary": {"guidance_scale": 2.0, "negative_prompt_token_ids": [5, 99999]},
    "negative-ids": {"guidance_scale": 2.0, "negative_prompt_token_ids": [-1]},
    "ids-no-list": {"guidance_scale": 2.0, "negative_prompt_token_ids": "abc"},
    "fractional-ids": {"guidance_scale": 2.0, "negative_prompt_token_ids": [1.5]},
    "ids-too-many": {"guidance_scale": 2.0, "negative_prompt_token_ids": [5] * 256},
    "text-too-long": {"guidance_scale": 2.0, "negative_prompt": "a" * 256},
    "empty-ids": {"guidance_scale": 2.0, "negative_prompt_token_ids": []},
    "two-negatives": {
        "guidance_scale": 2.0,
        "negative_prompt": "a",
        "negative_prompt_token_ids": NEGATIVE,
    },
    "guidance-logprobs-without-logprobs": {"guidance_scale": 2.0, "guidance_logprobs": True},
    "guidance-logprobs-as-a-number": {"guidance_scale": 2.0, "guidance_logprobs": 1},
    "guidance-logprobs-at-scale-1": {"guidance_scale": 1.0, "guidance_logprobs": True},
    "unknown-field": {"guidance_scale": 2.0, "guidance_sclae": 3.0},
    "ambiguous-field": {"cfg_weight": 0.5},
}


@pytest.mark.parametrize("extra_args", BAD.values(), ids=BAD)
def test_bad_guidance_is_refused_at_admission(
    engine: Engine, llama: Oracle, extra_args: dict[str, Any]
) -> None:
    """A ValueError is raised before anything runs.

    The good request that was sent with the bad one leaves nothing behind, and the engine still
    works.
    """
    good = CASES[3]
    inputs = [{"prompt_token_ids": list(good.prompt)}] * 2
    with pytest.raises(ValueError, match=r"guidance|negative|cfg"):
        engine.llm.generate(
            inputs, [guided(good, max_tokens=3), plain(extra_args=extra_args)], use_tqdm=False
        )
    assert engine.llm.llm_engine.step() == []
    engine.assert_idle()
    assert engine.guide([good]) == [llama.guided[3]]
