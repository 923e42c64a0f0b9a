"""The type in which a CPU computes: from /proc/cpuinfo and a checkpoint's config.json."""

import json

import pytest
import torch

from cfg_core.cpu_features import has_bfloat16
from cfg_core.prefill_only.models import loading
from cfg_core.prefill_only.options import EngineOptions
from deployments.generator.engine.cpu_dtype import checkpoint_dtype, with_cpu_dtype

AVX2 = "processor\t: 0\nflags\t\t: fpu sse4_2 avx2 f16c\nbugs\t\t: spectre_v1\n"
AVX512 = AVX2.replace("f16c", "f16c avx512f avx512_vnni")
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd fphp asimddp\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AVX2, False),
        (AVX512, False),
        (AVX512.replace("avx512_vnni", "avx512_vnni avx512_bf16"), True),
        (AVX512.replace("avx512_vnni", "amx_bf16 amx_tile"), True),
        (AVX2.replace("bugs\t\t: ", "bugs\t\t: amx_bf16 "), False),
        (ARM, False),
        (ARM.replace("asimddp", "asimddp i8mm bf16"), True),
        ("", None),
        ("processor : 0\n", None),
    ],
)
def test_instructions_for_bfloat16(text, expected):
    assert has_bfloat16(text) is expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({}, None),
    ],
)
def test_the_type_of_a_checkpoint(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint_dtype(str(tmp_path)) == expected


def test_no_checkpoint_has_no_type(tmp_path):
    assert checkpoint_dtype(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{")
    assert checkpoint_dtype(str(tmp_path)) is None


@pytest.fixture
def chosen(tmp_path):
    """Returns the dtype that is chosen for a checkpoint and a machine."""

    def chosen(checkpoint="bfloat16", cpuinfo=AVX512, **engine):
        (tmp_path / "config.json").write_text(json.dumps({"dtype": checkpoint}))
        options = with_cpu_dtype({"model": str(tmp_path), **engine}, cpuinfo)
        assert options.items() >= {"model": str(tmp_path), **engine}.items() - {("dtype", "auto")}
        return options.get("dtype")

    return chosen


def test_float32_where_bfloat16_is_slow(chosen):
    assert chosen() == "float32"
    assert chosen(dtype="auto", max_num_seqs=4) == "float32"


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "auto", "checkpoint": "float16"},
        {"dtype": "auto", "cpuinfo": ARM.replace("asimddp", "bf16")},
        {"dtype": "auto", "cpuinfo": "processor : 0\n"},
    ],
)
def test_otherwise_the_choice_is_left_alone(chosen, case):
    assert chosen(**case) == case["dtype"]


def test_for_a_name_on_the_hub_vllm_chooses():
    assert with_cpu_dtype({"model": "some-org/some-model"}, AVX512) == {
        "model": "some-org/some-model"
    }


# --- encoders -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "device", "cpuinfo", "packs", "expected"),
    [
        ("auto", "cpu", AVX2, True, "float32"),
        ("auto", "cpu", AVX512, True, "float32"),  # oneDNN converts each value
        ("auto", "cpu", AVX512.replace("f16c", "avx512_bf16"), True, "bfloat16"),
        ("auto", "cpu", AVX512.replace("f16c", "amx_bf16"), True, "bfloat16"),
        ("auto", "cpu", AVX512.replace("f16c", "amx_bf16"), False, "float32"),
        ("auto", "cpu", "", True, "float32"),
        ("auto", "cuda", AVX2, False, "bfloat16"),
        ("float32", "cpu", AVX512.replace("f16c", "amx_bf16"), True, "float32"),
        ("bfloat16", "cpu", AVX2, False, "bfloat16"),
    ],
)
def test_the_type_of_an_encoder(monkeypatch, dtype, device, cpuinfo, packs, expected):
    monkeypatch.setattr(loading, "read", lambda path: cpuinfo)
    monkeypatch.setattr(loading, "packs_bfloat16", lambda: packs)
    options = EngineOptions(dtype=dtype)
    chosen = loading.choose_dtype(options, torch.device(device), "bert")
    assert loading.name_of(chosen) == expected


def test_some_models_are_computed_in_float32_whatever_the_machine_has():
    chosen = loading.choose_dtype(EngineOptions(), torch.device("cuda"), "deberta")
    assert chosen == torch.float32
