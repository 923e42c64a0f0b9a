"""Models that transformers does not have.

vLLM has them, and for some their config classes, too. The class of the others is remote code: they
get a stand-in, with the fields that vLLM reads. Their weights are drawn in vLLM, and the oracle is
stock vLLM.
"""

from __future__ import annotations

from typing import Any

from tiny_models import VOCAB_SIZE

from architectures.moe import INKLING, YARN
from architectures.recurrent import OPTIONS, PLAIN_ROTARY, ROTARY_NOTE
from architectures.rows import STOCK, Row
from architectures.sizes import FFN, HIDDEN, LAYERS, POSITIONS

NOTE = "transformers has no class for it"


def row(name: str, model_type: str, kinds: str, sizes: dict[str, Any], **fields: Any) -> Row:
    settings: dict[str, Any] = {"note": NOTE, **fields}
    return Row(
        name=name,
        kinds=tuple(kinds.split()),
        model_type=model_type,
        sizes=sizes,
        oracle=STOCK,
        **settings,
    )


MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": HIDDEN,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
BAILING = {
    **MOE,
    "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": HIDDEN,
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
SIGMOID = {"score_function": "sigmoid", "moe_router_enable_expert_bias": True}
MLA: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
SLIDING = ["sliding_attention", "full_attention"]
CHATGLM = {
    "num_layers": LAYERS,
    "padded_vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "kv_channels": 32,
    "num_attention_heads": 2,
    "seq_length": POSITIONS,
    "multi_query_attention": True,
    "multi_query_group_num": 1,
    "original_rope": True,
    "add_qkv_bias": True,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    **MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
PANGU = {**DEEPSEEK, "router_enable_expert_bias": True, "sandwich_norm": True}

DENSE = (
    row("ChatGLMModel", "chatglm", "dense", CHATGLM),
    row("ChatGLMForConditionalGeneration", "chatglm", "dense", CHATGLM),
    row(
        "DeciLMForCausalLM",
        "nemotron-nas",
        "dense",
        {
            "block_configs": [
                {
                    "attention": {"no_op": False, "n_heads_in_group": 2},
                    "ffn": {"no_op": False, "ffn_mult": 2.0},
                },
                {"attention": {"no_op": True}, "ffn": {"no_op": False, "ffn_mult": 2.0}},
                {
                    "attention": {"no_op": False, "n_heads_in_group": 1},
                    "ffn": {"no_op": True},
                },
            ],
            "num_hidden_layers": 3,
        },
    ),
    row(
        "ExaoneForCausalLM",
        "exaone",
        "dense",
        {"layer_norm_epsilon": 1e-5, "activation_function": "silu"},
    ),
    row(
        "Rnj1ForCausalLM",
        "rnj1",
        "dense sliding soft-cap",
        {
            "layer_types": SLIDING,
            "sliding_window": 32,
            "attention_bias": False,
            "final_logit_softcapping": 15.0,
            "query_pre_attn_scalar": 32,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        missing="attention on a CPU has no chunks that look back",
    ),
    row("InternLM2ForCausalLM", "internlm2", "dense", {"bias": False}),
    row(
        "IQuestLoopCoderForCausalLM",
        "iquestloopcoder",
        "dense sliding",
        {"loop_num": 2, "loop_window_size": 64, "max_window_layers": LAYERS},
    ),
    row(
        "MiniCPMForCausalLM",
        "minicpm",
        "dense",
        {"scale_emb": 2.0, "scale_depth": 1.4, "dim_model_base": 32, "num_experts": 0},
    ),
    row("MiMoForCausalLM", "mimo", "dense", {}),
    row("OrionForCausalLM", "orion", "dense", {}),
    row("PanguEmbeddedForCausalLM", "PanguEmbedded", "dense", {"bias": True}),
    row(
        "Plamo3ForCausalLM",
        "plamo3",
        "dense sliding",
        {
            "layer_types": SLIDING,
            "interleaved_sliding_window": [32, None],
            "rope_local_theta": 10000.0,
        },
    ),
    row(
        "Step1ForCausalLM",
        "step1",
        "dense alibi",
        {},
        missing="attention on a CPU has no square root of ALiBi's slopes",
    ),
    row(
        "SolarForCausalLM",
        "solar",
        "dense",
        {
            "num_hidden_layers": 6,
            "bskcn_1": [1],
            "bskcn_2": [2],
            "bskcn_3": [3],
            "bskcn_4": [4],
            "bskcn_tv": [0.9, 0.8],
        },
    ),
    row(
        "TeleChat2ForCausalLM",
        "telechat",
        "dense",
        {
            "n_head": 2,
            "n_layer": LAYERS,
            "ffn_hidden_size": FFN,
            "layer_norm_epsilon": 1e-5,
        },
    ),
    row(
        "TeleFLMForCausalLM",
        "teleflm",
        "dense scaled-head",
        {
            "use_mup": True,
            "mup_scale_factor": 2.0,
            "output_mult": 2.0,
            "input_mult": 1.0,
        },
    ),
)

MOES = (
    row("BailingMoeForCausalLM", "bailing_moe", "moe", BAILING),
    row("BailingMoeV2ForCausalLM", "bailing_moe_v2", "moe", {**BAILING, **SIGMOID}),
    row("DeepseekForCausalLM", "deepseek", "moe", {**DEEPSEEK, "num_key_value_heads": 2}),
    row(
        "K2HorizonForCausalLM",
        "k2_horizon",
        "moe",
        {
            **MOE,
            "attention_bias": False,
            "attention_gate_func": "softplus",
            "decoder_sparse_step": 1,
            "layernorm_num_groups": 1,
            "mlp_only_layers": [0],
            "moe_gate_bias": True,
            "mova_num_experts": 0,
            "mova_num_experts_per_tok": 0,
            "num_shared_experts": 1,
            "query_key_norm": True,
            "rope_head_dim": 32,
            "router_scaling_factor": 1.0,
            "router_score_func": "softmax",
        },
    ),
    row(
        "LongcatFlashNgramForCausalLM",
        "longcat_flash_ngram",
        "moe mla",
        {
            **DEEPSEEK,
            **MLA,
            "emb_neighbor_num": 2,
            "emb_split_num": 2,
            "ngram_vocab_size_ratio": 4,
            "zero_expert_num": 1,
            "zero_expert_type": "identity",
        },
        missing="needs Model Runner V2, which has no kernels for a CPU",
    ),
    row(
        "MiMoV2ForCausalLM",
        "mimo_v2",
        "moe sliding sinks",
        {
            **DEEPSEEK,
            "layernorm_epsilon": 1e-5,
            "attention_bias": False,
            "hybrid_layer_pattern": [0, 1],
            "moe_layer_freq": [0, 1],
            "sliding_window_size": 32,
            "swa_head_dim": 32,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 1,
            "v_head_dim": 32,
            "swa_v_head_dim": 32,
            "rope_theta": 10000.0,
            "swa_rope_theta": 10000.0,
            "add_swa_attention_sink_bias": True,
        },
    ),
    row(
        "MistralLarge3ForCausalLM",
        "deepseek_v3",
        "moe mla",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rope_parameters": YARN,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    row(
        "PanguProMoEV2ForCausalLM",
        "PanguProMoE",
        "moe sinks",
        {
            **PANGU,
            "param_sink_number": 4,
            "param_sink_with_value": True,
            "qk_nope_dim": 32,
            "qk_rope_dim": 32,
            "v_channels": 32,
        },
        missing="vLLM 0.32.0 itself fails: its manager of sink blocks does not take an argument that it is given",
    ),
    row("PanguUltraMoEForCausalLM", "pangu_ultra_moe", "moe mla", {**PANGU, **MLA}),
    row("Param2MoEForCausalLM", "param2moe", "moe", {**BAILING, **SIGMOID, "rope_theta": 1e4}),
    row("SarvamMoEForCausalLM", "sarvam_moe", "moe", {**BAILING, **SIGMOID}),
    row(
        "SarvamMLAForCausalLM",
        "sarvam_mla",
        "moe mla",
        {
            **BAILING,
            **SIGMOID,
            **MLA,
            "head_dim": 576,
            "q_lora_rank": None,
        },
        options=PLAIN_ROTARY,
        note=f"{NOTE}; {ROTARY_NOTE}",
    ),
    row(
        "Step3TextForCausalLM",
        "step3_text",
        "moe",
        {
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "vocab_size": VOCAB_SIZE,
            "moe_intermediate_size": HIDDEN,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "max_position_embedding": POSITIONS,
            "share_expert_dim": HIDDEN,
            "share_q_dim": HIDDEN,
            "head_dim": 32,
            "moe_layers_enum": "1",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    row(
        "Step3p5ForCausalLM",
        "step3p5",
        "moe sliding",
        {
            "num_attention_groups": 2,
            "num_attention_heads": 4,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "share_expert_dim": HIDDEN,
            "head_dim": 32,
            "moe_layers_enum": "1",
            "layer_types": ["full_attention", "sliding_attention"],
            "max_position_embeddings": POSITIONS,
            "rope_theta": 1e4,
            "sliding_window": 32,
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 4,
                "num_attention_groups": 2,
                "head_dim": 32,
            },
        },
    ),
)

HYBRID = (
    row(
        "BailingMoeV2_5ForCausalLM",
        "bailing_hybrid",
        "moe hybrid mla",
        {**BAILING, **SIGMOID, **MLA, "layer_group_size": 2, "num_key_value_heads": 2},
        options=OPTIONS,
        missing="latent attention on a CPU wants blocks of 16 tokens, and states beside it larger ones",
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
            "num_key_value_heads": 2,
            "index_topk": 32,
            "index_n_heads": 2,
            "index_head_dim": 32,
        },
    ),
    row("MiniMaxM3SparseForCausalLM", "minimax_m3_text", "moe", {**DEEPSEEK, "rope_theta": 1e4}),
    row("InklingForConditionalGeneration", "inkling_mm_model", "moe", {}, special_tokens=INKLING),
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
    ),
)

MUSE = row(
    "MuseGlimmerForCausalLM",
    "muse_glimmer_text",
    "dense sliding soft-cap",
    {"rope_theta": 1e4, "num_hidden_layers": 4},
)

ROWS = (*DENSE, MUSE, *MOES, *HYBRID, *HEAVY)
