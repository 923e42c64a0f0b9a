"""What a model's config.json says that a configuration depends on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfg_core.errors import ConfigError
from cfg_serve.errors import CommandError
from deployments.config.model_paths import resolve_model


class HubRefusal(CommandError):
    """The hub says that there is no such model, or that this user may not read it."""


GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForCausalLMWithImage")
_BYTES = {"float32": 4, "float": 4, "float16": 2, "bfloat16": 2, "half": 2}
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What is known of a model. None: its files do not say it.

    path: its folder, or its name on the hub.
    kv_token_bytes: what one token takes in the KV cache, in the type of the checkpoint.
    """

    path: str
    is_local: bool
    generates: bool = True
    max_len: int | None = None
    kv_token_bytes: int | None = None
    weight_bytes: int | None = None


def facts_of(model: str) -> ModelFacts:
    """Read config.json, from the folder or from the hub.

    Raises CommandError if the model does not exist, is gated, or is no folder of a model.
    """
    try:
        path = resolve_model(model)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    folder = Path(path)
    if not folder.is_dir():
        return _facts(_hub_config(model), path, None)
    if not (folder / "config.json").is_file():
        raise CommandError(
            f"{model} is a folder without config.json: name the folder that `save_pretrained`, or a"
            " download of the model, wrote."
        )
    weights = sum(f.stat().st_size for kind in _WEIGHTS for f in folder.glob(kind))
    return _facts(_read(folder / "config.json"), path, weights or None)


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{file} cannot be read: {error}. Download the model again.") from None
    if not isinstance(config, dict):
        raise CommandError(f"{file} has no keys. Download the model again.")
    return config


def _facts(config: Mapping[str, Any], path: str, weights: int | None) -> ModelFacts:
    text = config.get("text_config")
    decoder = text if isinstance(text, Mapping) else config
    kinds = config.get("architectures") or ()
    return ModelFacts(
        path=path,
        is_local=Path(path).is_dir(),
        generates=not kinds or any(kind.endswith(GENERATES) for kind in kinds),
        max_len=_number(decoder, "max_position_embeddings", "n_positions", "max_sequence_length"),
        kv_token_bytes=_kv_token_bytes(decoder, config),
        weight_bytes=weights,
    )


def _kv_token_bytes(decoder: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    layers = _number(decoder, "num_hidden_layers", "n_layer")
    heads = _number(decoder, "num_attention_heads", "n_head")
    hidden = _number(decoder, "hidden_size", "n_embd")
    if not (layers and heads and hidden):
        return None
    kv_heads = _number(decoder, "num_key_value_heads") or heads
    head_dim = _number(decoder, "head_dim") or hidden // heads
    kind = config.get("dtype") or config.get("torch_dtype") or decoder.get("dtype")
    return 2 * layers * kv_heads * head_dim * _BYTES.get(str(kind), 4)


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        if isinstance(value := config.get(name), int) and value > 0:
            return value
    return None


def _hub_config(model: str) -> dict[str, Any]:
    """config.json of a model of the hub, from the cache if it is there.

    Raises HubRefusal if there is no such model, or it is gated. If the hub cannot be reached,
    CommandError: the weights could not be fetched either.
    """
    if model.count("/") > 1 or model.endswith((".yaml", ".yml")):
        raise CommandError(f"{model} does not exist: name a YAML file, a folder, or OWNER/NAME.")
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, "config.json")
        return _read(
            Path(cached if isinstance(cached, str) else hf_hub_download(model, "config.json"))
        )
    except hub.GatedRepoError:
        raise HubRefusal(
            f"{model} is gated: accept its terms on its page of the hub, and set HF_TOKEN to a"
            " token that may read it."
        ) from None
    except hub.RepositoryNotFoundError:
        raise HubRefusal(
            f"there is no folder {model} here, and the hub has no such public model. Correct the"
            " name; for a private one, set HF_TOKEN."
        ) from None
    except CommandError:
        raise
    except Exception as error:  # of the network, of the hub's client, or of the name's form
        raise CommandError(_unreached(model, error)) from None


def _unreached(model: str, error: Exception) -> str:
    offline = " HF_HUB_OFFLINE is set." if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
    return (
        f"{model} is no folder here, and the hub did not give its config.json"
        f" ({type(error).__name__}).{offline} Check the name and the network, or give a folder."
    )


def refusals(models: Iterable[str]) -> list[str]:
    """What the hub says against models that are no folders; nothing if it cannot be asked."""
    found = []
    for model in models:
        if "://" in model or Path(model).exists():
            continue
        try:
            _hub_config(model)
        except HubRefusal as error:
            found.append(str(error))
        except CommandError:
            pass  # the engine may know the form of the name, and has its own cache
    return found
