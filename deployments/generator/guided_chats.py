"""Chats as vLLM reads them, if they are guided.

Importing this module imports vllm, so only a replica does it.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.sampling_params import SamplingParams


class GuidedChatRequest(ChatCompletionRequest):  # type: ignore[misc] # vLLM is not typed
    """A chat whose `echo` asks for no log-probabilities of the prompt.

    vLLM computes them for `echo`, whether or not they are asked for. Under guidance there are none:
    they would be those of the conditional stream.
    """

    def to_sampling_params(
        self, max_tokens: int, default_sampling_params: dict[str, Any]
    ) -> SamplingParams:
        unechoed = self.model_copy(update={"echo": False})
        return ChatCompletionRequest.to_sampling_params(
            unechoed, max_tokens, default_sampling_params
        )
