"""Guidance in the extra arguments of vLLM's sampling parameters, where it reaches the engine.

The replica writes it there, and the engine's admission resolves it. Imports neither vllm nor ray.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from cfg_core.errors import GuidanceError
from cfg_core.params import (
    NEGATIVE_EMBEDS,
    NEGATIVE_IDS,
    SCHEDULE,
    STREAMS,
    GuidanceParams,
    is_guided,
    prompt_length,
)


def as_xargs(params: GuidanceParams) -> dict[str, Any]:
    """Guidance as entries of `vllm_xargs`.

    vLLM validates these again for some endpoints, and they may hold no objects and no nested lists
    then, so such values are sent as text.
    """
    extra = params.to_extra_args()
    for name in (STREAMS, SCHEDULE):
        if name in extra:
            extra[name] = json.dumps(extra[name])
    return extra


def adapter_of(
    name: str | bool | None,
    where: str,
    adapters: Mapping[str, Any],
    is_base_model: Callable[[str], bool],
) -> list[Any] | bool | None:
    """A stream's `lora` as the engine reads it: an adapter as the list of its fields.

    False is the base model, and None is the request's own adapter. Raises GuidanceError for a name
    that is not served.

    where: the stream, for the error. adapters: vLLM's LoRARequest of each served adapter, by name.
    """
    if not isinstance(name, str):
        return name
    if name in adapters:
        found = adapters[name]
        return [found.lora_name, found.lora_int_id, found.lora_path]
    if is_base_model(name):
        return False
    known = ", ".join(sorted(adapters)) or "none"
    raise GuidanceError(
        f"{where}.lora is not the name of an adapter. Known: {known}; false is the base model.",
        f"{where}.lora",
    )


def follower_lengths(extra_args: Mapping[str, Any] | None) -> list[int]:
    """The lengths of the followers' prompts in a request that was admitted; none if not guided.

    Admission (cfg_core/vllm_plugin/frontend/) leaves guidance only where it has an effect, with the
    token ids or the embeddings of each follower.
    """
    if extra_args is None or not is_guided(extra_args):
        return []
    entries = extra_args.get(STREAMS)
    if entries is None:
        return [prompt_length(extra_args.get(NEGATIVE_IDS), extra_args.get(NEGATIVE_EMBEDS))]
    return [prompt_length(entry.get("token_ids"), entry.get("prompt_embeds")) for entry in entries]
