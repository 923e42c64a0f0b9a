"""Requests that have begun elsewhere: they go on to the same text as one that nobody disturbed.

Each text is generated once. Then its request comes again with the first tokens of this text as
`begun_token_ids`: none, one, half, and all but the last. Whole texts must be equal, and whatever
else the answer says.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cfg_core.params.begun import FIELD
from tests.engine import options, witness
from tests.engine.engines import ROOMY, Engine, guided, plain
from tests.engine.formulas import FORMULAS, MAX_MODEL_LEN, Request, error, request
from tests.engine.oracle import CASES, PROMPTS

pytestmark = pytest.mark.slow

IS_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
TOKENS = 9 if IS_V2 else 20
STRIDE = 3 if IS_V2 else 1  # of V2, every third formula and option: its kernels are interpreted
SMALL_STEPS = {**ROOMY, "max_num_batched_tokens": 160, "max_num_seqs": 40}
"""Prompts take several steps, and the requests of a test are not all admitted at once."""
SEEDS = 2
"""Random requests of a formula, from which the first is taken whose text rounding cannot decide."""


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    engine = Engine(
        model_folder("llama"),
        max_model_len=MAX_MODEL_LEN,
        max_logprobs=-1,
        logits_processors=witness.CONFIG,
        **SMALL_STEPS,
    )
    yield engine
    engine.close()


def cuts_of(length: int) -> list[int]:
    """Where a text of so many tokens is cut."""
    return sorted({0, 1, length // 2, length - 1} & set(range(length)))


def going_on(params: Any, begun: Sequence[Any]) -> Any:
    """The same request, which has these tokens already; a list of lists has those of choices."""
    changed = copy.copy(params)
    changed.extra_args = {**(params.extra_args or {}), FIELD: list(begun)}
    return changed


def said(output: Any) -> list[Any]:
    """What an answer says of each choice."""
    return [
        (list(one.token_ids), one.text, one.finish_reason, one.stop_reason)
        for one in output.outputs
    ]


def check(
    engine: Engine, prompts: Sequence[Any], params: Sequence[Any], texts: Sequence[Any]
) -> None:
    """Let all requests go on from each cut."""
    again = []
    for prompt, one, text in zip(prompts, params, texts, strict=True):
        lists = [list(choice.token_ids) for choice in text.outputs]
        for cut in cuts_of(min(map(len, lists))):
            begun = [tokens[:cut] for tokens in lists]
            again.append((cut, prompt, going_on(one, begun if len(begun) > 1 else begun[0]), text))
    outputs = engine.generate(
        [prompt for _, prompt, _, _ in again], [one for _, _, one, _ in again]
    )
    for (cut, _, one, text), output in zip(again, outputs, strict=True):
        assert said(output) == said(text), (cut, one)


# --- guidance -------------------------------------------------------------------------------------


def asking(one: Request, **more: Any) -> Any:
    return plain(extra_args=one.extra_args, max_tokens=TOKENS, **more)


def is_certain(one: Request, output: Any) -> bool:
    """Whether rounding decides no token of a greedy text. Its best two tokens are in `output`."""
    rows = [
        sorted((entry.logprob for entry in row.values()), reverse=True)
        for row in output.outputs[0].logprobs
    ]
    return all(row[0] - row[1] > 2 * error(one.formula) for row in rows)


def certain_requests(engine: Engine) -> list[Request]:
    """A request of each formula."""
    every = [request(name, seed) for name in FORMULAS for seed in range(SEEDS)]
    outputs = engine.generate(
        [one.prompt for one in every], [asking(one, logprobs=2) for one in every]
    )
    found = {
        one.name: one
        for one, output in reversed(list(zip(every, outputs, strict=True)))
        if is_certain(one, output)
    }
    assert len(found) > 0.7 * len(FORMULAS), found.keys()
    return list(found.values())


@pytest.mark.v2
def test_every_formula_goes_on(engine: Engine) -> None:
    """Greedy and seeded. Only tokens of joint steps are guided, and only the new ones are."""
    every = certain_requests(engine)[::STRIDE]
    params = [asking(one) for one in every]
    sampled = every[::3]
    params += [asking(one, temperature=0.9, seed=i) for i, one in enumerate(sampled)]
    every += sampled
    prompts = [one.prompt for one in every]
    texts = engine.generate(prompts, params)
    before = engine.stats()["guided_tokens"]
    check(engine, prompts, params, texts)  # the prefix cache has the prompts, and much of the texts
    wanted = sum(
        one.formula.guides(token)
        for one in every
        for cut in cuts_of(TOKENS)
        for token in range(cut, TOKENS)
    )
    assert engine.stats()["guided_tokens"] - before == wanted
    engine.llm.reset_prefix_cache()
    check(engine, prompts[::4], params[::4], texts[::4])


@pytest.mark.v2
def test_plain_requests_go_on(engine: Engine) -> None:
    params = [plain(max_tokens=TOKENS) for _ in PROMPTS[:4]]
    params += [plain(max_tokens=TOKENS, temperature=0.9, seed=i) for i in range(4)]
    params += [plain(max_tokens=TOKENS, temperature=0.9, seed=7, n=3)]
    prompts = [*PROMPTS[:4], *PROMPTS[:4], PROMPTS[0]]
    check(engine, prompts, params, engine.generate(prompts, params))


# --- everything else that reads the output --------------------------------------------------------


@pytest.mark.v2
def test_every_option_of_sampling_goes_on(engine: Engine) -> None:
    """Penalties, grammars, stops, min_tokens, logits processors, windows, seeds, choices."""
    cases, num_tokens = options.chosen(IS_V2)
    prompts, params = [], []
    for i, option in enumerate(options.OPTIONS[::STRIDE]):
        case = cases[i % len(cases)]
        prompts.append(case.prompt)
        params.append(options.params_of(case, option, 1000 + 10 * i, num_tokens))
    check(engine, prompts, params, engine.generate(prompts, params))


def test_a_stop_string_is_found_across_the_cut(engine: Engine) -> None:
    """Each token is one character here."""
    case = options.chosen(False)[0][2]
    free = guided(case, max_tokens=20, allowed_token_ids=options.PRINTABLE)
    (whole,) = engine.generate([case.prompt], [free])
    text = whole.outputs[0].text
    stopped = copy.copy(free)
    stopped.stop = [text[7:12]]
    (want,) = engine.generate([case.prompt], [stopped])
    assert want.outputs[0].stop_reason == text[7:12]
    begun = [list(whole.outputs[0].token_ids)[:cut] for cut in (6, 8, 10, 11)]
    outputs = engine.generate([case.prompt] * 4, [going_on(stopped, tokens) for tokens in begun])
    assert [said(output) for output in outputs] == 4 * [said(want)]


def test_logprobs_are_those_of_the_new_tokens(engine: Engine) -> None:
    """Those of the tokens before are not known any more, and say so."""
    case = CASES[20]
    params = guided(case, max_tokens=8, logprobs=2)
    params.extra_args = {**params.extra_args, "guidance_logprobs": True}
    (want,) = engine.generate([case.prompt], [params])
    tokens = list(want.outputs[0].token_ids)
    (got,) = engine.generate([case.prompt], [going_on(params, tokens[:3])])
    rows = zip(tokens, got.outputs[0].logprobs, want.outputs[0].logprobs, strict=True)
    for place, (token, row, known) in enumerate(rows):
        if place < 3:
            assert list(row) == [token]
            assert math.isnan(row[token].logprob)
            continue
        assert row.keys() == known.keys()
        assert row[token].logprob == pytest.approx(known[token].logprob, abs=1e-4)
        assert row[token].negatives == pytest.approx(known[token].negatives, abs=1e-4)
    assert math.isnan(got.outputs[0].cumulative_logprob)


def test_the_first_part_of_a_stream_has_what_was_begun(engine: Engine) -> None:
    from vllm.sampling_params import RequestOutputKind

    case = CASES[20]
    params = guided(case, max_tokens=8)
    (want,) = engine.generate([case.prompt], [params])
    tokens = list(want.outputs[0].token_ids)
    params = going_on(params, tokens[:5])
    params.output_kind = RequestOutputKind.DELTA
    core = engine.llm.llm_engine
    core.add_request("streamed", {"prompt_token_ids": list(case.prompt)}, params)
    parts = []
    while core.has_unfinished_requests():
        parts += [output.outputs[0] for output in core.step()]
    engine.assert_idle()
    assert [len(part.token_ids) for part in parts] == [6, 1, 1]
    assert [token for part in parts for token in part.token_ids] == tokens
    assert "".join(part.text for part in parts) == want.outputs[0].text


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begun", "more", "words"),
    [
        ("abc", {}, "must be a list of token ids"),
        ([1, "a"], {}, "must have token ids from 0"),
        ([True], {}, "must have token ids from 0"),
        ([1 << 20], {}, "must have token ids from 0"),
        ([-1], {}, "must have token ids from 0"),
        ([[5], 6], {"n": 2, "temperature": 1.0}, "mixes token ids and lists"),
        ([[5], [6]], {"n": 3, "temperature": 1.0}, "has 2 lists, and the request has n=3"),
        ([5] * 8, {}, "at most 8: the text is complete"),
        ([5, options.EOS], {"ignore_eos": False}, "a token that ends the text"),
        ([5, 9], {"stop_token_ids": [9]}, "a token that ends the text"),
        ([5], {"prompt_logprobs": 1}, "prompt_logprobs"),
        ([5], {"logprobs": -1}, "whole vocabulary"),
    ],
)
def test_what_cannot_go_on_is_refused(
    engine: Engine, begun: Any, more: dict[str, Any], words: str
) -> None:
    params = plain(max_tokens=8, **more, extra_args={FIELD: begun})
    with pytest.raises(ValueError, match=words):
        engine.generate([PROMPTS[0]], [params])


def test_tokens_that_the_grammar_forbids_are_an_error_of_the_request(engine: Engine) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex="[a-f]{6}")
    params = plain(max_tokens=8, ignore_eos=False, structured_outputs=grammar)
    (output,) = engine.generate([PROMPTS[0]], [going_on(params, [options.VOWELS[3]])])
    assert output.outputs[0].finish_reason == "error"
    assert "do not follow its grammar" in str(output.outputs[0].stop_reason)
    assert list(output.outputs[0].token_ids) == []


def test_an_unpatched_frontend_does_not_lose_the_tokens(engine: Engine) -> None:
    """The engine core fails a request that nobody has read, so that it does not begin anew."""
    from vllm import SamplingParams
    from vllm.v1.request import Request as EngineRequest

    scheduler = engine.scheduler
    sampling = SamplingParams(max_tokens=8, extra_args={FIELD: [5]})
    scheduler.add_request(EngineRequest("unread", [5, 6], sampling, None))
    told = [one for _ in range(3) for one in engine.llm.llm_engine.engine_core.get_output().outputs]
    assert [(one.finish_reason.name, one.new_token_ids) for one in told] == [("ERROR", [])]
    assert "were not read by the frontend" in str(told[0].stop_reason)
    engine.assert_idle()
