"""Groups that end early, wait, or are preempted.

Nothing is left behind, and the other requests give the right tokens. In the one engine of these
tests everything is scarce: 16 tokens a step, 15 blocks of KV cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.engines import TIGHT, Engine, differences, guided, plain
from tests.engine.oracle import CASES, PROMPTS, Oracle

TOKENS = 8


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    engine = Engine(model_folder("llama"), **TIGHT)
    yield engine
    engine.close()


def finish(engine: Engine, *, abort: list[str], at_step: int) -> dict[str, list[int]]:
    """Step until nothing is left, and abort some requests before step `at_step`.

    Returns the tokens by request id.
    """
    llm, done, step = engine.llm.llm_engine, {}, 0
    while llm.has_unfinished_requests():
        if step == at_step:
            llm.abort_request(abort)
        for output in llm.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
        assert step < 2000
    llm.step()  # vLLM frees what was aborted last with the next step's bookkeeping
    engine.assert_idle()
    return done


@pytest.mark.parametrize("at_step", [0, 1, 2, 3, 5, 8, 12, 17, 24, 33])
def test_abort_at_any_moment(engine: Engine, llama: Oracle, at_step: int) -> None:
    """Six groups and a plain request run.

    Two groups and the plain request are aborted while they wait, prefill or decode.
    """
    add = engine.llm.llm_engine.add_request
    chosen = [3, 10, 15, 26, 46, 59]
    for i in chosen:
        add(
            f"g{i}-{at_step}",
            {"prompt_token_ids": list(CASES[i].prompt)},
            guided(CASES[i], max_tokens=TOKENS),
        )
    add(f"plain-{at_step}", {"prompt_token_ids": list(PROMPTS[4])}, plain(max_tokens=TOKENS))
    gone = [f"g{chosen[1]}-{at_step}", f"g{chosen[3]}-{at_step}", f"plain-{at_step}"]
    done = finish(engine, abort=gone, at_step=at_step)
    for i in set(chosen) - {chosen[1], chosen[3]}:
        assert done[f"g{i}-{at_step}"] == llama.guided[i][:TOKENS], i


@pytest.mark.slow
def test_random_arrivals_and_aborts(engine: Engine, llama: Oracle) -> None:
    """60 requests, guided and plain, arrive and are aborted at random moments (seeded).

    The texts of the others are right.
    """
    rng = random.Random(0)
    llm, want, done, alive = engine.llm.llm_engine, {}, {}, set()
    aborted: set[str] = set()
    pending = [(f"r{k}", rng.randrange(len(CASES)), rng.random() < 0.7) for k in range(60)]
    steps = 0
    while pending or llm.has_unfinished_requests():
        if pending and rng.random() < 0.3:
            name, i, is_guided = pending.pop()
            prompt = CASES[i].prompt
            params = guided(CASES[i], max_tokens=TOKENS) if is_guided else plain(max_tokens=TOKENS)
            llm.add_request(name, {"prompt_token_ids": list(prompt)}, params)
            want[name] = (llama.guided[i] if is_guided else llama.plain[PROMPTS.index(prompt)])[
                :TOKENS
            ]
            alive.add(name)
        if alive and rng.random() < 0.04:
            name = rng.choice(sorted(alive))
            llm.abort_request([name])
            aborted.add(name)
            alive.discard(name)
        for output in llm.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
                alive.discard(output.request_id)
        steps += 1
        assert steps < 5000
    llm.step()
    engine.assert_idle()
    finished = sorted(set(want) - aborted)
    assert len(finished) >= 30
    assert len(aborted) >= 5
    assert differences([done[name] for name in finished], [want[name] for name in finished]) == []


def test_a_group_that_fills_the_pool_runs(engine: Engine, llama: Oracle) -> None:
    """200 + 200 tokens and 24 more each: 14 of 15 blocks."""
    stream = (PROMPTS[9] + CASES[59].negative)[:200]
    want = llama.hf(stream, scale=2.0, negative=stream[::-1])
    params = plain(
        extra_args={"guidance_scale": 2.0, "negative_prompt_token_ids": list(stream[::-1])}
    )
    assert list(engine.generate([stream], [params])[0].outputs[0].token_ids) == want


def test_a_group_that_can_never_fit_is_refused(engine: Engine, llama: Oracle) -> None:
    """230 + 230 tokens and 24 more each need 16 of 15 blocks.

    The request must not wait forever. Other requests continue.
    """
    stream = [5] * 230
    params = plain(extra_args={"guidance_scale": 2.0, "negative_prompt_token_ids": stream})
    with pytest.raises(ValueError, match="KV pool"):
        engine.llm.generate([{"prompt_token_ids": stream}], [params], use_tqdm=False)
    engine.assert_idle()
    assert engine.guide([CASES[3]]) == [llama.guided[3]]
