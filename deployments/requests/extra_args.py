"""What a replica writes into requests to its engine, and reads of those that were admitted.

Imports neither vllm nor ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cfg_core.errors import GuidanceError
from cfg_core.params import ResolvedGuidance, TokenIds


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


def same_prompts(
    extra_args: Mapping[str, Any] | None, prompt: Sequence[int] | None, has_adapter: bool
) -> frozenset[int]:
    """The followers, counted from 0, that read the leader's own prompt with the leader's adapter.

    has_adapter: whether the leader has one.
    """
    guidance = ResolvedGuidance.from_extra_args(extra_args)
    if guidance is None or prompt is None:
        return frozenset()
    lengths = [one.num_tokens for one in guidance.followers]
    ids = TokenIds.of(prompt).packed if len(prompt) in lengths else b""
    return frozenset(
        place
        for place, one in enumerate(guidance.followers)
        if one.token_ids is not None
        and one.token_ids.packed == ids
        and (one.lora is None or (one.lora is False and not has_adapter))
    )


def follower_lengths(extra_args: Mapping[str, Any] | None) -> list[int]:
    """The lengths of the followers' prompts in a request that was admitted; none if not guided."""
    guidance = ResolvedGuidance.from_extra_args(extra_args)
    return [] if guidance is None else [one.num_tokens for one in guidance.followers]
