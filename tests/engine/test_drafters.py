"""Which drafters may run, and what they are given of a stream that has taken its samples back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.gemma4 import Gemma4Proposer
from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from cfg_core.policy.groups import Group
from cfg_core.vllm_plugin import drafters
from cfg_core.vllm_plugin.core.gates import PROBE_WEIGHTS
from cfg_core.vllm_plugin.wire import JointRow, StepGuidance
from cfg_core.vllm_plugin.worker.drafter_v1 import GuidedEagleProposer, careful_class
from cfg_core.vllm_plugin.worker.drafter_v2 import NUM_REJECTED, be_careful, keep_first
from cfg_core.vllm_plugin.worker.runner_guidance import RunnerGuidance
from tests.engine import prophet, tiny_medusa
from tests.engine.engines import ROOMY, TIGHT, Engine, differences, guided, plain, tokens
from tests.engine.formulas import suffix_answers
from tests.engine.oracle import CASES, PROMPTS, Oracle

STARTS = torch.tensor([0, 3, 6], dtype=torch.int32)
"""Two streams with two drafts each. The first one is solo."""


def engine_config(method: str, *, v2: bool = False, stages: int = 1, **fields: Any) -> Any:
    """What `why_not_guided` reads of vLLM's configuration."""
    kinds = ("use_gemma4_mtp", "use_multi_module_mtp", "use_step3p5_mtp")
    plain_head: dict[str, Any] = {kind: lambda: False for kind in kinds}
    off = {"enable_adaptive_verification": False, "disable_padded_drafter_batch": False}
    speculative = SimpleNamespace(**{**plain_head, **off, **fields}, method=method)
    return SimpleNamespace(
        speculative_config=speculative,
        use_v2_model_runner=v2,
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )


def causes(config: Any, *, recurrent: bool = False) -> list[str]:
    return list(drafters.why_not_guided(config, recurrent=recurrent))


@pytest.mark.parametrize("method", drafters.METHODS)
def test_supported_methods_draft_for_groups(method: str) -> None:
    config = engine_config(method, v2=method == "ngram_gpu")
    assert causes(config) == []
    assert drafters.why_groups_rest(config) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *((engine_config(method), why) for method, why in drafters.UNGUIDED.items()),
        (engine_config("mtp", use_gemma4_mtp=lambda: True), "Gemma 4's assistant"),
        (engine_config("mtp", v2=True, use_multi_module_mtp=lambda: True), "several MTP heads"),
        (engine_config("mtp", use_step3p5_mtp=lambda: True), "Step 3.5"),
    ],
)
def test_others_draft_for_plain_requests_and_say_why(config: Any, words: str) -> None:
    why = drafters.why_groups_rest(config)
    assert why is not None
    assert words in why
    assert causes(config) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (engine_config("ngram_gpu"), "V1 model runner"),
        (engine_config("mtp", stages=2), "pipeline"),
        (engine_config("eagle", disable_padded_drafter_batch=True), "without padding"),
        (engine_config("dflash", disable_padded_drafter_batch=True), "without padding"),
        (engine_config("dspark", enable_adaptive_verification=True), "adaptive verification"),
    ],
)
def test_engines_that_cannot_guide_say_why(config: Any, words: str) -> None:
    (cause,) = causes(config)
    assert words in cause


def test_several_heads_are_one_on_the_v1_runner() -> None:
    """V1 drafts all tokens with the first head."""
    assert drafters.why_groups_rest(engine_config("mtp", use_multi_module_mtp=lambda: True)) is None


def recurrent_config(*, hybrid: bool = True, **text: int) -> Any:
    config = engine_config("mtp")
    config.model_config = SimpleNamespace(is_hybrid=hybrid, hf_text_config=SimpleNamespace(**text))
    return config


GATED_DELTA = {drafters.GATED_DELTA_NET: 2}


def test_gated_delta_nets_draft_on_a_cpu() -> None:
    assert causes(recurrent_config(**GATED_DELTA), recurrent=True) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (recurrent_config(hybrid=False, **GATED_DELTA), "without attention"),
        (recurrent_config(), "on a CPU"),
    ],
)
def test_other_recurrent_models_say_why(config: Any, words: str) -> None:
    (cause,) = causes(config, recurrent=True)
    assert words in cause


def test_all_hybrids_draft_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert causes(recurrent_config(), recurrent=True) == []


PROBE = JointRow(Group("a", (), (1.0, 0.0), suffix=(5,)), PROBE_WEIGHTS, probe=True)
TAKEN_BACK = {"solo": StepGuidance((), ("a",)), "a probe": StepGuidance((PROBE,), ())}
NONE_TAKEN_BACK = StepGuidance((), ())


@pytest.mark.parametrize("step", TAKEN_BACK.values(), ids=TAKEN_BACK)
def test_a_stream_that_may_have_no_token_keeps_its_first_one_on_v1(step: StepGuidance) -> None:
    """Without that, its next token would be written to another stream's place, here the last."""
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()  # as a worker on a CPU does
    drafter: Any = object.__new__(GuidedEagleProposer)
    drafter.guidance = guidance = RunnerGuidance(step=step)
    metadata = CommonAttentionMetadata(
        query_start_loc=STARTS,
        query_start_loc_cpu=STARTS,
        seq_lens=torch.tensor([9, 9]),
        num_reqs=2,
        num_actual_tokens=6,
        max_query_len=3,
        max_seq_len=9,
        block_table_tensor=torch.zeros(2, 1),
        slot_mapping=torch.arange(6),
    )
    drafts = SimpleNamespace(cu_num_draft_tokens=torch.tensor([2, 4], dtype=torch.int32))
    counts = torch.tensor([0, 2], dtype=torch.int32)
    _, places, rejected = drafter.prepare_inputs_padded(metadata, drafts, counts)
    assert places.tolist() == [0, 4]
    assert rejected.tolist() == [2, 1]
    guidance.step = NONE_TAKEN_BACK
    _, places, _ = drafter.prepare_inputs_padded(metadata, drafts, counts)
    assert places[0] < 0, "vLLM has mended this: remove the override"
    suffixes: Any = SimpleNamespace(counts_there=torch.tensor([0, 1]))
    guidance.step, guidance.suffixes = step, suffixes
    _, places, rejected = drafter.prepare_inputs_padded(metadata, drafts, counts)
    assert places.tolist() == [0, 3], "the next token is not in front of the suffix"
    assert rejected.tolist() == [2, 2]


def test_a_stream_that_may_have_no_token_keeps_its_first_one_on_v2() -> None:
    batch: Any = SimpleNamespace(query_start_loc=torch.tensor([0, 3, 6, 6], dtype=torch.int32))
    rejected = torch.tensor([3, 1], dtype=torch.int32)
    assert keep_first(rejected, batch).tolist() == [2, 1]


class StockSpeculator:
    """A drafter of V2 that proposes the number of tokens which each stream has taken back."""

    num_speculative_steps, device = 2, torch.device("cpu")

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        taken_back: torch.Tensor = args[6]
        return taken_back.unsqueeze(1).expand(-1, self.num_speculative_steps)


@pytest.mark.parametrize(
    ("step", "kwargs", "drafts"),
    [
        (NONE_TAKEN_BACK, {}, [3, 1]),
        *((step, {}, [2, 1]) for step in TAKEN_BACK.values()),
        (replace(NONE_TAKEN_BACK, drafter_rests=True), {}, [-1, -1]),
        (replace(TAKEN_BACK["solo"], drafter_rests=True), {"dummy_run": True}, [3, 1]),
    ],
)
def test_a_drafter_for_plain_requests_works_beside_groups_on_v2(
    step: StepGuidance, kwargs: Any, drafts: list[int]
) -> None:
    drafter: Any = StockSpeculator()
    be_careful(drafter, RunnerGuidance(step=step))
    starts = torch.tensor([0, 3, 6, 6], dtype=torch.int32)
    batch = SimpleNamespace(query_start_loc=starts, num_reqs=2)
    rejected = torch.tensor([3, 1], dtype=torch.int32)
    got = drafter.propose(batch, None, None, None, None, None, rejected, **kwargs)
    assert got.tolist() == [[number] * 2 for number in drafts]


def test_where_vllm_puts_what_is_rejected() -> None:
    own, *arguments = inspect.signature(DraftModelSpeculator.propose).parameters
    assert own == "self"
    assert arguments.index("num_rejected") == NUM_REJECTED


@pytest.mark.parametrize("stock", [DFlashProposer, Gemma4Proposer, Step3p5MTPProposer])
def test_drafters_of_v1_for_plain_requests_can_be_replaced(stock: Any) -> None:
    cls = careful_class(stock)
    assert issubclass(cls, stock)
    assert cls.prepare_inputs_padded is not stock.prepare_inputs_padded


@pytest.mark.slow
def test_medusa_drafts_for_plain_requests_only(
    model_folder: Callable[[str], Path], llama: Oracle, tmp_path: Path
) -> None:
    """Its heads are told to repeat the token that was sampled, which some texts do.

    vLLM fills a stream that comes back with one token up to the shape of a decode with drafts, for
    its first step. It counts these placeholders as drafts, also those of a group.
    """
    suffixed = [one for one in suffix_answers(llama) if len(one.request.formula.suffix) < 20]
    assert suffixed
    tiny_medusa.build(model_folder("llama"), tmp_path, heads=2)
    speculation = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 2}
    engine = Engine(model_folder("llama"), speculative_config=speculation, **TIGHT)
    try:
        params = [*map(guided, CASES), *(plain() for _ in PROMPTS)]
        params += [plain(extra_args=one.request.extra_args) for one in suffixed]
        prompts = [*(c.prompt for c in CASES), *PROMPTS, *(one.request.prompt for one in suffixed)]
        got = tokens(engine.generate(prompts, params))
        alone = tokens(engine.generate([c.prompt for c in CASES[:3]], [*map(guided, CASES[:3])]))
        stats = engine.stats()
    finally:
        engine.close()
    want = llama.guided + llama.plain + [one.token_ids for one in suffixed]
    assert differences(got, want) == []
    assert differences(alone, llama.guided[:3]) == []
    assert stats["group_preemptions"] > 0
    assert stats["guided_drafts_accepted"] == 0
    assert stats["guided_draft_steps"] < len(CASES) // 4
    assert stats["plain_drafts"] > stats["plain_drafts_accepted"] > 0


@pytest.mark.slow
def test_a_users_own_drafter_reads_the_leaders_text(
    model_folder: Callable[[str], Path], llama: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers get their leaders' drafts. Without them, no draft could be kept."""
    cases, texts = CASES[::6], llama.guided[::6]
    whole = [[*c.prompt, *text] for c, text in zip(cases, texts, strict=True)]
    whole += [[*prompt, *text] for prompt, text in zip(PROMPTS, llama.plain, strict=True)]
    monkeypatch.setattr(prophet, "KNOWN", whole)
    speculation = {
        "method": "custom_class",
        "model": "tests.engine.prophet.Prophet",
        "num_speculative_tokens": 3,
    }
    folder = model_folder("llama")
    engine = Engine(folder, speculative_config=speculation, draft_cost=0, **ROOMY)
    try:
        params = [*map(guided, cases), *(plain() for _ in PROMPTS)]
        got = tokens(engine.generate([*(c.prompt for c in cases), *PROMPTS], params))
        stats = engine.stats()
    finally:
        engine.close()
    assert differences(got, texts + llama.plain) == []
    assert stats["guided_drafts_accepted"] == stats["guided_drafts"] > 0
    assert stats["plain_drafts_accepted"] > 0  # fewer: a plain text may begin as a guided one
