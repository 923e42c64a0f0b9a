"""Models with a recurrent state, alone or beside attention."""

from __future__ import annotations

from typing import Any

from tools.architectures.rows import DROP, PLAIN_ROTARY, ROTARY_NOTE, STOCK, Row
from tools.architectures.sizes import FFN, HIDDEN

OPTIONS = {"enable_prefix_caching": False, "block_size": None}
"""vLLM's kernels for CPUs keep no states within a prompt."""
LOUD_BLOCKS = {r"(out_proj|w2|down_proj)\b": 6.0}


def recurrent(name: str, model_type: str, *more: str, **fields: Any) -> Row:
    return Row(
        name=name, kinds=("recurrent", *more), model_type=model_type, options=OPTIONS, **fields
    )


def hybrid(name: str, model_type: str, *more: str, **fields: Any) -> Row:
    return Row(
        name=name, kinds=("hybrid", *more), model_type=model_type, **{"options": OPTIONS, **fields}
    )


NO_SCAN = "the CPU build has no kernel for the first Mamba's scan"
NO_TRITON = "its linear attention needs Triton"
MAMBA1 = {"intermediate_size": DROP, "state_size": 16, "time_step_rank": 4}
SSM = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}
GATED_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
ALL_EXPERTS = {"num_experts_per_tok": 4}
"""Otherwise rounding in bfloat16 chooses another expert now and then, with or without guidance."""
IN_BFLOAT16: dict[str, Any] = {
    "dtype": "bfloat16",
    "oracle": STOCK,
    "note": "vLLM's linear attention wants bfloat16 on a CPU",
}

ROWS = (
    recurrent("FalconMambaForCausalLM", "falcon_mamba", sizes=MAMBA1, missing=NO_SCAN),
    recurrent("MambaForCausalLM", "mamba", sizes=MAMBA1, missing=NO_SCAN),
    recurrent(
        "Mamba2ForCausalLM",
        "mamba2",
        sizes={"num_heads": 4, "state_size": 32, "n_groups": 1, "chunk_size": 64},
    ),
    hybrid("FalconH1ForCausalLM", "falcon_h1", sizes={**SSM, "mamba_d_ssm": 128}),
    hybrid(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        "moe",
        sizes={**GATED_DELTA, **ALL_EXPERTS},
        **IN_BFLOAT16,
    ),
    hybrid(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        "moe",
        sizes={**SSM, "layer_types": ["mamba", "attention"]},
    ),
    hybrid(
        "JambaForCausalLM",
        "jamba",
        "moe",
        sizes={
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 4,
        },
        missing=NO_SCAN,
    ),
    hybrid(
        "KimiLinearForCausalLM",
        "kimi_linear",
        "moe",
        "mla",
        sizes={
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": None,
        },
        missing=NO_TRITON,
    ),
    hybrid(
        "Lfm2ForCausalLM",
        "lfm2",
        sizes={
            "layer_types": ["conv", "full_attention"],
            "conv_dim": HIDDEN,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "block_ff_dim": FFN,
            "block_dim": HIDDEN,
            "tie_word_embeddings": True,
        },
        gains=LOUD_BLOCKS,
        options={**OPTIONS, **PLAIN_ROTARY},
        note=ROTARY_NOTE,
    ),
    hybrid(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        "moe",
        sizes={
            "layer_types": ["conv", "full_attention"],
            "conv_dim": HIDDEN,
            "conv_L_cache": 3,
            "num_dense_layers": 1,
            "tie_word_embeddings": True,
        },
        gains=LOUD_BLOCKS,
        options={**OPTIONS, **PLAIN_ROTARY},
        note=ROTARY_NOTE,
    ),
    hybrid(
        "NemotronHForCausalLM",
        "nemotron_h",
        sizes={
            "num_hidden_layers": DROP,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 1,
            "chunk_size": 64,
            "moe_shared_expert_intermediate_size": HIDDEN,
            "sliding_window": DROP,
            "use_mamba_kernels": False,
        },
        hf_class="NemotronHForCausalLM",
        oracle=STOCK,
        note="vLLM's logits differ from those of transformers by 0.06 after 150 tokens",
    ),
    hybrid(
        "OlmoHybridForCausalLM", "olmo_hybrid", sizes=GATED_DELTA, missing=NO_TRITON, **IN_BFLOAT16
    ),
    hybrid("Qwen3_5ForCausalLM", "qwen3_5_text", sizes=GATED_DELTA, **IN_BFLOAT16),
    hybrid(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        "moe",
        sizes={**GATED_DELTA, **ALL_EXPERTS},
        **IN_BFLOAT16,
    ),
    hybrid(
        "Zamba2ForCausalLM",
        "zamba2",
        sizes={
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "n_mamba_heads": 4,
            "mamba_headdim": 32,
            "mamba_d_state": 32,
            "chunk_size": 64,
            "head_dim": DROP,
            "num_key_value_heads": 2,
            "use_mamba_kernels": False,
        },
        hf_class="Zamba2ForCausalLM",
        oracle=STOCK,
        note="vLLM's logits differ from those of transformers",
    ),
)
