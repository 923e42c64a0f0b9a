"""vLLM's compilers of grammars, one object for each name.

Under `backend: auto` vLLM decides for each request who compiles its grammar, but its engine core
keeps the compiler of its first request for all later ones, whatever was decided for them. Here a
request gets the one that was chosen for it.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend


def _backend_class(name: str) -> Any:
    if name == "xgrammar":
        return XgrammarBackend
    if name == "guidance":
        return GuidanceBackend
    if name == "outlines":
        from vllm.v1.structured_output.backend_outlines import OutlinesBackend

        return OutlinesBackend
    if name == "lm-format-enforcer":
        from vllm.v1.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend

        return LMFormatEnforcerBackend
    raise ValueError(f"there is no structured output backend {name!r}")


class Backends:
    """The compilers of one engine, made when they are first asked for. Used by one thread at a
    time."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        """config: vLLM's VllmConfig, or what of it the compilers read."""
        self._config, self._tokenizer = config, tokenizer
        self._made: dict[str, StructuredOutputBackend] = {}

    def get(self, name: str) -> StructuredOutputBackend:
        """The compiler of this name; ValueError if there is none."""
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
