"""Guided chats with `echo`: vLLM would compute log-probabilities of the prompt for each `echo`.

Under guidance there are none: they would be those of the conditional stream.

Importing this module imports vllm, so only a replica does it.
"""

from __future__ import annotations

from typing import Any

from cfg_core.vllm_plugin.frontend.follower_media import SHELVED


def without_scores(original: Any) -> Any:
    """`to_sampling_params` of vLLM's chats, where only `prompt_logprobs` asks for them."""

    def to_sampling_params(self: Any, max_tokens: int, default_sampling_params: Any) -> Any:
        is_guided = SHELVED in (self.vllm_xargs or {})
        request = self.model_copy(update={"echo": False}) if is_guided else self
        return original(request, max_tokens, default_sampling_params)

    return to_sampling_params
