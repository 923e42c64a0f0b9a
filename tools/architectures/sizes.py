"""The config of a tiny model of any family: generic sizes by the names of fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.engine.tiny_models import BOS, EOS, PAD, VOCAB_SIZE, make_tokenizer
from tools.architectures.rows import DROP, STOCK, Row

HIDDEN, HEADS, HEAD_DIM, LAYERS, FFN, POSITIONS, EXPERTS = 64, 2, 32, 2, 128, 512, 4

GENERIC: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS,
    # GPT-2 and its relatives
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": POSITIONS,
    # mixtures of experts
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": HIDDEN,
    "shared_expert_intermediate_size": HIDDEN,
    "shared_intermediate_size": HIDDEN,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # multi-head latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 512,  # vLLM's kernel for CPUs knows one size
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    # windows
    "sliding_window": 32,
    # what looks at images
    "depth": LAYERS,
    "num_layers": LAYERS,
    "embed_dim": HIDDEN,
    "num_heads": HEADS,
    "out_hidden_size": HIDDEN,
    "image_size": 28,
    "patch_size": 14,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "window_size": 56,
    "projection_dim": HIDDEN,
    # heads
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
"""Values of the fields that a config class has. Head sizes on a CPU are multiples of 32."""


STAND_IN: dict[str, Any] = {
    **{name: GENERIC[name] for name in list(GENERIC)[:8]},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
"""Fields of every stand-in: those of a Llama."""


NOT_THEIRS = ("deepseek_v4",)
"""Model types for which transformers has a class whose fields vLLM cannot use."""


class StandIn(PreTrainedConfig):  # type: ignore[misc]
    """A config class for families whose own one is remote code: its fields are what it is given."""

    model_type = "cfg_serve_stand_in"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{name: readable(value) for name, value in fields.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        """Its class is made here, so pickle, which sends it to vLLM's ranks, would not find it."""
        return _empty, (self.model_type,), self.__dict__


def _empty(model_type: str) -> PreTrainedConfig:
    made: PreTrainedConfig = object.__new__(config_class(model_type))
    return made


class Fields(dict[str, Any]):
    """A part of a stand-in, whose fields are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        value = self[name]
        return Fields(value) if isinstance(value, dict) else readable(value)


def readable(value: Any) -> Any:
    """Lists of mappings as lists of Fields."""
    if isinstance(value, list):
        return [Fields(one) if isinstance(one, dict) else one for one in value]
    return value


def config_class(model_type: str) -> type[PreTrainedConfig]:
    """The class that vLLM would take: its own, that of transformers, or a stand-in."""
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for known in (CONFIG_MAPPING, _CONFIG_REGISTRY):
        if model_type in known and (known is _CONFIG_REGISTRY or model_type not in NOT_THEIRS):
            found: type[PreTrainedConfig] = known[model_type]
            return found
    # transformers would give a class without __init__ one of its own
    fields = {"model_type": model_type, "__init__": StandIn.__init__}
    made: type[PreTrainedConfig] = type("StandIn", (StandIn,), fields)
    AutoConfig.register(model_type, made)
    return made


def make_config(row: Row) -> PreTrainedConfig:
    """The tiny config of a row."""
    cls = config_class(row.model_type)
    fields = sized(cls, row.sizes)
    config = cls(**fields)
    config.architectures = [row.name]
    config.dtype = row.dtype
    return config


def sized(cls: type[PreTrainedConfig], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config class: the generic ones that it has, and `sizes`.

    Configs in a config are made in the same way. Their `sizes` are a mapping in `sizes`.
    """
    if issubclass(cls, StandIn):
        fields = {**STAND_IN, **sizes}
    else:
        default = cls()
        known = {*default.to_dict(), *cls.attribute_map, *cls.attribute_map.values()}
        fields = {name: value for name, value in GENERIC.items() if name in known}
        fields |= sizes
        for name in cls.sub_configs:
            inner = sizes.get(name, {})
            if inner is not DROP and (inner or getattr(default, name, None) is not None):
                fields[name] = sized_part(getattr(default, name, None), inner)
    return {name: value for name, value in fields.items() if value is not DROP}


def sized_part(default: PreTrainedConfig | None, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config in a config, whose class is named by `model_type` or the default's."""
    model_type = sizes.get("model_type") or getattr(default, "model_type", "")
    named = model_type in CONFIG_MAPPING and "model_type" in sizes
    cls = CONFIG_MAPPING[model_type] if named or default is None else type(default)
    return {"model_type": model_type, **sized(cls, sizes)}


def write_tokenizer(row: Row, folder: Path) -> None:
    """Write the tokenizer of bytes."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": list(row.special_tokens)})
    tokenizer.save_pretrained(folder)


def write_config(row: Row, folder: Path) -> None:
    """Write config.json alone: the weights are drawn by loader.py."""
    assert row.oracle == STOCK
    config = make_config(row)
    text = {**json.loads(config.to_json_string()), "architectures": [row.name]}
    (folder / "config.json").write_text(json.dumps(text, indent=1), encoding="utf-8")
