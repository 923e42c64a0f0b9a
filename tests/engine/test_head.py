"""The blend before the head, and sampling without the followers' rows.

When they are used, and that texts do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cfg_core.logits_processors.config import FIELD as PROCESSORS
from cfg_core.vllm_plugin.worker import v1
from cfg_core.vllm_plugin.worker.head import has_soft_cap, is_affine
from tests.engine.engines import ROOMY, Engine, differences, guided, plain, tokens
from tests.engine.oracle import CASES, PROMPTS, Oracle

HIDDEN, VOCABULARY = 64, 300
WEIGHT = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.05
BIAS = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2))
HEADS: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "linear": (lambda h: h @ WEIGHT.to(h.dtype).T, True),
    "biased": (lambda h: h @ WEIGHT.to(h.dtype).T + BIAS.to(h.dtype), True),
    "scaled": (lambda h: 0.1 * (h @ WEIGHT.to(h.dtype).T), True),
    "soft cap": (lambda h: 30 * torch.tanh(h @ WEIGHT.to(h.dtype).T / 30), False),
    "normalised": (lambda h: torch.nn.functional.normalize(h.float(), dim=-1) @ WEIGHT.T, False),
    "forbidden tokens": (
        lambda h: (h @ WEIGHT.to(h.dtype).T).index_fill(1, torch.tensor([7]), -torch.inf),
        False,
    ),
    "no logits here": (lambda h: None, False),
    "no weights": (lambda h: torch.zeros(len(h), VOCABULARY), False),
    "lowest number for a mask": (
        lambda h: (h @ WEIGHT.to(h.dtype).T).float().index_fill(1, torch.tensor([7]), -1e35),
        False,
    ),
    "another width": (lambda h: h @ torch.zeros(HIDDEN + 1, VOCABULARY), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HEADS)
def test_affine_heads_are_found(name: str, dtype: torch.dtype) -> None:
    compute_logits, expected = HEADS[name]
    assert is_affine(compute_logits, HIDDEN, dtype, torch.device("cpu")) is expected


def test_a_soft_cap_is_found_though_small_weights_hide_it() -> None:
    """A LogitsProcessor has it as an attribute."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert not has_soft_cap(model)
    model[1].soft_cap = 30.0
    assert has_soft_cap(model)


def test_the_whole_batch_is_updated_before_it_is_compacted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With async scheduling, vLLM writes sampled tokens into the metadata of the whole batch."""
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    batch, seen = runner.input_batch, []
    update = batch.update_async_output_token_ids

    def check() -> None:
        seen.append(len(batch.sampling_metadata.output_token_ids) == batch.num_reqs)
        update()

    with monkeypatch.context() as patch:
        patch.setattr(batch, "update_async_output_token_ids", check)
        engine.guide(CASES[:2], max_tokens=4, presence_penalty=0.5)
    assert seen
    assert all(seen)


@pytest.fixture(scope="module")
def engine(model_folder: Any) -> Iterator[Engine]:
    engine = Engine(model_folder("llama"), **ROOMY)
    yield engine
    engine.close()


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Counts calls: blends before the head, rows of late blends, and compact samples."""
    counts = {"merge": 0, "late": 0, "compact": 0}
    merge, blended, compacted = v1.merge, v1.blended, v1.leaders_metadata

    def count_merge(*args: Any) -> Any:
        counts["merge"] += 1
        return merge(*args)

    def count_late(logits: Any, rows: Any) -> Any:
        counts["late"] += bool(rows.logit_blends)
        return blended(logits, rows)

    def count_compact(*args: Any) -> Any:
        counts["compact"] += 1
        return compacted(*args)

    with monkeypatch.context() as patch:
        patch.setattr(v1, "merge", count_merge)
        patch.setattr(v1, "blended", count_late)
        patch.setattr(v1, "leaders_metadata", count_compact)
        yield counts


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "greedy": ({}, "merge"),
    "sampled": ({"temperature": 0.8, "top_p": 0.9, "seed": 3}, "merge"),
    "additive penalties": ({"presence_penalty": 0.5, "frequency_penalty": 0.2}, "merge"),
    "logprobs": ({"logprobs": 3}, "merge"),
    "repetition penalty": ({"repetition_penalty": 1.2}, "late"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_where_groups_are_blended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options, where = OPTIONS[name]
    with counted(monkeypatch) as counts:
        engine.guide(CASES[:3], max_tokens=4, **options)
    assert counts["compact"] > 0
    assert counts[where] > 0
    assert counts["merge" if where == "late" else "late"] == 0


def test_stream_logprobs_and_processors_are_blended_late() -> None:
    from cfg_core.vllm_plugin.core.followers import reads_values

    assert reads_values(plain(extra_args={PROCESSORS: [{"name": "x"}]}))
    assert not reads_values(plain(presence_penalty=1.0, min_p=0.1))


def test_early_and_late_groups_in_one_batch(engine: Engine, llama: Oracle) -> None:
    """Every second group asks for its streams' log-probabilities, and keeps its text."""
    params = [
        guided(
            case,
            logprobs=0,
            extra_args={
                "guidance_scale": case.scale,
                "negative_prompt_token_ids": list(case.negative),
                "guidance_logprobs": i % 2 == 0,
            },
        )
        for i, case in enumerate(CASES)
    ]
    outputs = engine.generate([case.prompt for case in CASES], params)
    assert differences(tokens(outputs), llama.guided) == []


def test_a_seeded_text_does_not_depend_on_the_batch(engine: Engine) -> None:
    """`min_p` and `logit_bias` of other requests keep followers in the batch."""
    mates: tuple[dict[str, Any], ...] = (
        {},
        {"min_p": 0.1, "temperature": 1.0},
        {"logit_bias": {9: 2.0}},
        {"bad_words": None, "repetition_penalty": 1.3},
    )
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 11, "max_tokens": 8}
    wanted = None
    for mate in mates:
        prompts = [PROMPTS[0], CASES[7].prompt, PROMPTS[2]]
        params = [plain(max_tokens=8, **mate), guided(CASES[7], **options), plain(max_tokens=8)]
        got = tokens(engine.generate(prompts, params))[1]
        wanted = wanted or got
        assert got == wanted, mate
