"""The factories of one engine's logits processors, for its frontend and for its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cfg_core.logits_processors.base import EngineInfo
from cfg_core.logits_processors.registry import Registry
from cfg_core.vllm_plugin.config import processors_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def registry_of(config: VllmConfig) -> Registry:
    """All factories that requests of this engine may name. Raises ConfigError if one is broken."""
    return Registry.load(processors_of(config), engine_info(config.model_config))


def engine_info(model: ModelConfig) -> EngineInfo:
    """What factories are told about the engine that runs this model."""

    def tokenizer() -> Any:
        from vllm.tokenizers import cached_tokenizer_from_config

        found = cached_tokenizer_from_config(model)
        if found is None:
            raise ValueError("this engine has no tokenizer (skip_tokenizer_init)")
        return found

    ends: set[int] = set()
    for config in (model.hf_text_config.to_dict(), model.try_get_generation_config()):
        end = config.get("eos_token_id")
        ends.update([end] if isinstance(end, int) else end or [])
    return EngineInfo(model.get_vocab_size(), tokenizer, tuple(sorted(ends)))
