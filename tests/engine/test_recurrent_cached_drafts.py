"""Speculation of a model with recurrent state and prefix caching, which is vLLM's default for it.

The texts cross the end of a block while they are drafted, at several places of a run of drafts, and
take their states along. The second turn of a conversation begins with the state of the first one.
Each token is looked at as in test_recurrent_drafts.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from cfg_core.vllm_plugin.worker import cpu_faults
from tests.engine import prophet
from tests.engine.chosen import chosen
from tests.engine.engines import ROOMY, Engine, guided, plain, tokens
from tests.engine.oracle import Case, random_ids
from tests.engine.test_recurrent_drafts import HEAD, IN_CI, SPECULATION, WRONG_EVERY, with_head
from tools.architectures.checks import MOST_INEXACT, Bench
from tools.architectures.reference_model import NEW_TOKENS
from tools.architectures.sizes import write_config, write_tokenizer
from tools.architectures.stock_oracle import Verdict, verify

pytestmark = pytest.mark.slow

BLOCK = 128
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 256}
"""vLLM makes a block of attention as large as a state, so a block has BLOCK tokens."""
CACHED = {"prefix_cache_retention_interval": BLOCK}
"""By default, vLLM keeps the state of the last block of a prompt alone, and none of a text."""
LENGTHS = [(121, 60), (124, 125), (127, 120), (270, 260)]
"""Of prompts and negatives."""
PLAIN = [122, 126]
FEWEST_HITS = 2
"""Streams of the second turn. vLLM does not keep the state of a block that ends within a run of
drafts, and with a head it reads one block less. The two longest streams hit in any case."""

_rng = random.Random(11)
FIRST = [
    *(
        Case(random_ids(_rng, a), random_ids(_rng, b), 1.5 + i % 2)
        for i, (a, b) in enumerate(LENGTHS)
    ),
    *(Case(prompt := random_ids(_rng, length), prompt[:1], 1.0) for length in PLAIN),
]
"""The last ones are plain: at scale 1, the negative has no weight."""

Texts = list[tuple[int, ...]]


def answers(engine: Engine, cases: Sequence[Case]) -> Texts:
    params = [
        guided(case, max_tokens=NEW_TOKENS) if case.scale != 1 else plain(max_tokens=NEW_TOKENS)
        for case in cases
    ]
    return [tuple(text) for text in tokens(engine.generate([c.prompt for c in cases], params))]


def second_turn(texts: Texts) -> list[Case]:
    """The conversations go on behind their first texts."""
    more = (5, 6, 7)
    return [
        replace(case, prompt=(*case.prompt, *text, *more), negative=(*case.negative, *text, *more))
        if case.scale != 1
        else replace(case, prompt=(*case.prompt, *text, *more))
        for case, text in zip(FIRST, texts, strict=True)
    ]


@dataclass
class Played:
    """Both turns, with what the second one found in the prefix cache, and the counters."""

    pairs: list[tuple[Case, tuple[int, ...]]]
    hits: int
    stats: dict[str, int]


def play(engine: Engine, second: list[Case]) -> Played:
    first = answers(engine, FIRST)
    with engine.prefix_hits() as hits:
        texts = answers(engine, second)
    pairs = [*zip(FIRST, first, strict=True), *zip(second, texts, strict=True)]
    return Played(pairs, sum(found > 0 for found in hits.values()), engine.stats())


@contextmanager
def states_stay_behind(patches: pytest.MonkeyPatch) -> Iterator[None]:
    """A planted fault: a stream that goes on in the next block does not take its state along."""
    copy_states = cpu_faults.copy_states
    with patches.context() as patch:
        patch.setattr(
            cpu_faults,
            "copy_states",
            lambda context, request, source, target, count: (
                source >= target and copy_states(context, request, source, target, count)
            ),
        )
        yield


@dataclass
class Turns:
    """What was played on each way, and what stock vLLM says of all texts, and of the faulty ones.

    The latter are those that only the planted fault gave.
    """

    played: dict[str, Played]
    verdict: Verdict
    faulty: Verdict


@pytest.fixture(
    scope="module", params=chosen(["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"], IN_CI)
)
def turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Turns:
    row, folder = with_head(request.param), tmp_path_factory.mktemp(request.param)
    options = {"block_size": None, "max_model_len": 512}
    row = replace(row, options=options, sizes={**row.sizes, **SIZES})
    write_config(row, folder)
    write_tokenizer(row, folder)
    bench = Bench(row, folder, None)

    found: dict[str, Played] = {}
    with pytest.MonkeyPatch.context() as patches:
        engine = bench.start(**ROOMY, **CACHED, speculative_config=SPECULATION)
        config = engine.llm.llm_engine.vllm_config.cache_config
        assert config.enable_prefix_caching
        assert config.block_size == BLOCK
        second = second_turn(answers(engine, FIRST))
        known = play(engine, second)  # nothing is drafted
        patches.setattr(prophet, "KNOWN", [[*case.prompt, *text] for case, text in known.pairs])
        patches.setattr(prophet, "WRONG_EVERY", WRONG_EVERY)
        assert engine.llm.reset_prefix_cache()
        found["drafts"] = play(engine, second)
        assert engine.llm.reset_prefix_cache()
        with states_stay_behind(patches):
            faulty = play(engine, second)
        engine.close()
    engine = bench.start(**ROOMY, **CACHED, **HEAD, async_scheduling=True)
    found["own head, async"] = play(engine, second)
    engine.close()

    right = {pair for one in (known, *found.values()) for pair in one.pairs}
    stock = bench.start(guided=False, max_logprobs=-1, **ROOMY, enable_prefix_caching=False)
    verdicts = [
        verify(stock, sorted(pairs, key=str), row.dtype)
        for pairs in (right, set(faulty.pairs) - right)
    ]
    stock.close()
    return Turns(found, *verdicts)


def test_each_token_is_the_one_that_guidance_chooses(turns: Turns) -> None:
    assert turns.verdict.wrong == []
    assert turns.verdict.inexact <= MOST_INEXACT * turns.verdict.tokens


def test_the_second_turns_begin_with_cached_states(turns: Turns) -> None:
    for one in turns.played.values():
        assert one.hits >= FEWEST_HITS
        assert one.stats["recomputed_streams"] == 0


def test_drafts_are_kept_whole_and_in_part(turns: Turns) -> None:
    stats = turns.played["drafts"].stats
    for kind in ("guided", "plain"):
        assert stats[f"{kind}_drafts"] > stats[f"{kind}_drafts_accepted"] > 0
        assert stats[f"{kind}_drafts_accepted_at_2"] > 0


def test_a_state_of_another_place_is_noticed(turns: Turns) -> None:
    assert turns.faulty.wrong
