"""Models that transformers does not have.

vLLM has them, and for some their config classes, too. The class of the others is remote code: they
get a stand-in, with the fields that vLLM reads. Their weights are drawn in vLLM, and the oracle is
stock vLLM.
"""

from __future__ import annotations

from typing import Any

from tools.architectures.rows import STOCK, Row
from tools.architectures.sizes import HIDDEN

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
