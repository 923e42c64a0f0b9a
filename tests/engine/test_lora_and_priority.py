"""Groups with a LoRA adapter, and groups of different priority.

The pool is too small for all of them. The adapter's oracle is Hugging Face on a model into whose
weights the adapter was merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cfg_core import recipes
from tests.engine.adapters import ALPHA, RANK, make_adapter
from tests.engine.engines import SMALL_POOL, Engine, differences, guided, plain, tokens
from tests.engine.formulas import suffix_answers
from tests.engine.oracle import CASES, Oracle

pytestmark = pytest.mark.slow

CHOSEN = CASES[::4]
"""18 cases, every pair among them."""


@torch.no_grad()
def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """The model with the adapter in its weights: W + alpha / rank * B A."""
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parameters, weights = (
        dict(merged.named_parameters()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for name in [name for name in weights if name.endswith(".lora_A.weight")]:
        stem = name.removesuffix(".lora_A.weight")
        product = weights[f"{stem}.lora_B.weight"] @ weights[name]
        parameters[f"{stem.removeprefix('base_model.model.')}.weight"] += ALPHA / RANK * product
    merged.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model_folder("llama"), tmp_path_factory.mktemp("lora") / "adapter")


@pytest.fixture(scope="module")
def adapted(model_folder: Callable[[str], Path], adapter: Path) -> Oracle:
    return Oracle(merge(model_folder("llama"), adapter, adapter.parent / "merged"))


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[Engine]:
    options = {
        **SMALL_POOL,
        "scheduling_policy": "priority",
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 2,
    }
    engine = Engine(model_folder("llama"), **options)
    yield engine
    engine.close()


def test_both_streams_of_a_group_take_the_adapter(
    engine: Engine, llama: Oracle, adapted: Oracle, adapter: Path
) -> None:
    """Groups with the adapter, groups without, and plain requests run in one batch.

    They have the same prompts: what one model left in the prefix cache must not be used by the
    other.
    """
    from vllm.lora.request import LoRARequest

    num_tokens, lora = 8, LoRARequest("adapter", 1, str(adapter))
    prompts, params, loras, want = [], [], [], []
    for i, case in enumerate(CHOSEN):
        for oracle, asked in ((llama, None), (adapted, lora)):
            prompts += [case.prompt, case.prompt]
            params += [guided(case, max_tokens=num_tokens), plain(max_tokens=num_tokens)]
            loras += [asked, asked]
            text = oracle.hf(
                case.prompt, scale=case.scale, negative=case.negative, max_new_tokens=num_tokens
            )
            want += [text, oracle.hf(case.prompt, max_new_tokens=num_tokens)]
        assert want[4 * i] != want[4 * i + 2]
    got = engine.generate(prompts, params, lora_request=loras)
    assert differences(tokens(got), want) == []


def test_a_suffix_takes_the_adapter(
    engine: Engine, llama: Oracle, adapted: Oracle, adapter: Path
) -> None:
    """Rows of suffixes are behind those of the batch, where vLLM's head would find no adapter."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("adapter", 1, str(adapter))
    prompts, params, loras, want = [], [], [], []
    for oracle, asked in ((llama, None), (adapted, lora)):
        for one in suffix_answers(oracle):
            prompts.append(one.request.prompt)
            params.append(plain(extra_args=one.request.extra_args, max_tokens=12))
            loras.append(asked)
            want.append(one.token_ids[:12])
    got = engine.generate(prompts, params, lora_request=loras)
    assert differences(tokens(got), want) == []


@pytest.fixture(scope="module")
def other(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model_folder("llama"), tmp_path_factory.mktemp("lora") / "other", seed=6)


@pytest.fixture(scope="module")
def other_adapted(model_folder: Callable[[str], Path], other: Path) -> Oracle:
    return Oracle(merge(model_folder("llama"), other, other.parent / "merged"))


@torch.inference_mode()
def weighted(models: list[tuple[float, Oracle, tuple[int, ...]]], num_tokens: int) -> list[int]:
    """Greedy tokens of a weighted sum of raw logits, as the papers write it.

    models: weight, model and prompt of each stream.
    """
    output: list[int] = []
    while len(output) < num_tokens:
        rows = [
            weight * oracle.model(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
            for weight, oracle, prompt in models
        ]
        output.append(int(torch.stack(rows).sum(0).argmax()))
    return output


def test_each_stream_has_its_adapter(
    engine: Engine,
    llama: Oracle,
    adapted: Oracle,
    other_adapted: Oracle,
    adapter: Path,
    other: Path,
) -> None:
    """DExperts with two adapters, an adapted leader away from the base model, and mixtures.

    They run in one batch with groups that have one adapter, and none. The pool is too small.
    """
    from vllm.lora.request import LoRARequest

    num_tokens = 8
    first, second = LoRARequest("adapter", 1, str(adapter)), LoRARequest("other", 2, str(other))
    prompts, params, loras, want = [], [], [], []
    for case in CHOSEN[:9]:
        p, n = case.prompt, case.negative
        asked: list[tuple[dict[str, Any], Any, list[tuple[float, Oracle, tuple[int, ...]]]]] = [
            (
                recipes.dexperts(first, second, alpha=1.5).to_extra_args(),
                None,
                [(1.0, llama, p), (1.5, adapted, p), (-1.5, other_adapted, p)],
            ),
            (
                {"guidance_streams": [{"weight": -1.0, "lora": False}]},
                first,
                [(2.0, adapted, p), (-1.0, llama, p)],
            ),
            (
                {"guidance_streams": [{"weight": -0.5, "token_ids": list(n)}]},
                second,
                [(1.5, other_adapted, p), (-0.5, other_adapted, n)],
            ),
            (
                {
                    "guidance_streams": [
                        {"weight": 0.5, "token_ids": list(n), "lora": second},
                        {"weight": -1.0, "token_ids": list(n)},
                    ]
                },
                None,
                [(1.5, llama, p), (0.5, other_adapted, n), (-1.0, llama, n)],
            ),
        ]
        for extra, lora, models in asked:
            prompts.append(p)
            params.append(plain(extra_args=extra, max_tokens=num_tokens))
            loras.append(lora)
            want.append(weighted(models, num_tokens))
    got = engine.generate(prompts, params, lora_request=loras)
    assert differences(tokens(got), want) == []


def test_more_adapters_than_a_step_has_are_refused(engine: Engine, adapter: Path) -> None:
    from vllm.lora.request import LoRARequest

    own, *others = (LoRARequest(f"a{i}", 10 + i, str(adapter)) for i in range(3))
    params = plain(extra_args=recipes.dexperts(*others).to_extra_args())
    with pytest.raises(ValueError, match=r"use 3 adapters.*raise max_loras"):
        engine.generate([(5, 6, 7)], [params], lora_request=[own])
    engine.assert_idle()


def test_priority_goes_by_group(engine: Engine, llama: Oracle) -> None:
    """Requests with smaller numbers run sooner.

    Requests that are preempted for them still give the right tokens.
    """
    cases, priorities = CASES, [i % 3 for i in range(len(CASES))]
    order = first_tokens(engine)
    before = engine.stats()["group_preemptions"]
    got = engine.generate(
        [case.prompt for case in cases], [guided(case) for case in cases], priority=priorities
    )
    assert differences(tokens(got), llama.guided) == []
    assert engine.stats()["group_preemptions"] > before
    ranks = [priority for priority in order if priority in (0, 2)]
    assert len(ranks) == len(cases) * 2 // 3
    assert ranks == sorted(ranks)


def first_tokens(engine: Engine) -> list[int]:
    """The priorities of guided requests, in the order of their first tokens."""
    scheduler, order, seen = engine.scheduler, [], set()
    original = scheduler.update_from_output

    def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
        requests = dict(scheduler.requests)
        outputs = original(scheduler_output, model_runner_output)
        for per_client in outputs.values():
            for output in per_client.outputs:
                if output.new_token_ids and output.request_id not in seen:
                    seen.add(output.request_id)
                    order.append(requests[output.request_id].priority)
        return outputs

    scheduler.update_from_output = update_from_output
    return order
