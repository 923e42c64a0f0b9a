"""Stand-ins with states, sparse attention or eyes: see stand_ins.py."""

from __future__ import annotations

from tools.architectures.moe import INKLING
from tools.architectures.recurrent import OPTIONS
from tools.architectures.sizes import FFN
from tools.architectures.stand_ins import BAILING, DEEPSEEK, MLA, SIGMOID, row

HYBRID = (
    row(
        "BailingMoeV2_5ForCausalLM",
        "bailing_hybrid",
        "moe hybrid mla",
        {**BAILING, **SIGMOID, **MLA, "layer_group_size": 2, "num_key_value_heads": 2},
        options=OPTIONS,
        missing="latent attention wants blocks of 16 tokens, and states beside it larger ones",
    ),
    row(
        "BailingMoeV3ForCausalLM",
        "bailing_hybrid",
        "moe hybrid mla",
        {
            **BAILING,
            **SIGMOID,
            **MLA,
            "layer_group_size": 2,
            "no_kda_lora": True,
            "short_conv_kernel_size": 4,
            "rope_theta": 1e4,
            "num_key_value_heads": 2,
        },
        options=OPTIONS,
        missing="latent attention wants blocks of 16 tokens, and states beside it larger ones",
    ),
)
HEAVY = (
    row(
        "Glm5NextForCausalLM",
        "glm5_next_text",
        "moe mla",
        {
            **DEEPSEEK,
            **MLA,
            "qk_rope_head_dim": 0,
            "mhc": False,
            "num_key_value_heads": 2,
            "index_topk": 32,
            "index_n_heads": 2,
            "index_head_dim": 32,
        },
        options=OPTIONS,
        missing="its linear attention needs CUDA",
    ),
    row(
        "MiniMaxM3SparseForCausalLM",
        "minimax_m3_text",
        "moe",
        {
            **DEEPSEEK,
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "moe_layer_freq": [0, 1],
            "dense_intermediate_size": FFN,
            "num_local_experts": 4,
            "scoring_func": "softmax",
            "swiglu_alpha": 1.0,
            "swiglu_beta": 0.0,
            "swiglu_limit": 7.0,
            "use_gemma_norm": True,
            "hidden_act": "swigluoai",
        },
        missing="its experts have no kernel for a CPU (swigluoai without biases)",
    ),
    row(
        "InklingForConditionalGeneration",
        "inkling_mm_model",
        "moe",
        {},
        special_tokens=INKLING,
        missing="needs Triton, which has no kernels for a CPU",
    ),
    row(
        "NemotronHPuzzleForCausalLM",
        "nemotron_h_puzzle",
        "hybrid",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "hybrid_override_pattern": "M*-M",
            "num_hidden_layers": 4,
            "block_configs": [
                {"block_type": "mamba"},
                {"block_type": "attention"},
                {"block_type": "mlp", "intermediate_size": FFN},
                {"block_type": "mamba"},
            ],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 1,
            "chunk_size": 64,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "mlp_bias": False,
            "mamba_proj_bias": False,
            "attention_bias": False,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "layer_norm_epsilon": 1e-5,
            "residual_in_fp32": False,
            "mamba_ssm_cache_dtype": "float32",
        },
        options=OPTIONS,
    ),
    row(
        "HCXVisionV2ForCausalLM",
        "hyperclovax_vision_v2",
        "vision-language",
        {"text_config": {}, "vision_config": {}},
        missing="needs remote code: its image processor",
    ),
)

ROWS = (*HYBRID, *HEAVY)
