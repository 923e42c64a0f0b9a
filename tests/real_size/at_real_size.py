"""What the tests at real size share: an engine, the reference, and comparisons."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cfg_core.reference import Generation, guided_generate, next_log_probs
from models.real_size import POSITIONS, SPECIAL, VOCABULARY
from tests.engine.engines import Engine, plain
from tests.support.remembering import Reference

NUM_TOKENS = 12
TIE = 1e-3
"""Where the two best tokens are nearer than this, rounding may decide."""
MODEL = "real-size"
KV_BYTES = 256 << 20
"""A token takes 256 bytes, so this is a million tokens."""


def ids(seed: str, length: int) -> list[int]:
    """Random token ids of the smaller vocabulary, without special ones."""
    rng = random.Random(seed)
    return [rng.randrange(len(SPECIAL), VOCABULARY) for _ in range(length)]


@contextmanager
def started(model_path: Path) -> Iterator[Engine]:
    """An engine with room for everything that the tests of this folder ask for at once."""
    engine = Engine(
        model_path,
        max_model_len=POSITIONS,
        max_num_seqs=160,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=KV_BYTES,
        max_logprobs=20,
    )
    try:
        yield engine
    finally:
        engine.close()


def guided(negative: list[int], scale: float = 1.5, more: Any = None, **options: Any) -> Any:
    """SamplingParams of a guided request. `more`: further fields of `extra_args`."""
    fields = {"guidance_scale": scale, "negative_prompt_token_ids": negative, **(more or {})}
    return plain(**{"max_tokens": NUM_TOKENS, "extra_args": fields, **options})


def assert_same(got: Sequence[int], want: Generation) -> None:
    """Equal up to the first near tie of the reference, which does not come in the first half."""
    same = next((i for i, gap in enumerate(want.gaps) if gap < TIE), len(want.gaps))
    assert list(got[:same]) == want.token_ids[:same]
    assert same > len(want.gaps) // 2


def assert_logprobs_are_right(
    engine: Engine, reference: Reference, prompt: list[int], negative: list[int]
) -> None:
    """`logprobs` 20 with `guidance_logprobs`: all values are the reference's."""
    params = guided(negative, more={"guidance_logprobs": True}, logprobs=20)
    (found,) = engine.generate([prompt], [params])
    output = found.outputs[0]
    want = guided_generate(
        reference, prompt, negative, scale=1.5, max_new_tokens=NUM_TOKENS, keep_log_probs=True
    )
    assert_same(output.token_ids, want)
    for number, (row, blend) in enumerate(zip(output.logprobs, want.log_probs, strict=True)):
        token, before = output.token_ids[number], output.token_ids[:number]
        alone = [
            next_log_probs(reference, [*start, *before], torch.float32)
            for start in (prompt, negative)
        ]
        assert_values(row, blend)
        values = [row[token].conditional, *row[token].negatives]
        assert values == pytest.approx([float(stream[token]) for stream in alone], abs=TIE)
        for ranking, stream in zip(row[token].rankings, alone, strict=True):
            assert_values(ranking, stream)


def assert_values(row: dict[int, Any], exact: Tensor) -> None:
    """The 20 highest values, and each that of its token."""
    values = {token: entry.logprob for token, entry in row.items()}
    assert values == pytest.approx({token: float(exact[token]) for token in row}, abs=TIE)
    assert sorted(values.values())[-20:] == pytest.approx(
        sorted(exact.topk(20).values.tolist()), abs=TIE
    )
