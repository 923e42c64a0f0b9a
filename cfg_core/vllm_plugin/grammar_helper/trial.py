"""The trial of a grammar: does what vLLM would do with it, and measures what that costs.

It repeats the work of vLLM's frontend and of its engine core. It runs in a process that can be
killed (forks.py), because the compilers are C++ and Rust code. No deadline and no cancellation can
stop that code, and it may end the process.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import re
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.request import get_structured_output_key

from cfg_core.grammars.bounds import KINDS
from cfg_core.grammars.keywords import UnenforcedKeyword, unreadable_patterns
from cfg_core.vllm_plugin.grammar_backends import XGRAMMAR, Backends, error_of
from cfg_core.vllm_plugin.grammar_helper.for_guidance import added_tokens
from cfg_core.vllm_plugin.grammar_helper.lark_text import NotExpressibleError
from cfg_core.vllm_plugin.grammar_helper.reasons import reason_of
from cfg_core.vllm_plugin.grammar_helper.ways import AUTO, CompileOptions, Way, schemas_of, ways

STEPS = 32
"""Maximum number of tokens for which masks are timed."""

_NOTHING = "The grammar cannot be used: no value can match the schema."
_NOTHING_FITS = re.compile(r"Unsatisfiable schema: schema is false(?!.*while processing)")
"""What llguidance says of a schema that forbids every value: no other way can be right.

Of a part that the schema refers to, it also says the place. Then something may match, because the
part may be optional, or one of several.
"""


class RefusedTrial(Exception):
    """The grammar cannot be served; the message is a sentence for the client.

    costly: whether it was refused for its cost, so that another compiler may do better.
    """

    def __init__(self, sentence: str, costly: bool = False) -> None:
        super().__init__(sentence)
        self.costly = costly


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
        self._eos = self._tokenizer.eos_token_id
        self._added = added_tokens(self._tokenizer)

    def warm_up(self) -> None:
        """Compile two small grammars with the compilers that `auto` chooses.

        After that, the forks need not load these compilers.
        """
        for outputs in ({"choice": ["a", "b"]}, {"json": {"type": "number", "multipleOf": 2}}):
            self.run({"outputs": outputs, "allowed": None, "mask_ms": 1e9, "compiler": None})

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The verdict on a grammar.

        It is what vLLM's validation made of the grammar, with the costs, and `lost`, the JSON
        pointers and names of keywords that are not enforced; or `refused` with a sentence for the
        client, and `costly`.

        request: `outputs`, the fields of StructuredOutputsParams; `allowed`, allowed_token_ids or
            None; `mask_ms`, the most CPU milliseconds that one mask may take; `compiler`, None for
            all, or the only one to use; `whitespace` and `of_tools` as in `ways.CompileOptions`.
        """
        started = time.process_time()
        try:
            outputs, grammar, lost = self._made(request)
            compiled = time.process_time()
            slowest = self._walk(grammar, outputs._backend, request["allowed"], request["mask_ms"])
        except RefusedTrial as refusal:
            return {"refused": str(refusal), "costly": refusal.costly}
        changed = {
            k: getattr(outputs, k)
            for k in KINDS
            if getattr(outputs, k) != request["outputs"].get(k)
        }
        return {
            "changed": changed,
            "backend": outputs._backend,
            "was_auto": outputs._backend_was_auto,
            "lost": lost,
            "compile_ms": 1000 * (compiled - started),
            "mask_ms": slowest,
        }

    def _made(
        self, request: Mapping[str, Any]
    ) -> tuple[StructuredOutputsParams, Any, tuple[UnenforcedKeyword, ...]]:
        """The validated fields, the grammar compiled from them, and what it does not enforce.

        Raises RefusedTrial. If no way is left, the reason of the first is told.
        """
        config, fields = self._config.structured_outputs_config, request["outputs"]
        spaces = None if config.disable_any_whitespace else request.get("whitespace")
        options = CompileOptions(
            config.backend, request["compiler"], spaces, bool(request.get("of_tools"))
        )
        first: RefusedTrial | None = None
        try:
            for way in ways(fields, options, self._added):
                try:
                    return *self._by(way), way.lost
                except RefusedTrial as refusal:
                    if _NOTHING_FITS.search(str(refusal)) and not options.of_tools:
                        first = RefusedTrial(_NOTHING)
                        break
                    first = first or refusal
        except NotExpressibleError as error:
            first = first or RefusedTrial(f"The grammar cannot be used. {error}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            first = first or self._invalid(fields)
        raise _named(fields) or first or self._invalid(fields)

    def _invalid(self, fields: Mapping[str, Any]) -> RefusedTrial:
        """Why vLLM itself refuses what is no grammar."""
        try:
            self._validated(fields, self._config.structured_outputs_config)
        except RefusedTrial as refusal:
            return refusal
        return RefusedTrial("The grammar cannot be used. It is not valid.")

    def _by(self, way: Way) -> tuple[StructuredOutputsParams, Any]:
        """The validated fields and the grammar of one way. Raises RefusedTrial."""
        ours = self._config.structured_outputs_config
        config = dataclasses.replace(ours, backend=way.backend)
        for proof in way.proofs:
            self._compiled(self._validated({"json": json.dumps(proof)}, config))
        outputs = self._validated(way.fields, config)
        if way.compiled is not None and outputs._backend == XGRAMMAR:
            for kind in KINDS:
                setattr(outputs, kind, way.compiled.get(kind))
        outputs._backend_was_auto = ours.backend == AUTO
        return outputs, self._compiled(outputs)

    def _validated(self, fields: Mapping[str, Any], config: Any) -> StructuredOutputsParams:
        """Validate as vLLM's frontend does.

        This chooses the compiler, and turns a choice into a grammar. Raises RefusedTrial.
        """
        try:
            params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
            params._validate_structured_outputs(self._config.model_config, config, self._tokenizer)
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
        fields = {kind: getattr(outputs, kind) for kind in KINDS}
        try:
            kind, spec = get_structured_output_key(outputs)
            grammar = self._backends.get(outputs._backend).compile_grammar(kind, spec)
        except Exception as error:
            raise RefusedTrial(
                f"The grammar cannot be compiled. {reason_of(error, fields)}"
            ) from None
        if said := error_of(grammar):
            raise RefusedTrial(
                f"The grammar cannot be compiled. {reason_of(ValueError(said), fields)}"
            )
        return grammar

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
            _check_mask(grammar, step, slowest, most_ms)
            tokens = allowed_by(mask[0])
            if step == 0:
                _check_first(tokens, allowed)
            onward = tokens[tokens != self._eos]
            if not len(onward):
                break
            token = int(onward[chance.randrange(len(onward))])
            is_accepted = grammar.accept_tokens("trial", [token])
            if error_of(grammar):
                raise _gave_up(step)
            if not is_accepted or grammar.is_terminated():
                break
        return slowest


def _named(fields: Mapping[str, Any]) -> RefusedTrial | None:
    """A refusal that names the patterns of a schema that no compiler reads, if it has any."""
    try:
        found = [one for schema in schemas_of(fields) for one in unreadable_patterns(schema)]
    except (ValueError, RecursionError):
        return None
    if not found:
        return None
    return RefusedTrial(
        f"The grammar cannot be used: {found[0]} has a word boundary, a reference to a group, or"
        " something else that no compiler reads. Write the pattern without it."
    )


def _check_mask(grammar: Any, step: int, slowest: float, most_ms: float) -> None:
    if slowest > most_ms:
        raise RefusedTrial(
            f"The grammar is too slow: at step {step + 1}, finding the allowed tokens took"
            f" {slowest:.0f} ms, and all requests wait for it. At most {most_ms:.0f} ms are"
            " allowed: simplify it.",
            costly=True,
        )
    if error_of(grammar):
        raise _gave_up(step)


def _gave_up(step: int) -> RefusedTrial:
    return RefusedTrial(
        f"The grammar is too complex: its compiler gave up at step {step + 1}. Simplify it, or"
        " nest fewer repetitions.",
        costly=True,
    )


def _check_first(tokens: np.ndarray, allowed: list[int] | None) -> None:
    if not len(tokens):
        raise RefusedTrial(
            "The grammar allows no token of this model at the start: no text can match it."
        )
    if allowed is not None and not np.isin(allowed, tokens).any():
        raise RefusedTrial(
            "The grammar allows none of allowed_token_ids at the start: leave one of the two out,"
            " or allow its tokens."
        )


def allowed_by(mask: torch.Tensor) -> np.ndarray:
    """The token ids whose bits are set in a row of vLLM's mask: one int32 per 32 tokens."""
    words = mask.numpy().astype("<i4", copy=False)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


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
