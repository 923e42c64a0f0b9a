"""A compiled grammar that checks which tokens it is shown."""

from __future__ import annotations

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


class FakeGrammar:
    """A compiled grammar that must be shown each token of its request once, in order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.tokens += tokens
        return True

    def accept_output(self, request: Request, tokens: list[int]) -> bool:
        """Called when these tokens have become the end of the request's output."""
        self.accept_tokens(request.request_id, tokens)
        assert self.tokens == list(request.output_token_ids), f"{request.request_id}: its grammar"
        return True


def show_tokens(manager: StructuredOutputManager) -> None:
    """Let `manager` show each request's FakeGrammar its tokens, and keep one valid draft."""
    manager.accept_tokens = lambda request, tokens: (
        not request.use_structured_output
        or request.structured_output_request.grammar.accept_output(request, tokens)
    )
    manager.validate_tokens = lambda request, tokens: (
        tokens[:1] if request.use_structured_output else tokens
    )
