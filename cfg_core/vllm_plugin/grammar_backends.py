"""vLLM's compilers of grammars (its "backends"), one object for each name.

Under `backend: auto` vLLM chooses a compiler for each request. But its engine core keeps the
compiler of its first request and uses it for all later ones. Here each request gets the compiler
that was chosen for it.
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
    """The compilers of one engine. Each is made when it is first asked for.

    There is no lock: a compiler must have been made before other threads ask for it.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        """config: vLLM's VllmConfig, or an object with the fields of it that the compilers read."""
        self._config, self._tokenizer = config, tokenizer
        self._made: dict[str, StructuredOutputBackend] = {}

    def get(self, name: str) -> StructuredOutputBackend:
        """The compiler of this name. Raises ValueError if there is none."""
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
