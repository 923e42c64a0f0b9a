"""Models that read images, too, driven by text alone."""

from __future__ import annotations

from typing import Any

from architectures.rows import Row

TEXT_ALONE = {"language_model_only": True}


def seeing(name: str, model_type: str, *more: str, **fields: Any) -> Row:
    return Row(
        name=name,
        kinds=("vision-language", *more),
        model_type=model_type,
        options=TEXT_ALONE,
        **fields,
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
ROWS = (
    seeing("LlavaForConditionalGeneration", "llava", sizes={**LLAMA, "image_token_index": 259}),
    seeing("LlavaNextForConditionalGeneration", "llava_next", sizes=LLAMA),
    seeing("LlavaOnevisionForConditionalGeneration", "llava_onevision"),
    seeing("Qwen2VLForConditionalGeneration", "qwen2_vl", sizes=MROPE),
    seeing("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", sizes=MROPE),
    seeing("Qwen3VLForConditionalGeneration", "qwen3_vl", sizes=UNTIED),
    seeing("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "moe"),
    seeing("Gemma3ForConditionalGeneration", "gemma3", "sliding"),
    seeing("Idefics3ForConditionalGeneration", "idefics3", sizes=LLAMA),
    seeing("SmolVLMForConditionalGeneration", "smolvlm", sizes=LLAMA),
    seeing("InternVLForConditionalGeneration", "internvl"),
    seeing("Mistral3ForConditionalGeneration", "mistral3"),
    seeing("PaliGemmaForConditionalGeneration", "paligemma"),
    seeing("Cohere2VisionForConditionalGeneration", "cohere2_vision", "sliding"),
    seeing("Glm4vForConditionalGeneration", "glm4v", sizes=MROPE),
    seeing("Lfm2VlForConditionalGeneration", "lfm2_vl", "hybrid"),
    seeing("Llama4ForConditionalGeneration", "llama4", "moe"),
    seeing("Qwen3_5ForConditionalGeneration", "qwen3_5", "hybrid"),
)
