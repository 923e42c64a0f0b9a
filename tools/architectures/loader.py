"""A loader of vLLM that draws weights instead of reading them: for models without a checkpoint.

A stock and a guided engine on the same folder get the same weights.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from tools.architectures.draw import draw

FORMAT = "cfg_serve_drawn"


@register_model_loader(FORMAT)
class DrawnModelLoader(BaseModelLoader):
    """Draws every parameter by the rules of draw.py.

    The extra config holds `seed` and `gains`.
    """

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: Any, model_config: Any) -> None:
        extra = self.load_config.model_loader_extra_config
        tied = bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))
        draw(model.named_parameters(), extra["seed"], tied=tied, gains=extra["gains"])
