"""Where the joint groups' rows are: staged once, without waiting for the device.

Tensors of the device `meta` have a shape and no values, so whatever needs a value fails on them, as
`.item()`, `nonzero` and `.cpu()` do. So nothing here can make the host wait for a device.
"""

from __future__ import annotations

import itertools
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
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.sample.output import SamplerOutput as SamplerOutputV2

from cfg_core.blend import CutRows, cut
from cfg_core.params import Cuts, Rule, Strength
from cfg_core.policy.groups import Group
from cfg_core.vllm_plugin.core.gates import PROBE_WEIGHTS
from cfg_core.vllm_plugin.wire import DROPPED, JointRow, StepGuidance
from cfg_core.vllm_plugin.worker import compact_v1, compact_v2, logit_blends, scoring, staging
from cfg_core.vllm_plugin.worker import rows as rows_module
from cfg_core.vllm_plugin.worker.gates import drop_open, kept_by_v1
from cfg_core.vllm_plugin.worker.head import merge
from cfg_core.vllm_plugin.worker.rows import Rows, blended, widen
from cfg_core.vllm_plugin.worker.staging import Stager
from cfg_core.vllm_plugin.worker.staging import stage as stage_rows

HIDDEN, VOCABULARY = 16, 50
DEVICE = torch.device("meta")
NAMES = ["a+", "x", "a-", "b+", "b-"]


def joint_row(leader: str, follower: str, *weights: float, **options: Any) -> JointRow:
    return JointRow(Group(leader, (follower,), weights, **options), weights)


A, B = joint_row("a+", "a-", 1.5, -0.5), joint_row("b+", "b-", 3.0, -2.0)
RULED = Strength(rule=Rule("adacad", (("offset", 1.0),)), max_kl=0.1, min_entropy=0.5)
JOINT = (A, joint_row("b+", "b-", 3.0, -2.0, logprobs=2, needs_rows=True, strength=RULED))
FIRST_ROW = np.arange(6)


@pytest.fixture(autouse=True)
def _copies_reach_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM replaces its copy by one that stays on the CPU, in processes that run V2 there."""

    def copy(values: np.ndarray, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    monkeypatch.setattr(staging, "async_tensor_h2d", copy)


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
    assert rows.logit_blends
    hidden = torch.empty(len(NAMES), HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    logits = merge(hidden, rows.merged) @ torch.empty(
        HIDDEN, VOCABULARY, dtype=torch.bfloat16, device=DEVICE
    )
    logits = logits[rows.merged.source]
    out, kept, strengths = blended(logits, rows)
    assert kept is not None
    assert strengths is not None
    assert rows.blend_drafts(logits, out).shape == logits.shape
    assert (out.shape, out.dtype) == ((len(NAMES), VOCABULARY), torch.float32)
    tokens = torch.empty(len(NAMES), 1, dtype=torch.int32, device=DEVICE)
    rows.copy_to_followers(tokens)
    made = compact_v1.compacted(batch(metadata()), rows.leading, rows.leading_index)
    assert made.top_p is not None
    assert made.top_p.shape == (3,)
    sampled = SamplerOutput(
        sampled_token_ids=tokens[rows.leading_index],
        logprobs_tensors=LogprobsTensors(
            *(torch.empty(3, 2, device=DEVICE) for _ in range(2)), torch.empty(3, device=DEVICE)
        ),
    )
    whole = compact_v1.spread(sampled, rows.leading_index, len(NAMES))
    assert rows.logprob_rows is not None
    asked_columns = 2 + 2 * (1 + 2)  # divergence and strength, and two streams with two tokens each
    asked = rows.logprob_rows
    wide = widen(whole.logprobs_tensors, kept, tokens[asked.places, 0], asked.places, asked.top)
    assert wide.logprobs.shape == (len(NAMES), 2 + asked_columns)


def test_a_steady_step_copies_nothing_to_the_device() -> None:
    stager = Stager()
    whole = batch(metadata())
    with copies(lambda num: num > 5):
        rows = staged(stager)
        made = compact_v1.leaders_metadata(whole, rows)
    with copies(lambda num: num == 0):
        # from another process, the same groups come as other objects
        others = tuple(row._replace(group=row.group._replace()) for row in JOINT)
        assert staged(stager, others, names=list(NAMES)) is rows
        assert compact_v1.leaders_metadata(whole, rows) is made


@pytest.mark.parametrize(
    "changes",
    [
        {"joint": JOINT[:1]},
        {"joint": (JOINT[0], JOINT[1]._replace(weights=(2.0, -1.0)))},
        {"joint": (JOINT[0], joint_row("b+", "b-", 3.0, -2.0, needs_rows=True))},
        {"joint": (JOINT[0], joint_row("b+", "b-", 3.0, -2.0, logprobs=2))},
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


PROBED = ["a", "p", "q", "b+", "b-"]


def probe(leader: str, min_entropy: float) -> JointRow:
    """A probe of a group with a suffix, a cut, and a rule that would read two rows."""
    strength = replace(RULED, min_entropy=min_entropy)
    options: dict[str, Any] = {"suffix": (5, 6), "strength": strength, "cuts": Cuts(top_k=40)}
    group = Group(leader, (), (1.0, 0.0), needs_rows=True, **options)
    return JointRow(group, PROBE_WEIGHTS, probe=True)


def test_probes_are_their_leaders_own_rows_beside_rows_of_pairs() -> None:
    torch.manual_seed(1)
    cpu = torch.device("cpu")
    logits = torch.randn(len(PROBED), VOCABULARY) * 3
    step = StepGuidance((probe("q", 1e9), JOINT[1], probe("a", 1e-9)), ())
    rows = stage_rows(step.joint, {n: i for i, n in enumerate(PROBED)}, np.arange(6), cpu)
    assert rows is not None
    assert rows.leading == [0, 1, 2, 3]
    out, _, strengths = blended(logits.clone(), rows)
    assert strengths is not None
    cut_row = cut(logits[2:3], logits[2:3].log_softmax(-1), probe_cuts(rows))
    assert torch.equal(out[2], cut_row[0])
    assert strengths[0, [0, 2]].tolist() == [1, 0]
    assert kept_by_v1(step, PROBED, FIRST_ROW, strengths.clone()).none == [0]
    num_sampled, num_rejected = torch.ones(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    drop_open(step, PROBED, FIRST_ROW, strengths, num_sampled, num_rejected)
    assert num_sampled.tolist() == [0, 1, 1, 1, 1]
    assert num_rejected.tolist() == [1, 0, 0, 0, 0]
    assert strengths[0, [0, 2]].tolist() == [DROPPED, 0]


RUNS = {
    "r": ([0, 0, 1, 0], [7, 8, 9, -1], 2),  # three tokens, and the third one's gate is open
    "s": ([0, 0, 1, 0], [7, 8, -1, -1], 2),  # a draft was rejected before that gate
    "t": ([1, 0], [7, 8, -1, -1], 0),
    "u": ([0, 0], [7, 8, -1, -1], 2),
    "v": ([0], [7, -1, -1, -1], 1),
}
"""Probes with up to three drafts: strengths of their rows, what was sampled, how many are kept."""


def test_the_first_open_gate_ends_a_run_of_drafts() -> None:
    gates, sampled, counts = zip(*RUNS.values(), strict=True)
    names, first_row = list(RUNS), np.cumsum([0, *map(len, gates)])
    step = StepGuidance(tuple(probe(name, 0.5) for name in names), ())
    strengths = torch.tensor([*itertools.chain(*gates)]).float().repeat(2, 1)
    tokens, on_v2 = torch.tensor(sampled, dtype=torch.int32), strengths.clone()
    marked = [0, 0, DROPPED, 0, 0, 0, 1, 0, DROPPED, 0, 0, 0, 0]

    kept = kept_by_v1(step, names, first_row, strengths)
    kept.cut(tokens, strengths)
    assert kept.none == [2]
    others = [place for place in range(len(names)) if place not in kept.none]
    assert (tokens >= 0).sum(1)[others].tolist() == [counts[place] for place in others]
    assert strengths[0].tolist() == marked

    num_sampled = torch.tensor([sum(token >= 0 for token in run) for run in sampled])
    num_rejected = torch.zeros_like(num_sampled)
    drop_open(step, names, first_row, on_v2, num_sampled, num_rejected)
    assert num_sampled.tolist() == list(counts)
    assert num_rejected.tolist() == [1, 0, 2, 0, 0]
    assert on_v2[0].tolist() == marked


def test_drafters_have_the_weights_of_pairs_beside_larger_groups_suffixes_and_probes() -> None:
    three = (2.0, -0.5, -0.5)
    larger = JointRow(Group("c", ("c1", "c2"), three), three)
    behind = joint_row("s", "", 3.0, -2.0, suffix=(5,))
    suffixed = JointRow(behind.group._replace(followers=()), (3.0, -2.0))
    names = ["a+", "a-", "c", "c1", "c2", "s", "q", suffixed.blended[1]]
    places = {name: place for place, name in enumerate(names)}
    joint = (A, larger, suffixed, probe("q", 1.0))
    rows = stage_rows(joint, places, np.arange(9), torch.device("cpu"), suffixes=1)
    assert rows is not None
    assert rows.weight.tolist() == [1.5, -0.5, 2.0, -0.5, -0.5, 1.0, 1.0]


def probe_cuts(rows: Rows) -> CutRows:
    (group,) = (group for group in rows.logit_blends if group.probes)
    assert group.cuts is not None
    return group.cuts.part(slice(0, 1))


def test_v2_drops_open_probes_without_waiting_for_the_device() -> None:
    numbers = torch.empty(5, dtype=torch.int32, device=DEVICE)
    strengths = torch.empty(2, 5, device=DEVICE)
    step = StepGuidance((probe("a", 0.5),), ())
    drop_open(step, PROBED, FIRST_ROW, strengths, numbers, numbers.clone())
    drop_open(StepGuidance((A,), ()), NAMES, FIRST_ROW, None, numbers, numbers)


def test_no_groups_have_no_rows() -> None:
    assert Stager().stage((), NAMES, FIRST_ROW, DEVICE) is None


def test_metadata_is_compacted_again_when_the_batch_changes() -> None:
    stager = Stager()
    rows, whole = staged(stager), batch(metadata())
    made = compact_v1.leaders_metadata(whole, rows)
    whole.sampling_metadata = metadata()
    second = compact_v1.leaders_metadata(whole, rows)
    assert second is not made
    other = compact_v1.leaders_metadata(whole, staged(stager, joint=JOINT[:1]))
    assert other is not second
    assert other.top_p is not None
    assert other.top_p.shape == (4,)


def test_metadata_with_seeds_is_never_kept() -> None:
    """A generator may be withheld for one step, while vLLM's metadata stays the same object."""
    rows = staged(Stager())
    generator = torch.Generator()
    whole = batch(metadata(generators={3: generator}))
    assert compact_v1.leaders_metadata(whole, rows).generators == {2: generator}
    whole.sampling_metadata.generators.clear()
    assert compact_v1.leaders_metadata(whole, rows).generators == {}
    whole.sampling_metadata.generators[0] = generator
    assert compact_v1.leaders_metadata(whole, rows).generators == {0: generator}


# --- Model Runner V2 ------------------------------------------------------------------------------

EARLY = (A, B)
"""Both groups are blended before the head."""


def batch_v2(device: torch.device) -> InputBatch:
    """Five decoding requests in the slots 7, 6, 5, 4 and 3, with 11 to 15 tokens."""
    buffers = InputBuffers(8, 8, device)
    made = InputBatch.make_dummy(5, 5, buffers)
    return replace(
        made,
        req_ids=list(NAMES),
        idx_mapping=torch.arange(7, 2, -1, device=device),
        idx_mapping_np=np.arange(7, 2, -1),
        expanded_idx_mapping=torch.arange(7, 2, -1, device=device),
        expanded_local_pos=torch.zeros(5, dtype=torch.int32, device=device),
        seq_lens=torch.arange(11, 16, dtype=torch.int32, device=device),
        seq_lens_cpu_upper_bound=torch.arange(11, 16, dtype=torch.int32),
        logits_indices=torch.arange(5, device=device),
        cu_num_logits=torch.arange(6, dtype=torch.int32, device=device),
        cu_num_logits_np=np.arange(6),
    )


def sampler(**fields: Any) -> Any:
    values = {"compute_nans": False, "return_sampling_mask": False, "trace_replay_state": None}
    return SimpleNamespace(**(values | fields))


def test_v2_samples_the_rows_that_lead() -> None:
    cpu = torch.device("cpu")
    batch, rows = batch_v2(cpu), staged(Stager(), EARLY, device=cpu)
    assert compact_v2.can_compact(batch, rows, sampler())
    leading = compact_v2.leading_batch(batch, rows)
    assert leading.req_ids == ["a+", "x", "b+"]
    assert leading.num_reqs == 3
    for slots in (leading.idx_mapping, leading.idx_mapping_np, leading.expanded_idx_mapping):
        assert slots.tolist() == [7, 6, 4]
    for lengths in (leading.seq_lens, leading.seq_lens_cpu_upper_bound):
        assert lengths.tolist() == [11, 12, 14]
    assert leading.logits_indices.tolist() == [0, 1, 3]
    assert leading.cu_num_logits.tolist() == leading.cu_num_logits_np.tolist() == [0, 1, 2, 3]
    assert leading.expanded_local_pos.tolist() == [0, 0, 0]

    hidden = torch.randn(5, HIDDEN)
    assert rows.merged is not None
    merged = merge(hidden, rows.merged)
    assert torch.equal(merged[1], hidden[1])
    assert torch.allclose(merged[0], 1.5 * hidden[0] - 0.5 * hidden[2], atol=1e-5)
    assert torch.allclose(merged[2], 3.0 * hidden[3] - 2.0 * hidden[4], atol=1e-5)


def test_v2_gives_followers_what_their_leaders_got() -> None:
    rows = staged(Stager(), EARLY, device=torch.device("cpu"))
    tensors = LogprobsTensors(
        torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([[0.1], [0.3], [0.5]]), torch.arange(3)
    )
    output = compact_v2.spread(
        SamplerOutputV2(
            sampled_token_ids=torch.tensor([[10], [20], [30]]),
            logprobs_tensors=tensors,
            num_nans=None,
            num_sampled=torch.tensor([1, 0, 1]),
            num_rejected=torch.tensor([0, 1, 0]),
        ),
        rows,
    )
    assert output.sampled_token_ids.flatten().tolist() == [10, 20, 10, 30, 30]
    assert output.num_sampled.tolist() == [1, 0, 1, 1, 1]
    assert output.num_rejected.tolist() == [0, 1, 0, 0, 0]
    assert output.logprobs_tensors is not None
    assert output.logprobs_tensors.selected_token_ranks.tolist() == [0, 1, 0, 2, 2]


def test_v2_does_not_wait_for_the_device() -> None:
    batch, rows = batch_v2(DEVICE), staged(Stager(), EARLY)
    with copies(lambda num: num == 0):
        leading = compact_v2.leading_batch(batch, rows)
    assert leading.idx_mapping.shape == (3,)


@pytest.mark.parametrize(
    ("joint", "batch", "sampling"),
    [
        (JOINT, {}, {}),  # one group is blended after the head
        (EARLY, {"num_draft_tokens": 2}, {}),
        (EARLY, {}, {"compute_nans": True}),
        (EARLY, {}, {"return_sampling_mask": True}),
        (EARLY, {}, {"trace_replay_state": object()}),
    ],
)
def test_v2_samples_all_rows_where_rows_have_more_than_a_sample(
    joint: tuple[JointRow, ...], batch: dict[str, Any], sampling: dict[str, Any]
) -> None:
    changed = replace(batch_v2(DEVICE), **batch)
    assert not compact_v2.can_compact(changed, staged(Stager(), joint), sampler(**sampling))


CPU = torch.device("cpu")
LIMITED = Strength(max_kl=0.1)
IN_PIECES = (
    joint_row(
        *("a+", "a-", 1.5, -0.5),
        **{"logprobs": 3, "needs_rows": True, "cuts": Cuts(top_k=7), "strength": LIMITED},
    ),
    joint_row(
        *("b+", "b-", 3.0, -2.0),
        **{"logprobs": 2, "needs_rows": True, "cuts": Cuts(min_p=0.1), "strength": RULED},
    ),
)


def computed(logits: torch.Tensor) -> list[torch.Tensor]:
    """Everything that is computed of rows of the vocabulary for the groups of IN_PIECES."""
    rows = staged(Stager(), IN_PIECES, device=CPU)
    out, kept, strengths = blended(logits.clone(), rows)
    assert kept is not None
    assert strengths is not None
    drafts = rows.blend_drafts(logits, torch.zeros_like(logits))
    tensors = LogprobsTensors(torch.zeros(5, 1), torch.zeros(5, 1), torch.zeros(5))
    wide = widen(tensors, kept, torch.tensor([4, 9]), torch.tensor([0, 3]), 3)
    scores = scoring.gather(out, torch.arange(len(out)), 2)
    return [out, strengths, drafts, kept.divergence, wide.logprob_token_ids, wide.logprobs, *scores]


def test_rows_in_pieces_are_those_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, VOCABULARY)
    at_once = computed(logits)
    monkeypatch.setattr(logit_blends, "PIECE_BYTES", 1)
    for got, want in zip(computed(logits), at_once, strict=True):
        assert torch.equal(got, want)


def test_pieces_stay_in_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a vocabulary of 262,144, one row of each stream is computed at once."""
    sizes = []

    def recording(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(first: torch.Tensor, *more: Any) -> torch.Tensor:
            sizes.append(4 * first.numel())
            return function(first, *more)

        return call

    monkeypatch.setattr(rows_module, "divergence", recording(rows_module.divergence))
    for name in ("blend", "cut", "weaken"):
        monkeypatch.setattr(logit_blends, name, recording(getattr(logit_blends, name)))
    names = [f"{i}{sign}" for i in range(20) for sign in "+-"]
    row = IN_PIECES[0]
    joint = tuple(
        row._replace(group=row.group._replace(leader=f"{i}+", followers=(f"{i}-",)))
        for i in range(20)
    )
    rows = staged(Stager(), joint, device=CPU, names=names, first_row=np.arange(41))
    blended(torch.randn(40, 262_144), rows)
    assert len(sizes) >= 3
    assert max(sizes) <= 2 << 20
