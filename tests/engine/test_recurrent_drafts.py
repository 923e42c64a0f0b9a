"""Speculation of a model with recurrent state: each guided token is the one that guidance chooses.

Gated delta nets are the only such layers that vLLM's CPU build can run with drafts, in bfloat16.
So rounding decides now and then, and texts are not compared. Stock vLLM without drafts looks at
each token instead (tools/architectures/stock_oracle.py).

The drafter is a prophet that errs at every fifth place, so that runs of drafts are kept whole, in
part, and not at all. A stream that went on from the state of another token would be far off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.engine import prophet
from tests.engine.chosen import chosen
from tests.engine.engines import (
    ROOMY,
    Engine,
    guided,
    import_model,
    plain,
    tight_for_groups,
    tokens,
)
from tests.engine.oracle import Case
from tests.engine.tiny_vision import use_stand_in
from tools.architectures.checks import AS_CASES, MOST_INEXACT, Bench
from tools.architectures.recurrent import GATED_DELTA
from tools.architectures.reference_model import NEW_TOKENS, SOME_CASES, SOME_PROMPTS
from tools.architectures.rows import Row
from tools.architectures.sizes import write_config, write_tokenizer
from tools.architectures.stock_oracle import Verdict, verify
from tools.architectures.table import ROWS

pytestmark = pytest.mark.slow

DRAFTS = 3
WRONG_EVERY = 5
SPECULATION = {
    "method": "custom_class",
    "model": "tests.engine.prophet.Prophet",
    "num_speculative_tokens": DRAFTS,
}
PROMPTS = [*(case.prompt for case in SOME_CASES), *SOME_PROMPTS]
MIXED = [*SOME_CASES, *AS_CASES]
"""Guided requests, and plain ones in the same words."""


@dataclass
class Played:
    """What an engine with drafts has answered to MIXED, and its counters at the end."""

    texts: list[list[int]]
    stats: dict[str, int]
    verdict: Verdict | None = field(default=None)

    @property
    def pairs(self) -> list[tuple[Case, tuple[int, ...]]]:
        return [(case, tuple(text)) for case, text in zip(MIXED, self.texts, strict=True)]


def answers(engine: Engine) -> list[list[int]]:
    params = [guided(case, max_tokens=NEW_TOKENS) for case in SOME_CASES]
    params += [plain(max_tokens=NEW_TOKENS)] * len(SOME_PROMPTS)
    return tokens(engine.generate(PROMPTS, params))


@contextmanager
def followers_count_one(engine: Engine) -> Iterator[None]:
    """A planted fault: followers go on from the state of their first token of a step."""
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    update = runner._update_states_after_model_execute

    def count_less(sampled: Any, scheduler_output: Any) -> None:
        rows = runner.guidance.rows
        if rows is not None:
            sampled = sampled.clone()
            places = range(len(sampled))
            followers = [i for i in places if rows.leader_place[i] != i]
            sampled[followers, 1:] = -1
        update(sampled, scheduler_output)

    runner._update_states_after_model_execute = count_less
    try:
        yield
    finally:
        del runner._update_states_after_model_execute


HEAD = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
"""The checkpoint's head, with random weights: hardly a draft of it is kept."""

ONE_LAYER = {"mtp_num_hidden_layers": 1}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3NextForCausalLM": ("Qwen3NextMTP", {}),
    "Qwen3_5ForCausalLM": ("Qwen3_5MTP", ONE_LAYER),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeMTP", ONE_LAYER),
    "Qwen3_5ForConditionalGeneration": (
        "Qwen3_5MTP",
        {"text_config": {**GATED_DELTA, "dtype": "bfloat16", **ONE_LAYER}},
    ),
}
"""Architectures, those of their heads, and the fields of the configuration that ask for a head."""

IN_CI = {"Qwen3NextForCausalLM"}

Setting = Callable[[Engine], AbstractContextManager[None]]


def as_it_is(_engine: Engine) -> AbstractContextManager[None]:
    return nullcontext()


SETTINGS: dict[str, tuple[dict[str, Any], Setting]] = {
    "one batch": (ROOMY, as_it_is),
    "own head, async": (ROOMY | HEAD | {"async_scheduling": True}, as_it_is),
    "chunked": (tight_for_groups(DRAFTS) | {"num_gpu_blocks_override": 64}, as_it_is),
    "recomputed": (
        tight_for_groups(DRAFTS) | {"num_gpu_blocks_override": 64},
        Engine.planned_wrongly,
    ),
    "planted fault": (ROOMY, followers_count_one),
}


def with_head(label: str) -> Row:
    """The row of an architecture, whose model has a head that this process can import."""
    use_stand_in()  # the modules of Qwen3.5 import those that see
    head, fields = HEADS[label]
    import_model(head)
    row = next(row for row in ROWS if row.label == label)
    return replace(row, sizes={**row.sizes, **fields})


@pytest.fixture(scope="module", params=chosen(list(HEADS), IN_CI))
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Played]:
    """All engines, one after the other: those of one process share their groups of workers."""
    row, folder = with_head(request.param), tmp_path_factory.mktemp(request.param)
    write_config(row, folder)
    write_tokenizer(row, folder)
    bench = Bench(row, folder, None)
    engine = bench.start(**ROOMY)
    known = answers(engine)
    engine.close()
    with pytest.MonkeyPatch.context() as patches:
        whole = [[*prompt, *text] for prompt, text in zip(PROMPTS, known, strict=True)]
        patches.setattr(prophet, "KNOWN", whole)
        patches.setattr(prophet, "WRONG_EVERY", WRONG_EVERY)
        found = {name: play(bench, *setting) for name, setting in SETTINGS.items()}
    stock = bench.start(guided=False, max_logprobs=-1, **ROOMY)
    for one in found.values():
        one.verdict = verify(stock, one.pairs, row.dtype)
    stock.close()
    return found


def play(bench: Bench, options: dict[str, Any], setting: Setting) -> Played:
    engine = bench.start(**{"speculative_config": SPECULATION, **options})
    try:
        with setting(engine):
            return Played(answers(engine), engine.stats())
    finally:
        engine.close()


RIGHT = [name for name in SETTINGS if name != "planted fault"]


@pytest.mark.parametrize("name", RIGHT)
def test_each_token_is_the_one_that_guidance_chooses(played: dict[str, Played], name: str) -> None:
    one = played[name]
    assert one.verdict is not None
    assert one.verdict.wrong == []
    assert one.verdict.inexact <= MOST_INEXACT * one.verdict.tokens
    for kind in ("guided", "plain") if "own head" not in name else ():
        assert one.stats[f"{kind}_drafts"] > one.stats[f"{kind}_drafts_accepted"] > 0
        assert one.stats[f"{kind}_drafts_accepted_at_{DRAFTS - 1}"] > 0, "some runs are kept whole"


def test_what_was_sampled_alone_is_computed_again(played: dict[str, Played]) -> None:
    recomputed = {name: one.stats["recomputed_streams"] for name, one in played.items()}
    assert recomputed.pop("recomputed") > 0
    assert set(recomputed.values()) == {0}


def test_the_state_of_another_token_is_noticed(played: dict[str, Played]) -> None:
    verdict = played["planted fault"].verdict
    assert verdict is not None
    assert len(verdict.wrong) > len(SOME_CASES) // 2
