"""Reads the files of a model directory into the settings of a Checkpoint, as keyword arguments.

It reads `config.json`, `modules.json` (Transformer, Pooling, Dense, Normalize, MLMTransformer,
SpladePooling), `1_Pooling/config.json`, `sentence_bert_config.json`,
`config_sentence_transformers.json`, and the head files of bge-m3 (`sparse_linear.pt`,
`colbert_linear.pt`). Anything else that would change the result is an error. This module does not
import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cfg_core.errors import ConfigError
from cfg_core.prefill_only.options import EngineOptions

POOLINGS = ("cls", "mean", "last", "max", "weightedmean", "mean_sqrt_len_tokens")
_POOLING_FLAGS = {  # keys of 1_Pooling/config.json before sentence-transformers 5.4
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}


Activation = Literal["sigmoid", "softmax", "identity"]
_ACTIVATIONS: dict[str, Activation] = {  # by the names of torch's classes
    "Identity": "identity",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """A `Dense` module after the pooling.

    path: the directory of its weights.

    activation: the name of a class of torch.nn.
    """

    path: Path
    activation: str
    bias: bool


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from None
    return value if isinstance(value, dict) else {}


def module_list(path: Path) -> list[dict[str, Any]]:
    file = path / "modules.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []


def sentence_transformers_settings(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    transformer = read_json(path / "sentence_bert_config.json")
    model = read_json(path / "config_sentence_transformers.json")
    dimensions = tuple(config.get("matryoshka_dimensions") or ())
    return {
        "max_seq_length": transformer.get("max_seq_length"),
        "lower_case": bool(transformer.get("do_lower_case")),
        "prompts": {name: text for name, text in (model.get("prompts") or {}).items() if text},
        "default_prompt_name": model.get("default_prompt_name"),
        "matryoshka": bool(dimensions or config.get("is_matryoshka")),
        "matryoshka_dimensions": dimensions,
    }


def with_modules(path: Path, modules: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of modules.json. The order must be Transformer, Pooling, Dense..., Normalize.

    SPLADE models have MLMTransformer, SpladePooling instead. Raises ConfigError for anything else.
    """
    kinds = kinds_of(modules)
    configs = [read_json(path / module["path"] / "config.json") for module in modules]
    if kinds == ["MLMTransformer", "SpladePooling"]:
        return {"head": "splade", **_splade(configs[1])}
    numbers = [_ORDER.get(kind, -1) for kind in kinds]
    if kinds[:2] != ["Transformer", "Pooling"] or -1 in numbers or numbers != sorted(numbers):
        raise ConfigError(
            f"modules.json lists {', '.join(kinds)}: only Transformer, Pooling, Dense and Normalize"
            " (in this order), or MLMTransformer and SpladePooling, are supported. Serve this"
            " model with sentence-transformers."
        )
    settings: dict[str, Any] = {
        "head": "embedding",
        **_pooling(configs[1]),
        "normalize": "Normalize" in kinds,
    }
    settings["dense"] = tuple(
        dense_layer(path / module["path"], config)
        for module, kind, config in zip(modules, kinds, configs, strict=True)
        if kind == "Dense"
    )
    return settings


_ORDER = {"Transformer": 0, "Pooling": 1, "Dense": 2, "Normalize": 3}


def _pooling(config: Mapping[str, Any]) -> dict[str, Any]:
    given = config.get("pooling_mode")
    if given is None:
        given = [name for flag, name in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    names = [given] if isinstance(given, str) else list(given)
    poolings = tuple("last" if name == "lasttoken" else name for name in names)
    for name in poolings:
        if name not in POOLINGS:
            raise ConfigError(
                f"the pooling {name!r} is not supported: use one of {', '.join(POOLINGS)}."
            )
    return {"poolings": poolings, "include_prompt": config.get("include_prompt", True)}


def _splade(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "splade_twice": config.get("activation_function") == "log1p_relu",
        "splade_sum": config.get("pooling_strategy") == "sum",
    }


def dense_layer(path: Path, config: Mapping[str, Any], of_tokens: bool = False) -> DenseLayer:
    """A Dense module, after the pooling, or on each token if `of_tokens`.

    Raises ConfigError for one of another kind.
    """
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    expected = "token_embeddings" if of_tokens else "sentence_embedding"
    inner = config.get("module_input_name", expected)
    outer = config.get("module_output_name") or expected
    if (
        not activation.startswith("torch.nn.modules.")
        or (inner, outer) != (expected, expected)
        or config.get("use_residual")
    ):
        raise ConfigError(
            f"{path.name} is a Dense module of a kind that is not supported ({activation},"
            f" {inner}). Serve this model with sentence-transformers."
        )
    return DenseLayer(
        path=path, activation=activation.rsplit(".", 1)[-1], bias=bool(config.get("bias", True))
    )


def kinds_of(modules: list[dict[str, Any]]) -> list[str]:
    """The names of the modules' classes."""
    return [str(module["type"]).rsplit(".", 1)[-1] for module in modules]


def without_modules(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The settings of a directory without modules.json, as sentence-transformers has them.

    The pooling is the last token for a causal language model, and the mean for other models.
    """
    generates = architecture.endswith("ForCausalLM") and config.get("is_causal", True)
    return {"head": "embedding", "poolings": ("last",) if generates else ("mean",)}


def overrides(options: EngineOptions) -> dict[str, Any]:
    if options.pooling is None:
        return {}
    if options.pooling == "splade":
        return {"head": "splade", "dense": (), "normalize": False}
    if options.pooling not in POOLINGS:
        raise ConfigError(
            f"pooling is {options.pooling!r}: use one of {', '.join(POOLINGS)}, splade."
        )
    return {"poolings": (options.pooling,)}


def bge_m3(path: Path) -> dict[str, Any]:
    """The settings of bge-m3, whether modules.json exists or not; empty for other models.

    Its dense vectors are its normalised CLS states.
    """
    if not (path / "sparse_linear.pt").is_file() or not (path / "colbert_linear.pt").is_file():
        return {}
    return {"has_bge_m3_heads": True, "poolings": ("cls",), "normalize": True}


def classifier(config: Mapping[str, Any]) -> dict[str, Any]:
    labels = _labels(config)
    return {"labels": labels, "activation": _classifier_activation(config, len(labels))}


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    id2label = config.get("id2label")
    if id2label:
        return tuple(str(id2label[key]) for key in sorted(id2label, key=int))
    return tuple(f"LABEL_{i}" for i in range(int(config.get("num_labels", 2))))


def _classifier_activation(config: Mapping[str, Any], num_labels: int) -> Activation:
    """The activation that vLLM applies: the one that the checkpoint names, else by problem type."""
    named = (config.get("sentence_transformers") or {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function") or ""
    name = str(named).rsplit(".", 1)[-1]
    if name:
        if name not in _ACTIVATIONS:
            raise ConfigError(
                f"the activation {name} of this classifier is not supported: use Identity, Sigmoid"
                " or Softmax."
            )
        return _ACTIVATIONS[name]
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"
