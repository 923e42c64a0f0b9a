"""The fingerprint of what a replica computes with: a stream goes on only where it is the same.

A stream that another replica has begun goes on with its tokens. With other weights, another
tokenizer or another chat template, these would be the beginning of another text. The fingerprint
covers them, and the options that change what they compute. It does not cover what only changes how
fast that is, so that a rolling update of such options moves its streams. Adapters that are loaded
while the engine runs are not in it. Imports neither vllm nor Ray.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

WHOLE_BYTES = 2**26
"""Files of up to this size are read as a whole. Of a larger one, with weights, SAMPLES parts are
read, the first and the last among them: other weights differ nearly everywhere."""

SAMPLES, SAMPLE_BYTES = 16, 2**16

FINGERPRINT_BYTES = 16


def fingerprint(facts: Mapping[str, Any], places: Iterable[str | None]) -> str:
    """The same text for the same facts and files, whatever the folders are called.

    facts: values that JSON, or `str`, can tell.
    places: folders, whose own files count, or single files. What is no path of this machine is
        passed over.
    """
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for place in places:
        for file in _files(place):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            _read(file, digest)
        digest.update(b"\0")
    return digest.hexdigest()


def _files(place: str | None) -> list[Path]:
    if not place or not os.path.exists(place):
        return []
    path = Path(place)
    return [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())


def _read(file: Path, digest: Any) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= WHOLE_BYTES:
            digest.update(opened.read())
            return
        for sample in range(SAMPLES):
            opened.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE_BYTES))


OF_MODEL = (
    "served_model_name",
    "revision",
    "tokenizer_revision",
    "tokenizer_mode",
    "dtype",
    "quantization",
    "generation_config",
    "override_generation_config",
    "mm_processor_kwargs",
    "logprobs_mode",
)
"""Fields of vLLM's ModelConfig that change what is computed."""


def of_engine(config: Any, version: str, options: Mapping[str, Any]) -> str:
    """The fingerprint of an engine. Reads files: not for an event loop.

    config: vLLM's VllmConfig.
    version: vLLM's.
    options: those of the YAML that change a request's text: of the frontend, of logits processors.
    """
    model = config.model_config
    places = [local_folder(model.model), local_folder(model.tokenizer)]
    facts = {
        "not_here": [name for name in places if not os.path.exists(name)],
        "vllm": version,
        "cache_dtype": config.cache_config.cache_dtype,
        "model": {name: getattr(model, name, None) for name in OF_MODEL},
        "config": {**model.hf_config.to_dict(), "_name_or_path": None},
        "options": _without_paths(options),
    }
    return fingerprint(facts, [*places, *_paths(options)])


def _paths(options: Any) -> list[str]:
    """The texts among values of JSON that are absolute paths of what exists, in their order."""
    if isinstance(options, Mapping):
        return [path for name in sorted(options) for path in _paths(options[name])]
    if isinstance(options, list | tuple):
        return [path for value in options for path in _paths(value)]
    is_path = isinstance(options, str) and os.path.isabs(options) and os.path.exists(options)
    return [options] if is_path else []


def _without_paths(options: Any) -> Any:
    if isinstance(options, Mapping):
        return {name: _without_paths(value) for name, value in options.items()}
    if isinstance(options, list | tuple):
        return [_without_paths(value) for value in options]
    return None if _paths(options) else options


def local_folder(name: str) -> str:
    """The folder of a model's files on this machine, or `name` if there is none.

    A name on the Hugging Face hub may be in the cache of downloads.
    """
    if os.path.exists(name):
        return name
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a name of the hub
        return name
    return os.path.dirname(found) if isinstance(found, str) else name
