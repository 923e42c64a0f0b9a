"""Random-weight models that see: LLaVA, and Qwen2-VL with its positions in three dimensions.

Their processors are made here, too: no hub. Images are 28 x 28 pixels, and have 16 or 4 tokens.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.models.paddleocr_vl.configuration_paddleocr_vl import PaddleOCRVLConfig
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.paddleocr_vl.modeling_paddleocr_vl import (
    PaddleOCRVLForConditionalGeneration,
)
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

from tests.engine.tiny_models import (
    DECODER,
    HEAD_STD,
    HIDDEN,
    SPECIAL_IDS,
    VOCAB_SIZE,
    make_tokenizer,
)

PLACES = {
    "llava": "<image>",
    "paddleocr_vl": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
}
"""How a prompt shows where its image is."""

STAND_IN = Path(__file__).parents[1] / "support" / "torchvision_stand_in"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}IMAGE{% endif %}{% endfor %}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def use_stand_in() -> None:
    """Let vLLM's image models be imported in this process if there is no torchvision."""
    sys.path.append(str(STAND_IN))
    import torchvision_stand_in

    torchvision_stand_in.install()


def llava() -> tuple[PreTrainedModel, ProcessorMixin]:
    image_token = VOCAB_SIZE
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=28,
            patch_size=7,
        ),
        text_config=LlamaConfig(**{**DECODER, "vocab_size": VOCAB_SIZE + 1}),
        image_token_index=image_token,
        image_seq_length=16,
        tie_word_embeddings=False,
        **SPECIAL_IDS,
    )
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE", "<image>")
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return LlavaForConditionalGeneration(config), processor


def paddleocr_vl() -> tuple[PreTrainedModel, ProcessorMixin]:
    """Positions in three dimensions (M-RoPE), as in Qwen2-VL, which needs torchvision."""
    names = ["<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", "<|video_pad|>"]
    start, image, end, video = range(VOCAB_SIZE, VOCAB_SIZE + 4)
    config = PaddleOCRVLConfig(
        text_config={
            **DECODER,
            "vocab_size": VOCAB_SIZE + 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config={
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        **SPECIAL_IDS,
    )
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("IMAGE", PLACES["paddleocr_vl"])
    tokenizer._set_model_specific_special_tokens({"image_token": names[1]})
    image_processor = PaddleOCRVLImageProcessorPil(
        patch_size=7, merge_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    )
    processor = PaddleOCRVLProcessor(
        image_processor, tokenizer, chat_template=tokenizer.chat_template
    )
    return PaddleOCRVLForConditionalGeneration(config), processor


MODELS: dict[str, Callable[[], tuple[PreTrainedModel, ProcessorMixin]]] = {
    "llava": llava,
    "paddleocr_vl": paddleocr_vl,
}
RENAMED = {"vision_tower.": "vision_tower.vision_model."}
"""How published checkpoints, and so vLLM, call what transformers now writes under another name."""


def build_vision(name: str, folder: Path, seed: int = 0) -> Path:
    """Write model `name` and its processor to `folder`, float32, and return it."""
    model, processor = MODELS[name]()
    draw(model.eval(), torch.Generator().manual_seed(seed))
    model.config.dtype = "float32"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if name == "llava":
        file = folder / "model.safetensors"
        renamed = {_published(key): value for key, value in load_file(file).items()}
        save_file(renamed, file, {"format": "pt"})
    return folder


def _published(key: str) -> str:
    for now, before in RENAMED.items():
        key = key if before in key else key.replace(now, before)
    return key


@torch.no_grad()
def draw(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Overwrite every parameter: matrices keep the variance of their input (see tiny_models)."""
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if noise.dim() == 1:
            values = noise * 0.1 + (0 if name.endswith("bias") or "class" in name else 1)
        elif "lm_head" in name:
            values = noise * HEAD_STD / math.sqrt(HIDDEN)
            values[VOCAB_SIZE:] = 0  # never the most likely: transformers would ask for its image
        elif "embed_tokens" in name or "position_embedding" in name:
            values = noise
        else:
            gain = 3 if "q_proj" in name else 1
            values = noise * gain / math.sqrt(noise[0].numel())
        weight.copy_(values)


def picture(seed: int, size: int = 28) -> Image.Image:
    """A picture of four random colours."""
    rng = random.Random(seed)
    small = np.array([[[rng.randrange(256) for _ in range(3)] for _ in "ab"] for _ in "ab"])
    return Image.fromarray(small.astype(np.uint8)).resize((size, size), Image.Resampling.NEAREST)


def noised(image: Image.Image, seed: int = 0, share: float = 0.9) -> Image.Image:
    """The picture under Gaussian noise, as in VCD."""
    rng = np.random.default_rng(seed)
    values = np.asarray(image, dtype=np.float32) / 255
    noise = rng.normal(size=values.shape).astype(np.float32)
    mixed = math.sqrt(1 - share) * values + math.sqrt(share) * noise
    return Image.fromarray((mixed.clip(0, 1) * 255).astype(np.uint8))


class Streams:
    """What transformers says of a prompt with images, as a function of the tokens after it."""

    def __init__(self, folder: Path, name: str, seed: int = 0) -> None:
        from transformers import AutoProcessor

        self.model = MODELS[name]()[0].eval()
        self.model.set_attn_implementation("eager")
        draw(self.model, torch.Generator().manual_seed(seed))
        self.processor: Any = AutoProcessor.from_pretrained(folder)

    def prompt(
        self, text: str, images: list[Image.Image], is_chat: bool = False
    ) -> dict[str, torch.Tensor]:
        """Inputs of the model. A text made by a chat template has its special tokens already."""
        given = {"images": images} if images else {}
        special = {"add_special_tokens": not is_chat}
        return dict(self.processor(text=text, return_tensors="pt", **given, **special))

    @torch.inference_mode()
    def log_probs(self, prompt: dict[str, torch.Tensor], output: list[int]) -> torch.Tensor:
        """Log-probabilities of the next token, in float32."""
        more = torch.tensor([output], dtype=torch.long)
        inputs = dict(prompt)
        inputs["input_ids"] = torch.cat([prompt["input_ids"], more], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in prompt:
            types = torch.zeros_like(more, dtype=prompt["mm_token_type_ids"].dtype)
            inputs["mm_token_type_ids"] = torch.cat([prompt["mm_token_type_ids"], types], 1)
        logits = self.model(**inputs, use_cache=False).logits[0, -1]
        return torch.log_softmax(logits.float(), -1)

    def generate(
        self,
        prompts: list[dict[str, torch.Tensor]],
        weights: list[float],
        new_tokens: int,
        min_p: float = 0.0,
    ) -> tuple[list[int], float]:
        """Greedy tokens of the weighted sum, and the least gap between the two best.

        min_p: tokens less likely than this share of the first stream's best are left out, as in
        VCD.
        """
        output: list[int] = []
        least = math.inf
        for _ in range(new_tokens):
            rows = [self.log_probs(prompt, output) for prompt in prompts]
            blend = sum(w * row for w, row in zip(weights, rows, strict=True))
            assert isinstance(blend, torch.Tensor)
            if min_p:
                blend = blend.masked_fill(rows[0] < rows[0].max() + math.log(min_p), -math.inf)
            best = blend.topk(2)
            least = min(least, float(best.values[0] - best.values[1]))
            output.append(int(best.indices[0]))
        return output, least
