"""Models that read images, too, driven by text alone."""

from __future__ import annotations

from typing import Any

from tools.architectures.recurrent import (
    GATED_DELTA,
    IN_BFLOAT16,
    LOUD_BLOCKS,
    OPTIONS,
)
from tools.architectures.rows import PLAIN_ROTARY, ROTARY_NOTE, STOCK, Row
from tools.architectures.sizes import FFN, HIDDEN

TEXT_ALONE = {"language_model_only": True}


def seeing(name: str, model_type: str, *more: str, **fields: Any) -> Row:
    return Row(
        name=name,
        kinds=("vision-language", *more),
        model_type=model_type,
        **{"options": TEXT_ALONE, **fields},
    )


LLAMA = {"text_config": {"model_type": "llama"}}
UNTIED = {"text_config": {"tie_word_embeddings": False}}
MROPE = {
    "text_config": {
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 6, 6],
        },
    }
}
GLM4V = {
    "text_config": {
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 3, 3],
        },
    }
}
ROWS = (
    seeing("LlavaForConditionalGeneration", "llava", sizes={**LLAMA, "image_token_index": 259}),
    seeing("LlavaNextForConditionalGeneration", "llava_next", sizes=LLAMA),
    seeing("LlavaOnevisionForConditionalGeneration", "llava_onevision"),
    seeing("Qwen2VLForConditionalGeneration", "qwen2_vl", sizes=MROPE),
    seeing("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", sizes=MROPE),
    seeing("Qwen3VLForConditionalGeneration", "qwen3_vl", sizes=UNTIED),
    seeing(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        "moe",
        sizes={
            "text_config": {
                "tie_word_embeddings": False,
                "norm_topk_prob": True,
            }
        },
        oracle=STOCK,
        note="vLLM cannot read the weights that transformers 5 writes",
    ),
    seeing("Gemma3ForConditionalGeneration", "gemma3", "sliding"),
    seeing("Idefics3ForConditionalGeneration", "idefics3", sizes=LLAMA),
    seeing("SmolVLMForConditionalGeneration", "smolvlm", sizes=LLAMA),
    seeing("InternVLForConditionalGeneration", "internvl"),
    seeing("Mistral3ForConditionalGeneration", "mistral3"),
    seeing("PaliGemmaForConditionalGeneration", "paligemma"),
    seeing(
        "Cohere2VisionForConditionalGeneration",
        "cohere2_vision",
        "sliding",
        "tied-head",
        sizes={
            "tie_word_embeddings": True,
            "text_config": {
                "tie_word_embeddings": True,
                "logit_scale": 0.5,
                "layer_types": ["full_attention", "full_attention"],
            },
        },
        gains={r"o_proj|down_proj": 6.0, "embed_tokens": 2.0},
    ),
    seeing(
        "Glm4vForConditionalGeneration",
        "glm4v",
        sizes=GLM4V,
        hf_class="Glm4vForConditionalGeneration",
        oracle=STOCK,
        note="vLLM's logits differ from those of transformers",
    ),
    seeing(
        "Lfm2VlForConditionalGeneration",
        "lfm2_vl",
        "hybrid",
        sizes={
            "tie_word_embeddings": True,
            "text_config": {
                "layer_types": ["conv", "full_attention"],
                "conv_dim": HIDDEN,
                "conv_L_cache": 3,
                "block_auto_adjust_ff_dim": False,
                "block_ff_dim": FFN,
                "block_dim": HIDDEN,
                "tie_word_embeddings": True,
            },
        },
        gains=LOUD_BLOCKS,
        options={**TEXT_ALONE, **OPTIONS, **PLAIN_ROTARY},
        note=ROTARY_NOTE,
    ),
    seeing(
        "Llama4ForConditionalGeneration",
        "llama4",
        "moe",
        "chunked-attention",
        sizes={
            "text_config": {
                "num_experts_per_tok": 1,
                "attention_chunk_size": 64,
                "intermediate_size_mlp": FFN,
                "interleave_moe_layer_step": 2,
                "num_hidden_layers": 4,
                "no_rope_layers": [1, 1, 1, 0],
            }
        },
    ),
    seeing(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        "hybrid",
        sizes={"text_config": {**GATED_DELTA, "dtype": "bfloat16"}},
        **{**IN_BFLOAT16, "options": {**TEXT_ALONE, **OPTIONS}},
    ),
)
