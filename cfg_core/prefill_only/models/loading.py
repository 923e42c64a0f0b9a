"""Loads a transformers model for packed forwards: device, dtype, attention and causality.

transformers' models are `Any` here, because the library is not typed strictly and little of them is
used.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from cfg_core.cpu_features import CPUINFO, has_bfloat16, read
from cfg_core.errors import CompatibilityError, ConfigError
from cfg_core.prefill_only.models.checkpoint import Checkpoint
from cfg_core.prefill_only.models.cpu_linear import pack_linears, packs_bfloat16
from cfg_core.prefill_only.models.families import BY_RUNS, FLOAT32_ONLY
from cfg_core.prefill_only.models.int8_linear import check_int8, quantize_linears
from cfg_core.prefill_only.options import EngineOptions, Quantization

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(options: EngineOptions) -> torch.device:
    """The device that `options` name. Raises ConfigError if this machine does not have it."""
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device is {name!r}, and torch finds no GPU here: use device cpu, or auto."
        )
    return device


def choose_dtype(options: EngineOptions, device: torch.device, model_type: str) -> torch.dtype:
    """The type to compute in; of the layers that stay in floating point, with `quantization`.

    On a CPU, `auto` is bfloat16 where that is faster: about 2.7 times with AMX for MiniLM, whose
    vectors then have a cosine of 0.9998 and more to those in float32.
    """
    if options.quantization:
        check_int8(device)
        return torch.float32
    if model_type in FLOAT32_ONLY:
        return torch.float32
    if options.dtype != "auto":
        return _DTYPES[options.dtype]
    if device.type != "cpu":
        return torch.bfloat16
    is_fast = packs_bfloat16() and has_bfloat16(read(CPUINFO))
    return torch.bfloat16 if is_fast else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """The name that options have for a type, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def load_model(
    checkpoint: Checkpoint,
    *,
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    causal: bool | None,
    quantization: Quantization | None = None,
) -> Any:
    """Load the model of `checkpoint` in evaluation mode, for packed forwards.

    attention: name under which attention.install has registered a backend.

    causal: whether attention is causal; None leaves it as the architecture has it.

    quantization: as the option of this name.

    Raises ConfigError if the checkpoint lacks weights that the result depends on, and
    CompatibilityError if the model takes no position_ids, which mark where sequences begin.
    """
    model = _from_files(checkpoint, attention, dtype).eval()
    if checkpoint.head == "logit_score":
        _keep_logits(model, [int(token) for token in checkpoint.score_tokens])
    if causal is not None:
        _set_causal(model, causal)
    by_runs = checkpoint.model_type in BY_RUNS
    if not by_runs:
        _check_forward(model)
    if quantization:
        quantize_linears(backbone_of(model))
    if device.type == "cpu" and not by_runs:  # for whose numbers of rows there is no end
        pack_linears(model)
    return model.to(device)


def _from_files(checkpoint: Checkpoint, attention: str, dtype: torch.dtype) -> Any:
    import transformers

    auto = {
        "embedding": transformers.AutoModel,
        "late_interaction": transformers.AutoModel,
        "classifier": transformers.AutoModelForSequenceClassification,
        "splade": transformers.AutoModelForMaskedLM,
        "logit_score": transformers.AutoModelForCausalLM,
    }[checkpoint.head]
    model, loading = auto.from_pretrained(
        checkpoint.path,
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=False,
        output_loading_info=True,
    )
    missing = [
        key
        for key in loading["missing_keys"]
        if checkpoint.head not in ("embedding", "late_interaction") or "pooler" not in key
    ]
    if missing:
        raise ConfigError(
            f"{checkpoint.path} lacks weights of the {checkpoint.model_type} model:"
            f" {', '.join(sorted(missing)[:3])}{' and more' if len(missing) > 3 else ''}. Use a"
            " checkpoint that was saved for this task."
        )
    return model


def _keep_logits(model: Any, token_ids: list[int]) -> None:
    """Reduce the head of a language model to the rows of `token_ids`, in float32.

    The logits of two tokens are close to each other, so bfloat16 would round their difference.
    """
    head = model.get_output_embeddings()
    rows = nn.Linear(head.in_features, len(token_ids), bias=head.bias is not None)
    with torch.no_grad():
        rows.weight.copy_(head.weight[token_ids])
        if head.bias is not None:
            rows.bias.copy_(head.bias[token_ids])
    model.set_output_embeddings(rows.eval())


def _set_causal(model: Any, causal: bool) -> None:
    """Set `is_causal` on the modules of the model.

    It is not passed to the forward, because transformers would write it into the shared config.
    """
    for module in model.modules():
        if isinstance(getattr(module, "is_causal", None), bool):
            module.is_causal = causal


def _check_forward(model: Any) -> None:
    if "position_ids" not in parameters_of(backbone_of(model)):
        raise CompatibilityError(
            f"{type(model).__name__} takes no position_ids, so it cannot tell where packed"
            " sequences begin: use a model of another type."
        )


def backbone_of(model: Any) -> Any:
    """The part of `model` that computes token states: the model itself if it has no head."""
    return getattr(model, model.base_model_prefix, model)


def parameters_of(module: nn.Module) -> set[str]:
    """Names of the arguments of a module's forward, also if transformers has decorated it."""
    return set(inspect.signature(module.forward).parameters)


def first_position(model: Any) -> int:
    """The position of a sequence's first token.

    It is 0, or the position after the padding index if position embeddings have one (XLM-R).
    """
    for module in model.modules():
        index = getattr(module, "padding_idx", None)
        if isinstance(index, int) and isinstance(
            getattr(module, "position_embeddings", None), nn.Embedding
        ):
            return index + 1
    return 0


def max_positions(config: Any, first: int) -> int | None:
    """How many positions the model has for one sequence; None if its config does not say."""
    limit = getattr(config, "max_position_embeddings", None)
    return limit - first if isinstance(limit, int) and limit > 0 else None


def uses_token_types(model: Any) -> bool:
    backbone = backbone_of(model)
    num_types = getattr(backbone.config, "type_vocab_size", 0) or 0
    return "token_type_ids" in parameters_of(backbone) and int(num_types) > 1
