"""One long text takes memory in proportion to its length, not to its square."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from cfg_core.prefill_only import Engine
from tests.encoders import tiny_checkpoints as tiny


def square(tokens: int) -> int:
    """Bytes of the scores of one head, or of a mask in float32. The models have four heads."""
    return 4 * tokens * tokens


def resident(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes: what it has now, and its most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"the kernel does not tell {field}")


@contextlib.contextmanager
def peak_above_start() -> Iterator[list[int]]:
    """A list with the most bytes that the process took beyond those at the start.

    The kernel keeps the peak. A thread that looks at the size now and then misses it where the
    machine is busy.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size again
    start, most = resident("VmRSS"), [0]
    yield most
    most[0] = resident("VmHWM") - start


def taken(folder: Path, case: str, attention: str, tokens: int) -> int:
    """Bytes that a text takes in two layers, of which one has a window if the type has any."""
    torch.manual_seed(7)
    config = tiny.config_of(case, max_position_embeddings=tokens + 2, num_hidden_layers=2)
    path = tiny.save(folder, transformers.AutoModel.from_config(config))
    options = {"max_input_tokens": tokens, "workflow": {"attention": attention}}
    with Engine.load(path, dtype="float32", **options) as engine:
        engine.embed(["waa " * 30])
        with peak_above_start() as most:
            engine.run([[5 + i % 50 for i in range(tokens)]], engine.options("embed"))
    return most[0]


@pytest.mark.parametrize("case", ["modernbert", "bert", "qwen3-window"])
def test_a_long_text_takes_less_than_one_square(tmp_path, case):
    assert taken(tmp_path, case, "sdpa_runs", 4096) < square(4096)


def test_the_measurement_sees_squares(tmp_path):
    """The reference computes all scores at once."""
    assert taken(tmp_path, "modernbert", "naive", 2048) > 4 * square(2048)
