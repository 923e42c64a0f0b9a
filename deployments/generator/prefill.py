"""Messages that end with the assistant's: the model continues that text, as Anthropic documents.

vLLM would begin a new turn behind it.

Importing this module imports vllm, so only a replica does it.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from cfg_core.errors import RequestError


def continued(original: Any) -> Any:
    """`to_chat_completion_request` of vLLM's class for messages, with the last one continued."""
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
