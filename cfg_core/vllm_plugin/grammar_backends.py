"""vLLM's compilers of grammars (its "backends"), one object for each name.

Under `backend: auto` vLLM chooses a compiler for each request, but its engine core uses that of its
first request for all later ones.
"""

from __future__ import annotations

import threading
from typing import Any

from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

XGRAMMAR, GUIDANCE = "xgrammar", "guidance"
"""vLLM's names for the compilers that `auto` takes first and second. The second is llguidance."""


def _backend_class(name: str) -> Any:
    if name == XGRAMMAR:
        return XgrammarBackend
    if name == GUIDANCE:
        return GuidanceBackend
    if name == "outlines":
        from vllm.v1.structured_output.backend_outlines import OutlinesBackend

        return OutlinesBackend
    if name == "lm-format-enforcer":
        from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend

        return LMFormatEnforcerBackend
    raise ValueError(f"there is no structured output backend {name!r}")


def error_of(grammar: Any) -> str:
    """Why llguidance has given up this grammar, or "". Other compilers raise such errors.

    llguidance allows only the end of the text from then on, and vLLM does not look.
    """
    matcher = getattr(grammar, "ll_matcher", None)
    return str(matcher.get_error()) if matcher is not None and matcher.is_error() else ""


class Backends:
    """The compilers of one engine. Each is made when it is first asked for, by any thread.

    Making one reads the whole vocabulary: a second for 150,000 tokens.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        """config: vLLM's VllmConfig, or an object with the fields of it that the compilers read."""
        self._config, self._tokenizer = config, tokenizer
        self._made: dict[str, StructuredOutputBackend] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> StructuredOutputBackend:
        """The compiler of this name. Raises ValueError if there is none."""
        with self._lock:
            if name not in self._made:
                vocab_size = self._config.model_config.get_vocab_size()
                self._made[name] = _backend_class(name)(
                    self._config, tokenizer=self._tokenizer, vocab_size=vocab_size
                )
            return self._made[name]

    def destroy(self) -> None:
        for backend in self._made.values():
            backend.destroy()
        self._made.clear()
