"""Patches of what vLLM makes of a chat's request: prompt scores, a last message, tool arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from cfg_core.errors import RequestError
from cfg_core.vllm_plugin.frontend.follower_media import PENDING_GUIDANCE

OBJECT = {"type": "object"}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}

Parameters = dict[str, Any] | bool


def without_scores(original: Any) -> Any:
    """`to_sampling_params` of vLLM's chats, where a guided chat with `echo` has no prompt logprobs.

    They would be those of the conditional stream.
    """

    def to_sampling_params(self: Any, max_tokens: int, default_sampling_params: Any) -> Any:
        is_guided = PENDING_GUIDANCE in (self.vllm_xargs or {})
        request = self.model_copy(update={"echo": False}) if is_guided else self
        return original(request, max_tokens, default_sampling_params)

    return to_sampling_params


def continued(original: Any) -> Any:
    """`to_chat_completion_request` of vLLM's class for messages, with the last one continued.

    Anthropic documents that. vLLM would begin a new turn behind it.
    """
    convert = original.__func__

    def to_chat_completion_request(
        cls: Any, /, anthropic_request: Any, **options: Any
    ) -> ChatCompletionRequest:
        made: ChatCompletionRequest = convert(cls, anthropic_request, **options)
        if anthropic_request.messages and anthropic_request.messages[-1].role == "assistant":
            _continue(made, f"messages[{len(anthropic_request.messages) - 1}].content")
        return made

    return classmethod(to_chat_completion_request)


def _continue(made: Any, field: str) -> None:
    """Make a request continue its last message.

    A text that is empty is a new turn. A call of a tool cannot be continued, so it is left alone.
    Raises RequestError for a text that ends with white space, as Anthropic does: most tokens begin
    with their space, so few can follow one.
    """
    last = made.messages[-1]
    if last.get("tool_calls"):
        return
    content = last.get("content")
    if isinstance(content, list):
        content = next((part["text"] for part in reversed(content) if "text" in part), None)
    if not content:
        if not last.get("reasoning") and len(made.messages) > 1:
            made.messages.pop()
        return
    if content != content.rstrip():
        raise RequestError(
            f"{field} is the beginning of the answer, and ends with white space: remove that.",
            field,
        )
    made.add_generation_prompt, made.continue_final_message = False, True


def of_function(stock: Callable[[Any], Parameters]) -> Callable[[Any], Parameters]:
    """Replaces a function that returns the schema of a tool's arguments, if it is not enforced.

    vLLM and xgrammar allow any JSON there, and a small model writes a text. OpenAI's API calls a
    tool without `parameters` one that has none, so its arguments are an empty object.

    stock: returns true for any JSON.
    """

    def parameters(function: Any) -> Parameters:
        schema = stock(function)
        if schema is not True or not hasattr(function, "strict"):  # tools that models bring along
            return schema
        return EMPTY if not getattr(function, "parameters", None) else OBJECT

    return parameters
