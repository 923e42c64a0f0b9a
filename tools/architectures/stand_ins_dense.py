"""Dense stand-ins: see stand_ins.py."""

from __future__ import annotations

from tests.engine.tiny_models import VOCAB_SIZE
from tools.architectures.sizes import FFN, HIDDEN, LAYERS, POSITIONS
from tools.architectures.stand_ins import row

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

ROWS = (
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
    row(
        "MuseGlimmerForCausalLM",
        "muse_glimmer_text",
        "dense sliding soft-cap",
        {"rope_theta": 1e4, "num_hidden_layers": 4},
    ),
)
