"""Dense decoders that transformers has, too."""

from __future__ import annotations

from tests.engine.tiny_models import VOCAB_SIZE
from tools.architectures.rows import DROP, STOCK, Row
from tools.architectures.sizes import FFN

TIED = {"tie_word_embeddings": True}
LOUD_BLOCKS = {r"(o_proj|down_proj|dense|dense_4h_to_h|out_proj|fc2)\.weight": 6.0}
"""Embedding and head are one matrix, so blocks must speak louder than the last token."""
LOUD_NORMS = {"post_.*norm": 60.0}
"""The same for models with norms after each block."""
SLIDING_FULL = ["sliding_attention", "full_attention"]


def dense(name: str, model_type: str, *more: str, **fields: object) -> Row:
    return Row(name=name, kinds=("dense", *more), model_type=model_type, **fields)  # type: ignore[arg-type]


ROWS = (
    dense(
        "ApertusForCausalLM",
        "apertus",
        sizes={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    dense("BloomForCausalLM", "bloom", "alibi", "tied-head", sizes=TIED, gains=LOUD_BLOCKS),
    dense(
        "CohereForCausalLM",
        "cohere",
        "tied-head",
        "scaled-head",
        sizes={**TIED, "logit_scale": 0.5},
        gains={**LOUD_BLOCKS, "embed_tokens": 2.0},
    ),
    dense(
        "Cohere2ForCausalLM",
        "cohere2",
        "tied-head",
        "scaled-head",
        "sliding",
        sizes={**TIED, "logit_scale": 0.5, "layer_types": SLIDING_FULL},
        gains={**LOUD_BLOCKS, "embed_tokens": 2.0},
        hf_sizes={"sliding_window": 33},
        note="vLLM's window is one token longer than that of transformers, on purpose",
    ),
    dense("Ernie4_5ForCausalLM", "ernie4_5"),
    dense(
        "Exaone4ForCausalLM",
        "exaone4",
        "sliding",
        sizes={"layer_types": SLIDING_FULL, "sliding_window_pattern": DROP},
    ),
    dense("FalconForCausalLM", "falcon"),
    dense("GemmaForCausalLM", "gemma"),
    dense(
        "Gemma2ForCausalLM",
        "gemma2",
        "sliding",
        "soft-cap",
        "tied-head",
        sizes={
            **TIED,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 15.0,
            "layer_types": SLIDING_FULL,
        },
        gains=LOUD_NORMS,
    ),
    dense(
        "Gemma3ForCausalLM",
        "gemma3_text",
        "sliding",
        sizes={"query_pre_attn_scalar": 32, "layer_types": SLIDING_FULL},
    ),
    dense(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        "sliding",
        "soft-cap",
        "shared-kv",
        sizes={
            "num_hidden_layers": 4,
            "layer_types": SLIDING_FULL * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 16,
            "intermediate_size": [FFN] * 4,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
            "tie_word_embeddings": True,
        },
        gains=LOUD_NORMS,
        hf_class="Gemma3nForCausalLM",
        oracle=STOCK,
        note="vLLM's logits differ from those of transformers",
    ),
    dense(
        "Gemma4ForCausalLM",
        "gemma4_text",
        "sliding",
        "moe",
        sizes={
            "layer_types": SLIDING_FULL,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 32,
            "global_head_dim": 64,
        },
    ),
    dense("Glm4ForCausalLM", "glm4"),
    dense("GPT2LMHeadModel", "gpt2"),
    dense("GPTJForCausalLM", "gptj", "biased-head", sizes={"rotary_dim": 32}),
    dense("GraniteForCausalLM", "granite", "scaled-head", sizes={"logits_scaling": 0.5}),
    dense("GraniteSWAForCausalLM", "granite_swa", "sliding"),
    dense(
        "HrmTextForCausalLM",
        "hrm_text",
        hf_class="HrmTextForCausalLM",
        oracle=STOCK,
        missing="guidance is refused: it reads a prompt in both directions, so that its text"
        " depends on the steps in which the prompt is read",
    ),
    dense("HyperCLOVAXForCausalLM", "hyperclovax"),
    dense("LlamaForCausalLM", "llama"),
    dense("LLaMAForCausalLM", "llama", hf_class="LlamaForCausalLM"),
    dense("InternLM3ForCausalLM", "llama", hf_class="LlamaForCausalLM"),
    dense("IQuestCoderForCausalLM", "llama", hf_class="LlamaForCausalLM"),
    dense("TeleChat3ForCausalLM", "llama", hf_class="LlamaForCausalLM"),
    dense(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        "mla",
        sizes={"num_key_value_heads": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 32},
    ),
    dense("Ministral3ForCausalLM", "ministral3"),
    dense("MistralForCausalLM", "mistral", "sliding"),
    dense("NemotronForCausalLM", "nemotron"),
    dense("OPTForCausalLM", "opt", sizes={"ffn_dim": 128, "word_embed_proj_dim": 64}),
    dense("Phi3ForCausalLM", "phi3", "sliding"),
    dense("Qwen2ForCausalLM", "qwen2"),
    dense("Qwen3ForCausalLM", "qwen3"),
    dense("StableLmForCausalLM", "stablelm"),
)
