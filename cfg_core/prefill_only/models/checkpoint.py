"""Reads a model directory as sentence-transformers does: what the model computes, and how.

It reads `config.json`, `modules.json` (Transformer, Pooling, Dense, Normalize, MLMTransformer,
SpladePooling), `1_Pooling/config.json`, `sentence_bert_config.json`,
`config_sentence_transformers.json`, and the head files of bge-m3 (`sparse_linear.pt`,
`colbert_linear.pt`). Anything else that would change the result is an error. This module does not
import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from cfg_core.errors import ConfigError, RequestError
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.types import Task

POOLINGS = ("cls", "mean", "last", "max", "weightedmean", "mean_sqrt_len_tokens")
_POOLING_FLAGS = {  # keys of 1_Pooling/config.json before sentence-transformers 5.4
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}

Head = Literal["embedding", "classifier", "splade"]


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """A `Dense` module after the pooling.

    path: the directory of its weights.

    activation: the name of a class of torch.nn.
    """

    path: Path
    activation: str
    bias: bool


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a client may want to know about a loaded model."""

    tasks: tuple[Task, ...]
    dimension: int | None
    """Components of a dense vector; None if the model makes none."""
    max_input_tokens: int
    vocab_size: int
    labels: tuple[str, ...] = ()
    """Labels of a classifier, in the order of its scores."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    matryoshka: bool = False
    """Whether requests may set `dimensions`."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The dimensions that the model was trained for. Empty: any are allowed."""

    @property
    def takes_pairs(self) -> bool:
        """Whether the model is a cross-encoder, which scores a query with a document."""
        return "classify" in self.tasks and len(self.labels) == 1

    def check_dimensions(self, dimensions: int) -> None:
        """Raise RequestError unless dense vectors may be cut to `dimensions` components."""
        name = "dimensions"
        if dimensions == self.dimension:
            return
        if not self.matryoshka:
            reason = "was not trained to be cut (Matryoshka)"
            raise RequestError(
                f"this model has {self.dimension} dimensions and {reason}: leave {name} out.", name
            )
        if self.matryoshka_dimensions and dimensions not in self.matryoshka_dimensions:
            known = ", ".join(map(str, self.matryoshka_dimensions))
            raise RequestError(f"{name} is {dimensions}: this model was trained for {known}.", name)
        if not 1 <= dimensions <= (self.dimension or 0):
            raise RequestError(f"{name} is {dimensions}: this model has {self.dimension}.", name)

    def prompt_text(self, name: str | None, text: str | None) -> str:
        """The text to put in front of inputs.

        It is the prompt called `name`, or `text` itself, or the checkpoint's default if both are
        None. Raises RequestError if both are given, or if there is no such prompt.
        """
        if name is not None and text is not None:
            raise RequestError(
                "prompt_name and prompt are both given: send only one of them.", "prompt"
            )
        if name is None:
            return self.default_prompt if text is None else text
        if name not in self.prompts:
            known = (
                f"it has {', '.join(islice(self.prompts, 20))}"
                if self.prompts
                else "it has none, send prompt as text"
            )
            raise RequestError(
                f"this model has no prompt named {name[:60]!r}: {known}.", "prompt_name"
            )
        return self.prompts[name]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything that the files of a model directory say, with defaults filled in."""

    path: Path
    config: Mapping[str, Any]
    head: Head
    poolings: tuple[str, ...] = ("mean",)
    """The results of several poolings are concatenated."""
    include_prompt: bool = True
    """Whether the tokens of the prompt are pooled, too."""
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = False
    splade_twice: bool = False
    """Whether the logarithm is applied twice (activation `log1p_relu`)."""
    splade_sum: bool = False
    """Whether weights are summed over the tokens instead of maximised."""
    has_bge_m3_heads: bool = False
    max_seq_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    labels: tuple[str, ...] = ()
    activation: Literal["sigmoid", "softmax", "identity"] = "identity"
    """The activation for the logits of a classifier."""
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def tasks(self) -> tuple[Task, ...]:
        if self.head == "classifier":
            return ("classify",)
        if self.head == "splade":
            return ("sparse",)
        return (
            ("embed", "sparse", "token_embed")
            if self.has_bge_m3_heads
            else ("embed", "token_embed")
        )

    @property
    def default_prompt(self) -> str:
        return self.prompts.get(self.default_prompt_name, "") if self.default_prompt_name else ""


def read_checkpoint(path: Path, options: EngineOptions) -> Checkpoint:
    """Read the directory `path`.

    Raises ConfigError for settings that cannot be followed exactly.
    """
    config = _json(path / "config.json")
    if not config:
        raise ConfigError(f"{path} has no config.json: name the directory of a transformers model.")
    common: dict[str, Any] = {
        "path": path,
        "config": config,
        **_sentence_transformers_settings(path, config),
    }
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith("ForSequenceClassification"):
        return Checkpoint(head="classifier", **common, **_classifier(config))
    modules = _module_list(path)
    settings = _modules(path, modules) if modules else _without_modules(config, architecture)
    return Checkpoint(**{**common, **settings, **_overrides(options), **_bge_m3(path)})


def locate(model: str) -> Path:
    """The directory of `model`, which is a directory or a name on the Hugging Face hub.

    A model on the hub is downloaded. Raises ConfigError if there is no such directory, or if the
    download fails.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ConfigError(f"model directory {model} does not exist.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model, ignore_patterns=["*.onnx", "*.h5", "*.msgpack", "openvino/*", "onnx/*"]
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{model} is not a directory, and the Hugging Face hub does not provide it: {reason}"
        ) from None


# ---- the files -----------------------------------------------------------------------------------


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from None
    return value if isinstance(value, dict) else {}


def _module_list(path: Path) -> list[dict[str, Any]]:
    file = path / "modules.json"
    modules: list[dict[str, Any]] = (
        json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    )
    return modules


def _sentence_transformers_settings(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    transformer = _json(path / "sentence_bert_config.json")
    model = _json(path / "config_sentence_transformers.json")
    dimensions = tuple(config.get("matryoshka_dimensions") or ())
    return {
        "max_seq_length": transformer.get("max_seq_length"),
        "lower_case": bool(transformer.get("do_lower_case")),
        "prompts": {name: text for name, text in (model.get("prompts") or {}).items() if text},
        "default_prompt_name": model.get("default_prompt_name"),
        "matryoshka": bool(dimensions or config.get("is_matryoshka")),
        "matryoshka_dimensions": dimensions,
    }


def _modules(path: Path, modules: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of modules.json. The order must be Transformer, Pooling, Dense..., Normalize.

    SPLADE models have MLMTransformer, SpladePooling instead. Raises ConfigError for anything else.
    """
    kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
    configs = [_json(path / module["path"] / "config.json") for module in modules]
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
        _dense(path / module["path"], config)
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


def _dense(path: Path, config: Mapping[str, Any]) -> DenseLayer:
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    inner = config.get("module_input_name", "sentence_embedding")
    if (
        not activation.startswith("torch.nn.modules.")
        or inner != "sentence_embedding"
        or config.get("use_residual")
    ):
        raise ConfigError(
            f"{path.name} is a Dense module of a kind that is not supported ({activation},"
            f" {inner}). Serve this model with sentence-transformers."
        )
    return DenseLayer(
        path=path, activation=activation.rsplit(".", 1)[-1], bias=bool(config.get("bias", True))
    )


def _without_modules(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The settings of a directory without modules.json, as sentence-transformers has them.

    The pooling is the last token for a causal language model, and the mean for other models.
    """
    generates = architecture.endswith("ForCausalLM") and config.get("is_causal", True)
    return {"head": "embedding", "poolings": ("last",) if generates else ("mean",)}


def _overrides(options: EngineOptions) -> dict[str, Any]:
    if options.pooling is None:
        return {}
    if options.pooling == "splade":
        return {"head": "splade", "dense": (), "normalize": False}
    if options.pooling not in POOLINGS:
        raise ConfigError(
            f"pooling is {options.pooling!r}: use one of {', '.join(POOLINGS)}, splade."
        )
    return {"poolings": (options.pooling,)}


def _bge_m3(path: Path) -> dict[str, Any]:
    """The settings of bge-m3, whether modules.json exists or not; empty for other models.

    Its dense vectors are its normalised CLS states.
    """
    if not (path / "sparse_linear.pt").is_file() or not (path / "colbert_linear.pt").is_file():
        return {}
    return {"has_bge_m3_heads": True, "poolings": ("cls",), "normalize": True}


def _classifier(config: Mapping[str, Any]) -> dict[str, Any]:
    labels = _labels(config)
    return {"labels": labels, "activation": _classifier_activation(config, len(labels))}


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    id2label = config.get("id2label")
    if id2label:
        return tuple(str(id2label[key]) for key in sorted(id2label, key=int))
    return tuple(f"LABEL_{i}" for i in range(int(config.get("num_labels", 2))))


def _classifier_activation(
    config: Mapping[str, Any], num_labels: int
) -> Literal["sigmoid", "softmax", "identity"]:
    """The activation that vLLM applies: the one that the checkpoint names, else by problem type."""
    saved = (config.get("sentence_transformers") or {}).get("activation_fn")
    saved = str(saved or config.get("sbert_ce_default_activation_function") or "").rsplit(".", 1)[
        -1
    ]
    if saved in ("Identity", "Sigmoid", "Softmax"):
        return {  # type: ignore[return-value]
            "Identity": "identity",
            "Sigmoid": "sigmoid",
            "Softmax": "softmax",
        }[saved]
    if saved:
        raise ConfigError(
            f"the activation {saved} of this classifier is not supported: use Identity, Sigmoid or"
            " Softmax."
        )
    if config.get("problem_type") == "regression":
        return "identity"
    return (
        "sigmoid"
        if num_labels == 1 or config.get("problem_type") == "multi_label_classification"
        else "softmax"
    )
