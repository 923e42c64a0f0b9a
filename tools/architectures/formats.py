"""What vLLM's CPU build runs of types, quantised weights and caches: the second table.

Each row is a Llama, a mixture of experts or a model with latent attention, with its weights drawn
in vLLM in the format's own layout.
"""

from __future__ import annotations

from typing import Any

from tools.architectures.rows import STOCK, Row

NOTE = "transformers does not have this format, or rounds otherwise"


def form(label: str, config: dict[str, Any] | None = None, **fields: Any) -> Row:
    """A row of this table. config: the `quantization_config` of the checkpoint."""
    settings: dict[str, Any] = {
        "name": "LlamaForCausalLM",
        "model_type": "llama",
        "dtype": "bfloat16",
        **fields,
    }
    sizes = {**settings.pop("sizes", {})}
    if config:
        sizes["quantization_config"] = config
    return Row(kinds=("format",), sizes=sizes, oracle=STOCK, note=NOTE, title=label, **settings)


def compressed(
    weights: dict[str, Any], inputs: dict[str, Any] | None, layout: str
) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
    }


def numbers(bits: int, strategy: str, kind: str = "int", **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        **more,
    }


PER_TOKEN = numbers(8, "token", dynamic=True)
INT8_STEP, INT4_STEP = {"scale": 1.7e-3}, {"scale": 0.03}
"""With these steps, random integers are matrices of gain 1."""
MOE: dict[str, Any] = {
    "name": "Qwen3MoeForCausalLM",
    "model_type": "qwen3_moe",
    "sizes": {"num_experts_per_tok": 4},
}

ROWS = (
    form("bfloat16"),
    form("float16", dtype="float16"),
    form("bfloat16, mixture of experts", **MOE),
    form(
        "compressed-tensors w8a8, int8",
        compressed(numbers(8, "channel"), PER_TOKEN, "int-quantized"),
        gains=INT8_STEP,
    ),
    form(
        "compressed-tensors w8a8, int8, mixture of experts",
        compressed(numbers(8, "channel"), PER_TOKEN, "int-quantized"),
        gains=INT8_STEP,
        **MOE,
        missing="no kernel for a CPU",
    ),
    form(
        "compressed-tensors w8a16, int8",
        compressed(numbers(8, "channel"), None, "pack-quantized"),
        gains=INT8_STEP,
        missing="no kernel for a CPU: 4 bits alone",
    ),
    form(
        "compressed-tensors w4a16, groups of 32",
        compressed(numbers(4, "group", group_size=32), None, "pack-quantized"),
        gains=INT4_STEP,
    ),
    form(
        "compressed-tensors w4a16, mixture of experts",
        compressed(numbers(4, "group", group_size=32), None, "pack-quantized"),
        gains=INT4_STEP,
        **MOE,
        missing="no kernel for a CPU",
    ),
    form(
        "compressed-tensors w4a8",
        compressed(numbers(4, "group", group_size=32), PER_TOKEN, "pack-quantized"),
        gains=INT4_STEP,
    ),
    form(
        "compressed-tensors w8a8, fp8",
        compressed(
            numbers(8, "channel", "float"),
            numbers(8, "token", "float", dynamic=True),
            "float-quantized",
        ),
    ),
    form(
        "AWQ, 4 bits",
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        gains=INT4_STEP,
    ),
    form(
        "GPTQ, 4 bits",
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
        },
        gains=INT4_STEP,
    ),
    form(
        "GPTQ, 8 bits",
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": 32,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
        },
        gains=INT8_STEP,
        missing="no kernel for a CPU: 4 bits alone",
    ),
    form(
        "fp8 weights, blocks",
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
        },
        gains={"scale": 0.02},
        missing="needs a CPU with AMX",
    ),
    form(
        "fp8 weights, quantised at start",
        options={"quantization": "fp8"},
        missing="the CPU build has no kernel that quantises",
    ),
    form(
        "int8 experts, quantised at start",
        options={"quantization": "experts_int8"},
        **MOE,
        missing="no kernel for a CPU",
    ),
    form(
        "MXFP4 experts (gpt-oss)",
        {"quant_method": "mxfp4"},
        name="GptOssForCausalLM",
        model_type="gpt_oss",
        missing="no kernel for a CPU",
    ),
    form("fp8 KV cache (e4m3)", options={"kv_cache_dtype": "fp8"}),
    form("fp8 KV cache (e5m2)", options={"kv_cache_dtype": "fp8_e5m2"}),
    form("GGUF", options={"quantization": "gguf"}, missing="vLLM 0.32.0 does not have it"),
    form(
        "bitsandbytes",
        options={"quantization": "bitsandbytes"},
        missing="vLLM 0.32.0 does not have it",
    ),
)
