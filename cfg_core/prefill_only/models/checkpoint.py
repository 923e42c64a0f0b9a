"""Reads a model directory as sentence-transformers does: what the model computes, and how.

settings.py reads the single files. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from cfg_core.errors import ConfigError, RequestError
from cfg_core.prefill_only.max_sim import MaxSim
from cfg_core.prefill_only.models.late_interaction import LateInteraction, late_interaction
from cfg_core.prefill_only.models.logit_score import (
    check_embeds,
    is_logit_score,
    logit_score,
    template_of,
)
from cfg_core.prefill_only.models.pair_template import PairTemplate
from cfg_core.prefill_only.models.settings import (
    Activation,
    DenseLayer,
    bge_m3,
    classifier,
    module_list,
    overrides,
    read_json,
    sentence_transformers_settings,
    with_modules,
    without_modules,
)
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.prefill_only.types import Task

Head = Literal["embedding", "classifier", "splade", "logit_score", "late_interaction"]
"""logit_score: a causal language model; the logits of one or two tokens score a pair."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a client may want to know about a loaded model."""

    tasks: tuple[Task, ...]
    dimension: int | None
    """Components of a dense vector; None if the model makes none."""
    max_input_tokens: int
    vocab_size: int
    dtype: str
    """The type that the model computes in, such as `bfloat16`; `int8` with that quantization."""
    labels: tuple[str, ...] = ()
    """Labels of a classifier, in the order of its scores."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    token_dimension: int | None = None
    """Components of a token's vector; None if the model makes none."""
    max_sim: MaxSim | None = None
    """How token vectors are compared; None if the model was not trained for late interaction."""
    int8_range: float | None = None
    """As the option of this name."""
    takes_instruction: bool = False
    """Whether requests with pairs may have an `instruction`."""
    matryoshka: bool = False
    """Whether requests may set `dimensions`."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The dimensions that the model was trained for. Empty: any are allowed."""
    max_batch_tokens: int = 512
    """Tokens that one replica computes at once."""
    max_queued_tokens: int = 600_000
    """Tokens that may wait in the queue in front of the replicas."""

    @property
    def takes_pairs(self) -> bool:
        """Whether the model is a cross-encoder, which scores a query with a document."""
        return "classify" in self.tasks and len(self.labels) == 1

    def check_dimensions(self, dimensions: int, name: str = "dimensions") -> None:
        """Raise RequestError unless dense vectors may be cut to `dimensions` components.

        name: the field that asks for it.
        """
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

    def check_instruction(self, instruction: str | None) -> None:
        """Raise RequestError if there is an instruction and the model takes none."""
        if instruction is not None and not self.takes_instruction:
            raise RequestError(
                "this model was trained without instructions: leave instruction out.",
                "instruction",
            )

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
    activation: Activation = "identity"
    """The activation for the logits of a classifier."""
    score_tokens: tuple[str | int, ...] = ()
    """Of the head logit_score: the tokens for no and yes, or the one for yes."""
    late: LateInteraction | None = None
    """Of the head late_interaction."""
    template: PairTemplate | None = None
    """The prompt that pairs are put into."""
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def tasks(self) -> tuple[Task, ...]:
        if self.head == "late_interaction":
            return ("token_embed",)
        if self.head in ("classifier", "logit_score"):
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
    config = read_json(path / "config.json")
    if not config:
        raise ConfigError(f"{path} has no config.json: name the directory of a transformers model.")
    common: dict[str, Any] = {
        "path": path,
        "config": config,
        **sentence_transformers_settings(path, config),
    }
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith("ForSequenceClassification"):
        template = template_of(path, options)
        return Checkpoint(head="classifier", template=template, **common, **classifier(config))
    modules = module_list(path)
    if options.pooling is None and (late := late_interaction(path, config, modules)):
        return Checkpoint(**{**common, **late})
    if is_logit_score(path, config, modules, options):
        return Checkpoint(**{**common, **logit_score(path, config, modules, options)})
    check_embeds(path, config, modules, options)
    settings = with_modules(path, modules) if modules else without_modules(config, architecture)
    return Checkpoint(**{**common, **settings, **overrides(options), **bge_m3(path)})


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
