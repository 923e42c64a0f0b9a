"""The trial of a grammar: does what vLLM would do with it, and measures what that costs.

It repeats the work of vLLM's frontend and of its engine core. It runs in a process that can be
killed (forks.py), because the compilers are C++ and Rust code. No deadline and no cancellation can
stop that code, and it may end the process.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.request import get_structured_output_key

from cfg_core.grammars.bounds import KINDS
from cfg_core.vllm_plugin.grammar_backends import Backends

STEPS = 32
"""Maximum number of tokens for which masks are timed."""

_WORD = 32
_MOST_READ = 1000
_REASON_CHARS = 300
QUOTED_CHARS = 16
"""Shortest run of the client's characters that is removed from a message.

Shorter runs may be common words.
"""


class RefusedTrial(Exception):
    """The grammar cannot be served; the message is a sentence for the client."""


class Trial:
    """Tries grammars for one engine.

    It is made once and then forked, so the compilers are loaded in every copy.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: what `settings.settings_of` returned."""
        self._config = SimpleNamespace(
            model_config=_Model(settings["model"]),
            structured_outputs_config=settings["outputs"],
            speculative_config=_namespace(settings["speculative"]),
        )
        self._tokenizer = cached_tokenizer_from_config(self._config.model_config)
        self._backends = Backends(self._config, self._tokenizer)

    def warm_up(self) -> None:
        """Compile two small grammars with the compilers that `auto` chooses.

        After that, the forks need not load these compilers.
        """
        for outputs in ({"choice": ["a", "b"]}, {"json": {"type": "number", "multipleOf": 2}}):
            self.run({"outputs": outputs, "allowed": None, "mask_ms": 1e9})

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The verdict on a grammar.

        It is what vLLM's validation made of the grammar, with the costs; or `refused` with a
        sentence for the client.

        request: `outputs`, the fields of StructuredOutputsParams; `allowed`, allowed_token_ids or
            None; `mask_ms`, the most CPU milliseconds that one mask may take.
        """
        started = time.process_time()
        try:
            outputs = self._validated(request["outputs"])
            grammar = self._compiled(outputs)
            compiled = time.process_time()
            slowest = self._walk(grammar, outputs._backend, request["allowed"], request["mask_ms"])
        except RefusedTrial as refusal:
            return {"refused": str(refusal)}
        changed = {
            k: getattr(outputs, k)
            for k in KINDS
            if getattr(outputs, k) != request["outputs"].get(k)
        }
        return {
            "changed": changed,
            "backend": outputs._backend,
            "was_auto": outputs._backend_was_auto,
            "compile_ms": 1000 * (compiled - started),
            "mask_ms": slowest,
        }

    def _validated(self, fields: Mapping[str, Any]) -> StructuredOutputsParams:
        """Validate as vLLM's frontend does.

        This chooses the compiler, and turns a choice into a grammar. Raises RefusedTrial.
        """
        try:
            params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
            config = self._config
            params._validate_structured_outputs(
                config.model_config, config.structured_outputs_config, self._tokenizer
            )
        except (
            VLLMValidationError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise RefusedTrial(f"The grammar cannot be used. {reason_of(error, fields)}") from None
        return params.structured_outputs

    def _compiled(self, outputs: StructuredOutputsParams) -> Any:
        """Compile as vLLM's engine core does. Raises RefusedTrial."""
        try:
            kind, spec = get_structured_output_key(outputs)
            return self._backends.get(outputs._backend).compile_grammar(kind, spec)
        except Exception as error:
            fields = {kind: getattr(outputs, kind) for kind in KINDS}
            raise RefusedTrial(
                f"The grammar cannot be compiled. {reason_of(error, fields)}"
            ) from None

    def _walk(self, grammar: Any, backend: str, allowed: list[int] | None, most_ms: float) -> float:
        """Take up to STEPS random steps through the grammar, and time the mask of each.

        Returns the CPU milliseconds of the slowest mask. The cost of a mask is known only after
        computing it, so this is a sample. It is always the same for the same grammar. Raises
        RefusedTrial if a mask is too slow, or if no text can match.
        """
        mask = self._backends.get(backend).allocate_token_bitmask(1)
        chance, slowest = random.Random(0), 0.0
        for step in range(STEPS):
            started = time.process_time()
            grammar.fill_bitmask(mask, 0)
            slowest = max(slowest, 1000 * (time.process_time() - started))
            if slowest > most_ms:
                raise RefusedTrial(
                    f"The grammar is too slow: at step {step + 1}, finding the allowed tokens took"
                    f" {slowest:.0f} ms, and all requests wait for it. At most {most_ms:.0f} ms are"
                    " allowed: simplify it."
                )
            tokens = _allowed_by(mask[0])
            if step == 0:
                _check_first(tokens, allowed)
            onward = [token for token in tokens if token != self._tokenizer.eos_token_id]
            if (
                not onward
                or not grammar.accept_tokens("trial", [chance.choice(onward)])
                or grammar.is_terminated()
            ):
                break
        return slowest


def _check_first(tokens: list[int], allowed: list[int] | None) -> None:
    if not tokens:
        raise RefusedTrial(
            "The grammar allows no token of this model at the start: no text can match it."
        )
    if allowed is not None and not set(tokens).intersection(allowed):
        raise RefusedTrial(
            "The grammar allows none of allowed_token_ids at the start: leave one of the two out,"
            " or allow its tokens."
        )


def _allowed_by(mask: torch.Tensor) -> list[int]:
    """The token ids whose bits are set in a row of vLLM's mask: one int32 per 32 tokens."""
    bits = (mask.unsqueeze(1) >> torch.arange(_WORD, dtype=torch.int32)) & 1
    ids: list[int] = bits.flatten().nonzero().flatten().tolist()
    return ids


def reason_of(error: Exception, fields: Mapping[str, Any]) -> str:
    """The compiler's message in one line, without the text that the client sent."""
    said = " ".join(str(error.args[0] if error.args else error).split()) or type(error).__name__
    return without(said[:_MOST_READ], _source(fields))[:_REASON_CHARS].rstrip()


def _source(fields: Mapping[str, Any]) -> str:
    """The client's own text in `fields`, in one line."""
    return " ".join(
        " ".join(
            v if isinstance(v, str) else repr(v) for v in fields.values() if v is not None
        ).split()
    )


def without(said: str, source: str) -> str:
    """Return `said` with "..." for every long run of characters that also stands in `source`.

    A run is long if it has at least QUOTED_CHARS characters.
    """
    ends = [
        i + QUOTED_CHARS
        for i in range(len(said))
        if len(said[i : i + QUOTED_CHARS]) == QUOTED_CHARS
    ]
    quoted = {
        i
        for end in ends
        if said[end - QUOTED_CHARS : end] in source
        for i in range(end - QUOTED_CHARS, end)
    }
    kept = "".join("\0" if i in quoted else char for i, char in enumerate(said))
    return re.sub("\0+", "...", kept)


class _Model(SimpleNamespace):
    """The fields of a ModelConfig that compilers and tokenizers read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(**fields)
        self.hf_config = SimpleNamespace(model_type=self.model_type)

    def get_vocab_size(self) -> int:
        return int(self.vocab_size)


def _namespace(fields: Mapping[str, Any] | None) -> SimpleNamespace | None:
    return None if fields is None else SimpleNamespace(**fields)


def quiet() -> None:
    """Disable the log of this process, because compilers log what clients sent."""
    logging.disable(logging.CRITICAL)
