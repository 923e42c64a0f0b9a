"""Rerankers that are causal language models: which checkpoints are, and how they are asked.

Their score is the probability of one token (such as "yes") against another one ("no"), after a
prompt that holds the query and the document. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cfg_core.errors import ConfigError
from cfg_core.prefill_only.models.pair_template import (
    QWEN3_RERANKER,
    QWEN3_RERANKER_LENGTH,
    QWEN3_RERANKER_TOKENS,
    PairTemplate,
    is_qwen3_reranker,
)
from cfg_core.prefill_only.models.settings import kinds_of, read_json
from cfg_core.prefill_only.options import EngineOptions


def is_logit_score(
    path: Path,
    config: Mapping[str, Any],
    modules: list[dict[str, Any]],
    options: EngineOptions,
) -> bool:
    """Whether this causal language model is a reranker, by the options or by its files."""
    if options.classifier_from_token or "LogitScore" in kinds_of(modules):
        return True
    if modules or options.pooling or not _is_causal_lm(config):
        return False
    return bool(config.get("classifier_from_token")) or is_qwen3_reranker(path, config)


def logit_score(
    path: Path,
    config: Mapping[str, Any],
    modules: list[dict[str, Any]],
    options: EngineOptions,
) -> dict[str, Any]:
    """The settings of such a reranker.

    Its template may still be None: then the tokenizer's chat template is asked for it.
    """
    if not _is_causal_lm(config):
        raise ConfigError(
            f"{path} is no causal language model ({_architecture(config)}), so its tokens have no"
            " logits: leave `classifier_from_token` out."
        )
    is_qwen3 = is_qwen3_reranker(path, config) and "LogitScore" not in kinds_of(modules)
    tokens = tuple(options.classifier_from_token) or _tokens(path, config, modules)
    settings: dict[str, Any] = {
        "head": "logit_score",
        "poolings": ("last",),
        "score_tokens": tokens,
        "activation": "sigmoid",
        "labels": (str(tokens[-1]),),
        "template": template_of(path, options),
    }
    if is_qwen3:
        settings["max_seq_length"] = QWEN3_RERANKER_LENGTH
        settings["template"] = settings["template"] or replace(
            QWEN3_RERANKER, instruction=options.instruction or QWEN3_RERANKER.instruction
        )
    return settings


def _tokens(
    path: Path, config: Mapping[str, Any], modules: list[dict[str, Any]]
) -> tuple[str | int, ...]:
    kinds = kinds_of(modules)
    if "LogitScore" not in kinds:
        return tuple(config.get("classifier_from_token") or QWEN3_RERANKER_TOKENS)
    if kinds != ["Transformer", "LogitScore"]:
        raise ConfigError(
            f"modules.json lists {', '.join(kinds)}: a reranker must be Transformer, LogitScore."
            " Serve this model with sentence-transformers."
        )
    scores = read_json(path / modules[1]["path"] / "config.json")
    yes, no = scores.get("true_token_id"), scores.get("false_token_id")
    if not isinstance(yes, int):
        raise ConfigError(f"{modules[1]['path']}/config.json has no true_token_id.")
    return (yes,) if no is None else (int(no), yes)


def template_of(path: Path, options: EngineOptions) -> PairTemplate | None:
    """The template that the options name."""
    if options.score_template is None:
        return None
    return PairTemplate(text=options.score_template, instruction=options.instruction or "")


def check_embeds(
    path: Path,
    config: Mapping[str, Any],
    modules: list[dict[str, Any]],
    options: EngineOptions,
) -> None:
    """Raise ConfigError for a language model that nothing says to be a retriever.

    Its states would make vectors, but not useful ones.
    """
    bidirectional = config.get("is_causal") is False
    if modules or options.pooling or bidirectional or not _is_causal_lm(config):
        return
    raise ConfigError(
        f"{path} is a causal language model ({_architecture(config)}), and no file of it says what"
        " to compute. In the engine's options, set `pooling: last` (or mean) if it was trained as a"
        ' retriever; set `classifier_from_token: ["no", "yes"]` and `score_template` if it was'
        " trained as a reranker. To generate text, serve it as the model."
    )


def _architecture(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or ["no architecture"])[0])


def _is_causal_lm(config: Mapping[str, Any]) -> bool:
    return _architecture(config).endswith("ForCausalLM")
