"""Grammars in the engine core: vLLM's StructuredOutputManager, and what it lacks.

- Each request's grammar is compiled by the compiler that was chosen for it (grammar_backends.py).
- There are at least MIN_THREADS threads, so that a slow grammar does not hold up the others.
- If a request is aborted, its queued compilation is cancelled.
- A grammar whose masks turn out to be slow ends its own request. The cost of some ambiguous
  grammars grows with the cube of the length.
- A failure has a reason for the client, and no log line shows what the client sent.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override
from vllm.v1.structured_output import StructuredOutputManager

from cfg_core.errors import REQUEST_FAULT
from cfg_core.grammars.trials import GrammarLimits
from cfg_core.params.begun import FIELD
from cfg_core.vllm_plugin.config import check_overrides
from cfg_core.vllm_plugin.core import begun
from cfg_core.vllm_plugin.grammar_backends import GUIDANCE, XGRAMMAR, Backends, error_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MIN_THREADS = 4
SLACK = 2.0
_QUIET = (
    "vllm.v1.structured_output.backend_guidance",
    "vllm.v1.structured_output.backend_outlines",
    "vllm.v1.structured_output.backend_xgrammar",
)


class GrammarManager(StructuredOutputManager):
    """vLLM's manager with the additions above. `adopt` makes it of one that vLLM made."""

    backend: Any
    _backends: Backends
    _most_ms: float
    _failed: dict[str, str]

    @override
    def grammar_init(self, request: Request) -> None:
        """Begin to compile a request's grammar.

        The compiler is made by the thread that compiles, because that reads the whole vocabulary.
        """
        wanted = request.structured_output_request
        if wanted is None:
            return
        begun.make_begun(request)
        if self._use_async_grammar_compilation:
            wanted.grammar = self.executor.submit(self._create_grammar, request)
            return
        try:
            wanted.grammar = self._create_grammar(request)
        except Exception as error:
            wanted.grammar = _failure(error)

    @override
    def _create_grammar(self, request: Request) -> Any:
        """Compile a request's grammar. As in vLLM, `backend` is the first compiler that was used.

        Raises CompilationError without the compiler's text, which may quote what the client sent.
        """
        wanted, sampling = request.structured_output_request, request.sampling_params
        kind, spec = wanted.structured_output_key
        stops = None if sampling is None else sampling.all_stop_token_ids
        try:
            backend = self._backends.get(wanted.params._backend)
            self.backend = self.backend or backend
            grammar = backend.compile_grammar(kind, spec, stop_token_ids=stops)
        except Exception as error:
            logger.warning(
                "request %s: its grammar failed to compile (%s)",
                request.request_id,
                type(error).__name__,
            )
            raise CompilationError(
                f"{REQUEST_FAULT}{wanted.params._backend} could not compile its grammar "
                f"({type(error).__name__}). Simplify it."
            ) from None
        if not catch_up(self, request, grammar) or error_of(grammar):
            raise CompilationError(
                f"{REQUEST_FAULT}{FIELD} do not follow its grammar. Send the tokens that this"
                " request has generated, or none."
            )
        return grammar

    @override
    def _fill_bitmasks(self, batch: Iterable[tuple[Any, ...]]) -> None:
        """Do what vLLM does, measure each grammar, and allow masks of different widths.

        Each row is a grammar, its index in the bitmask, whether the grammar constrains it, and, in
        some versions, what vLLM reads only if it does not.
        """
        for row in batch:
            grammar, index, constrains = row[:3]
            if not constrains or grammar.is_terminated():
                super()._fill_bitmasks((row,))
                continue
            started = time.thread_time()
            self._fill(grammar, index)
            self._note(grammar, started)

    def _fill(self, grammar: Any, index: int) -> None:
        """Fill one row of the bitmask.

        A mask of llguidance is wider than the others if the tokenizer has more tokens than the
        model.
        """
        mask = self._grammar_bitmask
        vocab_size = getattr(getattr(grammar, "ll_tokenizer", None), "vocab_size", None)
        width = mask.shape[1] if vocab_size is None else -(-vocab_size // 32)
        if width == mask.shape[1]:
            grammar.fill_bitmask(mask, index)
            return
        row = torch.full((1, width), -1, dtype=mask.dtype)
        grammar.fill_bitmask(row, 0)
        common = min(width, mask.shape[1])
        mask[index].fill_(0)
        mask[index, :common] = row[0, :common]

    def _note(self, grammar: Any, started: float) -> None:
        spent = 1000 * (time.thread_time() - started)
        if spent > self._most_ms:
            grammar._cfg_serve_slow_ms = max(spent, getattr(grammar, "_cfg_serve_slow_ms", 0.0))

    @override
    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        """Do what vLLM does. Returns False, which ends the request, also for a slow grammar."""
        if not request.use_structured_output or not new_token_ids:
            return True
        started = time.thread_time()
        accepted: bool = super().accept_tokens(request, new_token_ids)
        grammar = request.structured_output_request.grammar
        self._note(grammar, started)
        failure = self._failure_of(grammar, accepted)
        if failure is not None:
            self._failed[request.request_id] = f"{REQUEST_FAULT}its grammar {failure}"
        return failure is None

    def _failure_of(self, grammar: Any, accepted: bool) -> str | None:
        """Why a request cannot go on with its grammar, as the end of a sentence, if it cannot."""
        slow = getattr(grammar, "_cfg_serve_slow_ms", None)
        if slow is not None:
            return (
                f"became too slow: one token took {slow:.0f} ms, and at most"
                f" {self._most_ms:.0f} ms are allowed, because all requests wait for it. Make it"
                " unambiguous, or nest fewer repetitions."
            )
        if error_of(grammar):
            return (
                "became too complex for its compiler here. Make it unambiguous, or nest fewer"
                " repetitions."
            )
        if not accepted:
            return (
                "and its other options (such as allowed_token_ids, bad_words or min_tokens)"
                " together allow no token here. Leave one of them out."
            )
        return None

    @override
    def clear_backend(self) -> None:
        self.backend = None  # destroyed below, with the others
        super().clear_backend()
        self._backends.destroy()


def catch_up(manager: StructuredOutputManager, request: Request, grammar: Any) -> bool:
    """Advance a new grammar over the tokens that its request has begun with.

    As vLLM's `accept_tokens`, which reads the grammar where only a compiled one can be. With a
    reasoning parser, the grammar begins behind the reasoning, which these tokens may end.

    Returns False if the grammar does not accept them.
    """
    tokens = begun.tokens_of(request)
    if not tokens:
        return True
    start, _ = manager._get_constraint_bounds(request, tokens, spec_tokens_committed=True)
    if start > len(tokens):
        return True
    request.structured_output_request.reasoning_ended = True
    accepted: bool = grammar.accept_tokens(request.request_id, tokens[start:])
    return accepted


class CompilationError(Exception):
    """A grammar could not be compiled. The message is for the client."""


def _failure(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def adopt(manager: Any, limits: GrammarLimits) -> None:
    """Turn the engine core's manager into a GrammarManager.

    One token may take SLACK times the `mask_ms` of a trial.
    """
    if type(manager) is not StructuredOutputManager or not hasattr(manager, "tokenizer"):
        return  # without a tokenizer there are no grammars
    check_overrides(GrammarManager)
    manager.__class__ = GrammarManager
    manager._backends = Backends(manager.vllm_config, manager.tokenizer)
    manager._most_ms, manager._failed = SLACK * limits.mask_ms, {}
    manager.executor.shutdown(wait=False)
    manager.executor = ThreadPoolExecutor(max(MIN_THREADS, (os.cpu_count() or 1) // 2), "grammars")
    if limits.at_start:
        manager.executor.submit(_load, manager._backends, manager.vllm_config)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _load(backends: Backends, config: Any) -> None:
    """Make the compilers that `auto` chooses, so that no request waits for it.

    A compiler that cannot have this tokenizer fails again, with a reason, when a request wants it.
    """
    chosen = config.structured_outputs_config.backend
    for name in (XGRAMMAR, GUIDANCE) if chosen == "auto" else (chosen,):
        with suppress(Exception):
            backends.get(name)


def uncompiled(requests: Mapping[str, Request], ended: Iterable[str]) -> dict[str, str]:
    """The requests of `ended` whose grammar did not compile, and why.

    ended: requests that vLLM is about to end with an error.
    """
    failed = {}
    for request_id in ended:
        wanted = getattr(requests.get(request_id), "structured_output_request", None)
        if wanted is not None and isinstance(wanted.grammar, CompilationError):
            failed[request_id] = str(wanted.grammar)
    return failed


def take_failures(manager: Any) -> dict[str, str]:
    """The requests that were ended by their grammars since the last call, and why."""
    if not isinstance(manager, GrammarManager):
        return {}
    failed, manager._failed = manager._failed, {}
    return failed


def cancel_compilations(requests: Iterable[Request]) -> None:
    """Cancel the compilations that have not begun."""
    for request in requests:
        wanted = request.structured_output_request
        if wanted is not None and isinstance(wanted._grammar, Future):
            wanted._grammar.cancel()
