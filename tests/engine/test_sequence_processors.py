"""Logits processors per sequence on a real engine.

Each has the right state at every token. A failure ends only its own request. `witness` (witness.py)
forbids tokens depending on all tokens before; the reference loop does the same.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cfg_core.errors import ConfigError
from tests.engine import witness
from tests.engine.engines import ASYNC, TIGHT, Engine, differences, guided, plain, tokens
from tests.engine.oracle import CASES, PAIRS, PROMPTS, Case, Oracle, rounding
from tests.engine.tiny_models import EOS

pytestmark = pytest.mark.slow
IS_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
TOKENS = 6 if IS_V2 else 16
SAMPLE = CASES[::12] if IS_V2 else CASES[::5]
STORM = int(os.environ.get("CFG_SERVE_STORM", "12" if IS_V2 else "150"))
"""Number of requests of the storm test.

For a long run with 1,000: `CFG_SERVE_STORM=1000 pytest THIS_FILE -k storm`.
"""


WITH_DRAFTS = pytest.param(3, id="draft model", marks=pytest.mark.v2)


@pytest.fixture(scope="module", params=[pytest.param(0, id="no drafts"), WITH_DRAFTS])
def engine(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    options: dict[str, Any] = dict(TIGHT)
    folder = model_folder("llama")
    if request.param:
        drafter = {
            "method": "draft_model",
            "model": str(folder),
            "num_speculative_tokens": request.param,
        }
        options |= {"speculative_config": drafter}
    engine = Engine(folder, logits_processors=witness.CONFIG, **options)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def all_closed_once(engine: Engine) -> Iterator[None]:
    """Every instance that a test makes is closed exactly once.

    That has happened when the engine has processed the end of its request.
    """
    witness.WITNESSES.clear()
    yield
    engine.generate([PROMPTS[0]], [plain(max_tokens=1)])
    engine.llm.llm_engine.step()
    assert [w.closed for w in witness.WITNESSES] == [1] * len(witness.WITNESSES)


def watched(
    case: Case | None = None, *, options: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    """Parameters of a request with a witness, guided as `case` says."""
    options = {"max_tokens": TOKENS, **(options or {})}
    params = plain(**options) if case is None else guided(case, **options)
    params.extra_args = {**(params.extra_args or {}), **witness.asked(**arguments)}
    return params


@pytest.fixture(scope="module")
def want(llama: Oracle) -> list[list[int]]:
    """The expected texts: SAMPLE with a witness, then PROMPTS with one and without guidance."""
    cases = [*SAMPLE, *(Case(prompt, prompt[-1:], 1.0) for prompt in PROMPTS[:3])]
    texts = [
        llama.reference(c, processors=[witness.reference], max_new_tokens=TOKENS) for c in cases
    ]
    assert min(text.min_gap / rounding(c.scale) for text, c in zip(texts, cases, strict=True)) > 2
    return [text.token_ids for text in texts]


def test_the_state_is_that_of_the_sequence_at_every_token(
    engine: Engine, llama: Oracle, want: list[list[int]]
) -> None:
    """Guided and plain requests, with and without a witness, run in one batch.

    It is preempted and chunked.
    """
    prompts = [*(c.prompt for c in SAMPLE), *PROMPTS[:3], *PROMPTS[3:5]]
    params = [
        *(watched(c) for c in SAMPLE),
        *(watched() for _ in range(3)),
        *(plain(max_tokens=TOKENS),) * 2,
    ]
    got = tokens(engine.generate(prompts, params))
    assert differences(got, [*want, *(text[:TOKENS] for text in llama.plain[3:5])]) == []
    assert len(witness.WITNESSES) >= len(want)
    assert [text for text in want if text in [t[:TOKENS] for t in llama.guided]] == []


def test_a_failure_on_a_row_that_is_taken_back_is_not_lost(engine: Engine) -> None:
    """A prompt of one token runs before its negative is ready.

    The sample of that step is dropped. The next one must fail.
    """
    case = Case(PAIRS[3][0], PAIRS[3][1], 1.5)
    assert len(case.prompt) == 1
    before = engine.stats()["solo_rows"]
    (output,) = engine.generate([case.prompt], [watched(case, fail_at=0)])
    assert (output.outputs[0].finish_reason, list(output.outputs[0].token_ids)) == ("error", [])
    assert engine.stats()["solo_rows"] > before


@pytest.mark.slow_on_v2
@pytest.mark.parametrize("at", [0, 1, 4])
def test_one_that_raises_ends_its_own_request_only(
    engine: Engine, want: list[list[int]], at: int
) -> None:
    """The tokens that were sampled before are in the answer.

    The reason of the failure is in vLLM's field `stop_reason`.
    """
    params = [watched(c, fail_at=at if i == 1 else -1) for i, c in enumerate(SAMPLE)]
    outputs = engine.generate([c.prompt for c in SAMPLE], params)
    bad = outputs.pop(1).outputs[0]
    assert (bad.finish_reason, list(bad.token_ids)) == ("error", want[1][: len(bad.token_ids)])
    assert len(bad.token_ids) <= at
    assert f"'witness' raised RuntimeError: on purpose, at {at}" in str(bad.stop_reason)
    assert differences(tokens(outputs), [want[0], *want[2 : len(SAMPLE)]]) == []


def test_each_of_several_samples_has_its_own(engine: Engine) -> None:
    """With n = 4, each sequence's witness saw that sequence.

    It may lack the tokens of the last step.
    """
    options = {"n": 4, "temperature": 1.0, "top_k": 20, "seed": 5}
    prompts = [c.prompt for c in SAMPLE[:3]]
    outputs = engine.generate(
        prompts, [watched(c, options=options, tag=i) for i, c in enumerate(SAMPLE[:3])]
    )
    for tag, output in enumerate(outputs):
        texts = [list(o.token_ids) for o in output.outputs]
        assert len(texts) == 4
        assert len({tuple(t) for t in texts}) > 1
        check_seen(tag, texts)


def check_seen(tag: int, texts: list[list[int]]) -> None:
    """Each text has a witness that got its tokens, and whose rules it follows.

    The witness may not have got the tokens of the last step. With async scheduling, it may have got
    more: what a step sampled after the end.
    """
    seen = [w.seen for w in witness.WITNESSES if w.tag == tag]
    for text in texts:
        assert any(
            len(s) >= len(text) - 4 and all(a == b for a, b in zip(s, text, strict=False))
            for s in seen
        ), (
            text,
            seen,
        )
        for i, token in enumerate(text):
            assert witness.permits(text[:i], token)


@pytest.mark.slow_on_v2
def test_storm(engine: Engine) -> None:
    """Requests arrive at random in a tiny pool.

    They are guided and plain, with n = 1 and 4. Some are aborted, and some fail.
    """
    rng, llm = random.Random(1), engine.llm.llm_engine
    before = engine.stats()["group_preemptions"]
    pending = list(range(STORM))
    alive, aborted, failing, done = set(), set(), set(), {}
    while pending or llm.has_unfinished_requests():
        if pending and rng.random() < 0.6:
            tag = pending.pop()
            case = rng.choice(CASES)
            options = {"n": rng.choice([1, 1, 1, 4]), "temperature": 1.0, "seed": tag}
            fail_at = rng.randrange(TOKENS) if rng.random() < 0.1 else -1
            failing |= {str(tag)} if fail_at >= 0 else set()
            params = watched(
                case if rng.random() < 0.7 else None, options=options, tag=tag, fail_at=fail_at
            )
            llm.add_request(str(tag), {"prompt_token_ids": list(case.prompt)}, params)
            alive.add(str(tag))
        if alive and rng.random() < 0.08:
            gone = rng.choice(sorted(alive))
            llm.abort_request([gone])
            alive.discard(gone)
            aborted.add(gone)
        for output in llm.step():
            if output.finished:
                done[output.request_id] = output
                alive.discard(output.request_id)
    llm.step()
    engine.assert_idle()
    assert set(done) == {str(tag) for tag in range(STORM)} - aborted
    for name, output in done.items():
        reasons = {o.finish_reason for o in output.outputs}
        assert reasons <= ({"error", "length"} if name in failing else {"length"})
        check_seen(
            int(name), [list(o.token_ids) for o in output.outputs if o.finish_reason == "length"]
        )
    assert any(o.outputs[0].finish_reason == "error" for o in done.values())
    assert aborted
    assert IS_V2 or engine.stats()["group_preemptions"] > before


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "witness", "tagg": 1}, "unexpected keyword argument 'tagg'"),
        ({"name": "whitness"}, "did you mean `witness`"),
        ({"name": "no_repeat_ngram", "n": -1}, "at least 1"),
    ],
)
def test_bad_arguments_are_refused(engine: Engine, entry: dict[str, Any], words: str) -> None:
    params = plain(extra_args={"logits_processors": [entry]})
    with pytest.raises(ValueError, match=words):
        engine.generate([PROMPTS[0]], [params])


def test_the_shipped_processors(engine: Engine) -> None:
    """The engine's own tokenizer is used: each byte is one token."""
    case = SAMPLE[3]
    shipped = [
        {"name": "no_repeat_ngram", "n": 1},
        {"name": "vocabulary_gate", "characters": "a-z "},
        {"name": "section_budget", "max_tokens": 3, "end": "zq"},
    ]
    params = guided(case, max_tokens=TOKENS)
    params.extra_args["logits_processors"] = shipped
    (ids,) = tokens(engine.generate([case.prompt], [params]))
    assert len(set(ids)) == len(ids) == TOKENS
    decode = engine.llm.get_tokenizer().decode
    assert set(decode([i for i in ids if i != EOS])) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert "zq" in decode(ids[:5])


def test_an_engine_with_a_factory_that_cannot_be_loaded_does_not_start(
    model_folder: Callable[[str], Path],
) -> None:
    from cfg_core.vllm_plugin import guided_engine_args

    with pytest.raises(ConfigError, match="dotted path"):
        guided_engine_args(logits_processors={"x": "nothing"})


def test_the_engine_uses_the_requested_path(engine: Engine) -> None:
    """This module also runs in a process whose engines use the path of GPUs (test_paths.py)."""
    config = engine.llm.llm_engine.vllm_config
    assert config.use_v2_model_runner == IS_V2
    assert config.scheduler_config.async_scheduling == (os.environ.get(ASYNC) == "1")
