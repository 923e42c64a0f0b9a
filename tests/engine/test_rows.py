"""Where the joint groups' rows are: staged once, without waiting for the device.

Tensors of the device `meta` have a shape and no values, so whatever needs a value fails on them, as
`.item()`, `nonzero` and `.cpu()` do. So nothing here can make the host wait for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from cfg_core.vllm_plugin.wire import JointRow
from cfg_core.vllm_plugin.worker import compact
from cfg_core.vllm_plugin.worker import rows as rows_module
from cfg_core.vllm_plugin.worker.head import merge
from cfg_core.vllm_plugin.worker.rows import Rows, Stager, blended, kept_rows, widen

HIDDEN, VOCABULARY = 16, 50
DEVICE = torch.device("meta")
NAMES = ["a+", "x", "a-", "b+", "b-"]
JOINT = (
    JointRow(("a+", "a-"), (1.5, -0.5)),
    JointRow(("b+", "b-"), (3.0, -2.0), logprobs=True, needs_rows=True),
)
FIRST_ROW = np.arange(6)


@pytest.fixture(autouse=True)
def _copies_reach_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM replaces its copy by one that stays on the CPU, in processes that run V2 there."""

    def copy(values: np.ndarray, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    monkeypatch.setattr(rows_module, "async_tensor_h2d", copy)


class Copies(TorchDispatchMode):
    """Counts the copies from the host to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device == DEVICE:
            self.num += any(isinstance(x, torch.Tensor) and x.device != DEVICE for x in args)
        return result


@contextmanager
def copies(expected: Callable[[int], bool]) -> Iterator[None]:
    with Copies() as counted:
        yield
    assert expected(counted.num), counted.num


def staged(stager: Stager, joint: tuple[JointRow, ...] = JOINT, **changes: Any) -> Rows:
    arguments = {"names": NAMES, "first_row": FIRST_ROW, "device": DEVICE, "affine": True}
    rows = stager.stage(joint, **(arguments | changes))
    assert rows is not None
    return rows


def metadata(**fields: Any) -> SamplingMetadata:
    """Of five requests that are sampled at temperature 1 with top-p."""
    ones = torch.ones(len(NAMES), device=DEVICE)
    values: dict[str, Any] = {
        "temperature": ones,
        "all_greedy": False,
        "all_random": True,
        "top_p": ones,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": ones,
        "presence_penalties": ones,
        "repetition_penalties": ones,
        "output_token_ids": [],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": SimpleNamespace(all=[]),
    }
    return SamplingMetadata(**(values | fields))


def batch(full: SamplingMetadata) -> Any:
    return SimpleNamespace(
        sampling_metadata=full, req_ids=NAMES, random_reqs=set(NAMES), num_reqs=len(NAMES)
    )


def test_nothing_waits_for_the_device() -> None:
    rows = staged(Stager())
    assert rows.merged is not None
    assert rows.late is not None
    hidden = torch.empty(len(NAMES), HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    logits = merge(hidden, rows.merged) @ torch.empty(
        HIDDEN, VOCABULARY, dtype=torch.bfloat16, device=DEVICE
    )
    logits = logits[rows.merged.source]
    kept = kept_rows(logits, rows)
    assert kept is not None
    out = blended(logits, rows)
    assert (out.shape, out.dtype) == ((len(NAMES), VOCABULARY), torch.float32)
    tokens = torch.empty(len(NAMES), 1, dtype=torch.int32, device=DEVICE)
    rows.copy_to_followers(tokens)
    made = compact.compacted(batch(metadata()), rows.leading, rows.leading_index)
    assert made.top_p is not None
    assert made.top_p.shape == (3,)
    sampled = SamplerOutput(
        sampled_token_ids=tokens[rows.leading_index],
        logprobs_tensors=LogprobsTensors(
            *(torch.empty(3, 2, device=DEVICE) for _ in range(2)), torch.empty(3, device=DEVICE)
        ),
    )
    whole = compact.spread(sampled, rows.leading_index, len(NAMES))
    assert rows.asked is not None
    wide = widen(whole.logprobs_tensors, kept, tokens[rows.asked.places, 0], rows.asked.places)
    assert wide.logprobs.shape == (len(NAMES), 4)


def test_a_steady_step_copies_nothing_to_the_device() -> None:
    stager = Stager()
    whole = batch(metadata())
    with copies(lambda num: num > 5):
        rows = staged(stager)
        made = compact.leaders_metadata(whole, rows)
    with copies(lambda num: num == 0):
        # from another process, the same groups come as other objects
        assert staged(stager, tuple(replace(group) for group in JOINT), names=list(NAMES)) is rows
        assert compact.leaders_metadata(whole, rows) is made


@pytest.mark.parametrize(
    "changes",
    [
        {"joint": JOINT[:1]},
        {"joint": (JOINT[0], replace(JOINT[1], weights=(2.0, -1.0)))},
        {"joint": (JOINT[0], replace(JOINT[1], logprobs=False))},
        {"joint": (JOINT[0], replace(JOINT[1], needs_rows=False))},
        {"names": ["x", "a+", "a-", "b+", "b-"]},
        {"names": [*NAMES, "y"], "first_row": np.arange(7)},
        {"first_row": np.array([0, 2, 3, 5, 6, 7])},  # "a+" and "a-" have a draft each
        {"affine": False},
    ],
)
def test_rows_are_staged_again_when_anything_moves(changes: dict[str, Any]) -> None:
    stager = Stager()
    first = staged(stager)
    second = staged(stager, **changes)
    assert second is not first
    assert staged(stager, **changes) is second
    expected = staged(Stager(), **changes)
    assert second.leading == expected.leading
    assert second.of_logits.shape == expected.of_logits.shape
    assert staged(stager) is not first


def test_no_groups_have_no_rows() -> None:
    assert Stager().stage((), NAMES, FIRST_ROW, DEVICE) is None


def test_metadata_is_compacted_again_when_the_batch_changes() -> None:
    stager = Stager()
    rows, whole = staged(stager), batch(metadata())
    made = compact.leaders_metadata(whole, rows)
    whole.sampling_metadata = metadata()
    second = compact.leaders_metadata(whole, rows)
    assert second is not made
    other = compact.leaders_metadata(whole, staged(stager, joint=JOINT[:1]))
    assert other is not second
    assert other.top_p is not None
    assert other.top_p.shape == (4,)


def test_metadata_with_seeds_is_never_kept() -> None:
    """A generator may be withheld for one step, while vLLM's metadata stays the same object."""
    rows = staged(Stager())
    generator = torch.Generator()
    whole = batch(metadata(generators={3: generator}))
    assert compact.leaders_metadata(whole, rows).generators == {2: generator}
    whole.sampling_metadata.generators.clear()
    assert compact.leaders_metadata(whole, rows).generators == {}
    whole.sampling_metadata.generators[0] = generator
    assert compact.leaders_metadata(whole, rows).generators == {0: generator}
