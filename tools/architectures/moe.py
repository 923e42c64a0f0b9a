"""Mixtures of experts that transformers has, too."""

from __future__ import annotations

from tools.architectures.rows import DROP, STOCK, Row
from tools.architectures.sizes import FFN, HIDDEN, POSITIONS, STAND_IN

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
MLA = {"num_key_value_heads": 2, "head_dim": 64, "rope_parameters": YARN}
"""Each head has its own keys, and `head_dim` is the part of them with positions."""
NO_SPARSE = "sparse attention needs CUDA"
NO_SIGMOID = "vLLM's router for CPUs has no sigmoid without groups"
INKLING = tuple(
    f"<|{name}|>"
    for name in (
        *("message_user", "message_model", "message_system", "message_tool", "content_text"),
        *("content_image", "content_model_end_sampling", "content_thinking", "content_xml"),
        *("content_audio_input", "content_invoke_tool_json", "end_message", "audio_end"),
    )
)
V4 = {
    **STAND_IN,
    "moe_intermediate_size": HIDDEN,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "compress_ratios": [0, 4],
    "compress_rope_theta": 10000.0,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "num_hash_layers": 0,
    "head_dim": 512,
    "o_groups": 1,
    "o_lora_rank": 32,
    "index_n_heads": 2,
    "index_head_dim": 128,
    "index_topk": 32,
    "sliding_window": 128,
    "rope_parameters": DROP,
    "num_nextn_predict_layers": 0,
}
NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
SLIDING_FULL = ["sliding_attention", "full_attention"]


def moe(name: str, model_type: str, *more: str, **fields: object) -> Row:
    return Row(name=name, kinds=("moe", *more), model_type=model_type, **fields)  # type: ignore[arg-type]


ROWS = (
    moe(
        "AfmoeForCausalLM",
        "afmoe",
        "sliding",
        sizes={
            "score_func": "sigmoid",
            "route_norm": True,
            "num_shared_experts": 1,
            "layer_types": SLIDING_FULL,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    moe("AXK1ForCausalLM", "axk1", "mla", sizes={**MLA, **NOAUX, "first_k_dense_replace": 0}),
    moe(
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        "sliding",
        "tied-head",
        "scaled-head",
        sizes={
            "tie_word_embeddings": True,
            "logit_scale": 0.5,
            "layer_types": SLIDING_FULL,
            "mlp_layer_types": ["dense", "sparse"],
        },
        gains={r"o_proj|down_proj": 6.0, "embed_tokens": 2.0},
        hf_sizes={"sliding_window": 33},
        note="vLLM's window is one token longer than that of transformers, on purpose",
    ),
    moe(
        "DbrxForCausalLM",
        "dbrx",
        sizes={
            "d_model": HIDDEN,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": POSITIONS,
            "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": FFN, "moe_num_experts": 4, "moe_top_k": 2},
        },
        oracle=STOCK,
        note="vLLM cannot read the weights that transformers 5 writes",
    ),
    moe("DeepseekV2ForCausalLM", "deepseek_v2", "mla", sizes=MLA),
    moe("DeepseekV3ForCausalLM", "deepseek_v3", "mla", sizes={**MLA, **NOAUX}),
    moe("DeepseekV32ForCausalLM", "deepseek_v32", "mla", sizes=MLA, missing=NO_SPARSE),
    moe(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        "mla",
        oracle=STOCK,
        sizes=V4,
        missing="needs Triton, which has no kernels for a CPU",
    ),
    moe(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        gains={"correction_bias": 0.0},
        note="vLLM's router for CPUs leaves the correction bias out, which is 0 here",
    ),
    moe("ExaoneMoeForCausalLM", "exaone_moe"),
    moe("ExaoneMoEForCausalLM", "exaone_moe", hf_class="ExaoneMoeForCausalLM"),
    moe("Glm4MoeForCausalLM", "glm4_moe", sizes={"head_dim": 32}),
    moe(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        "mla",
        sizes={**MLA, **NOAUX, "first_k_dense_replace": 1},
    ),
    moe("GlmMoeDsaForCausalLM", "glm_moe_dsa", "mla", sizes=MLA, missing=NO_SPARSE),
    moe("GptOssForCausalLM", "gpt_oss", "sliding", "sinks"),
    moe("GraniteMoeForCausalLM", "granitemoe"),
    moe("GraniteMoeSharedForCausalLM", "granitemoeshared"),
    moe("GraniteMoeSWAForCausalLM", "granitemoe_swa", "sliding"),
    moe(
        "HYV3ForCausalLM",
        "hy_v3",
        sizes={
            "expert_hidden_dim": HIDDEN,
            "qk_norm": True,
            "first_k_dense_replace": 1,
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    moe("HYV4ForCausalLM", "hy_v4", missing=NO_SPARSE),
    moe("LagunaForCausalLM", "laguna", missing=NO_SIGMOID),
    moe(
        "Llama4ForCausalLM",
        "llama4_text",
        "chunked-attention",
        sizes={
            "num_experts_per_tok": 1,
            "attention_chunk_size": 64,
            "intermediate_size_mlp": FFN,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    moe(
        "LongcatFlashForCausalLM",
        "longcat_flash",
        "mla",
        sizes={
            **MLA,
            "num_layers": 1,
            "num_hidden_layers": DROP,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "moe_topk": 2,
            "zero_expert_num": 0,
            "zero_expert_type": "identity",
            "expert_ffn_hidden_size": HIDDEN,
            "ffn_hidden_size": FFN,
            "intermediate_size": DROP,
            "moe_intermediate_size": DROP,
        },
        missing="its router of experts that do nothing is a CUDA kernel",
    ),
    moe(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        sizes={"rotary_dim": 16, "scoring_func": "softmax"},
        oracle=STOCK,
        note="with softmax in the router: vLLM's router for CPUs has no sigmoid, which M2 uses",
    ),
    moe(
        "InklingForCausalLM",
        "inkling_text",
        sizes={"tie_word_embeddings": False},
        oracle=STOCK,
        special_tokens=INKLING,
        missing="needs Triton, which has no kernels for a CPU",
    ),
    moe("MixtralForCausalLM", "mixtral"),
    moe(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        "sliding",
        "sinks",
        sizes={
            "hybrid_layer_pattern": [0, 1],
            "layer_types": ["full_attention", "sliding_attention"],
            "moe_layer_freq": [0, 1],
            "layernorm_epsilon": 1e-5,
            "sliding_window_size": 32,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 1,
            "add_swa_attention_sink_bias": True,
            "attention_value_scale": 0.707,
        },
        hf_class="MiMoV2FlashForCausalLM",
        oracle=STOCK,
        note="vLLM's logits differ from those of transformers",
    ),
    moe("OlmoeForCausalLM", "olmoe"),
    moe(
        "PhiMoEForCausalLM",
        "phimoe",
        hf_class="PhimoeForCausalLM",
        sizes={"attention_bias": True, "lm_head_bias": False},
        note="without a bias of the head, which vLLM leaves out",
    ),
    moe("Qwen2MoeForCausalLM", "qwen2_moe"),
    moe("Qwen3MoeForCausalLM", "qwen3_moe"),
    moe(
        "Qwen4ExpForCausalLM",
        "qwen4_exp_text",
        oracle=STOCK,
        sizes={"output_gate_type": "sigmoid"},
        missing="needs Triton, which has no kernels for a CPU",
    ),
)
