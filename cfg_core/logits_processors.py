"""Logits processors with a state, one for each sequence, made by named factories.

vLLM's old processors were one object for all sequences of a request: stateful ones mixed the sequences up, and were
wrong after a preemption (vLLM pull request #5329 proposed factories). Here a factory has a name, a request names
it with arguments, and each sequence (n > 1: each of them) has a processor of its own:

    logits_processors: [{"name": "no_repeat_ngram", "n": 3}]      in a request body, or in extra_args offline

A processor sees the guided scores, after grammar, bias and penalties and before temperature. It is fed each token
that its sequence keeps, once and in order. Where vLLM takes tokens back (drafts, output dropped by a reset), it is
set back, or made anew and fed again: what it has been fed is always a prefix of the sequence.

With tensor parallelism each rank has its own copy of each, so a processor must be deterministic. Reading the tokens
waits for the device: batches with such a request lose the overlap of async scheduling, others nothing.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cfg_core.errors import REQUEST_FAULT

logger = logging.getLogger(__name__)


class LogitsProcessor(ABC):
    """The processor of one sequence. Whatever it raises fails this sequence's request, and no other."""

    @abstractmethod
    def __call__(self, scores: Tensor) -> Tensor:
        """New scores of the next token, from `scores` [vocabulary] float32, which may be changed in place.

        Must not change the state: with drafts a row may be computed and never be used. What is -inf stays -inf.
        """

    def accept(self, token: int) -> None:  # noqa: B027
        """The sequence goes on with `token`."""

    def snapshot(self) -> Any:
        """The state, for one `restore`. By default a deep copy of all attributes: override where that is slow."""
        return copy.deepcopy(self.__dict__)

    def restore(self, state: Any) -> None:
        """Return to what `snapshot` returned."""
        self.__dict__ = state

    def close(self) -> None:  # noqa: B027
        """Called exactly once, when the sequence is finished, aborted, failed, or its processor made anew."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a factory may know of the engine. tokenizer: loads it on the first call."""

    vocab_size: int
    tokenizer: Callable[[], Any]
    end_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """What a processor may know of its sequence."""

    request_id: str
    prompt_token_ids: tuple[int, ...]


class LogitsProcessorFactory(ABC):
    """Makes processors. One instance in each process; its options come from the configuration, as keywords."""

    def __init__(self, engine: EngineInfo) -> None:
        self.engine = engine

    def check(self, *args: Any, **arguments: Any) -> None:  # noqa: B027
        """Raise ValueError, with a sentence for the user, if `make` cannot use these arguments of a request.

        Called when the request arrives; arguments that `make` does not take, or lacks, are refused before. Both get
        the arguments as keywords, so name them in the signature.
        """

    def forces(self, *args: Any, **arguments: Any) -> Sequence[int]:
        """The tokens that `make`'s processor may forbid all others for. A request in which something else may forbid
        these (a grammar, allowed_token_ids) is refused when it arrives."""
        return ()

    @abstractmethod
    def make(self, sequence: SequenceInfo, *args: Any, **arguments: Any) -> LogitsProcessor:
        """The processor of one sequence."""


Named = tuple[str, LogitsProcessor]
Make = Callable[[], list[Named]]


class Failure(NamedTuple):
    """row: which of the rows of its step a request's processor failed on, by the number of drafts before it."""

    row: int
    reason: str


class ProcessorError(Exception):
    """A processor did what it must not; the message names it."""


class SequenceProcessors:
    """The processors of one sequence. `make` makes all of them, as (name, processor)."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._named = make()
        self._fed: list[int] = []

    def catch_up(self, output: Sequence[int]) -> None:
        """Bring the processors to the state behind `output`, the sequence's tokens so far."""
        if list(output[: len(self._fed)]) != self._fed:
            self.close()
            self._named, self._fed = self._make(), []
        self._feed(output[len(self._fed) :])
        self._fed = list(output)

    def process(self, rows: Sequence[Tensor], drafts: Sequence[int], first: int = 0) -> Failure | None:
        """Change `rows` [vocabulary] in place: row i is for the token behind the first `first + i` drafts.

        Returns the first row behind drafts that could not be processed: whether it matters is not known before the
        drafts are verified. Raises ProcessorError for the row behind none.
        """
        states = [self._guarded(name, p.snapshot) for name, p in self._named] if drafts else []
        failure, behind = None, 0
        try:
            for behind in range(1, first + 1):
                self._feed([drafts[behind - 1]])
            for behind, row in enumerate(rows, first):
                if behind > first:
                    self._feed([drafts[behind - 1]])
                self._process_row(row)
        except ProcessorError as error:
            if not behind:
                raise
            failure = Failure(behind, str(error))
        for (name, processor), state in zip(self._named, states, strict=bool(drafts)):
            self._guarded(name, processor.restore, state)
        return failure

    def close(self) -> None:
        close_all(self._named)
        self._named = []

    def _feed(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            for name, processor in self._named:
                self._guarded(name, processor.accept, token)

    def _process_row(self, row: Tensor) -> None:
        forbidden = row == -torch.inf
        scores = row.clone()
        for name, processor in self._named:
            given = self._guarded(name, processor, scores)
            scores = check_scores(name, given, row).masked_fill(forbidden, -torch.inf)
            if not bool((scores > -torch.inf).any()):
                raise ProcessorError(self._nothing_left(name, processor, row))
        row.copy_(scores)

    def _nothing_left(self, name: str, processor: LogitsProcessor, row: Tensor) -> str:
        """Why there is no token. A processor that leaves some where nothing else forbids any is not at fault."""
        alone = check_scores(name, self._guarded(name, processor, torch.zeros_like(row)), row)
        if bool((alone > -torch.inf).any()):
            return (
                f"{REQUEST_FAULT}logits processor {name!r} forbids all tokens here that its grammar, allowed_token_ids "
                "and other options allow: leave one of them out."
            )
        return f"logits processor {name!r} left no token to sample."

    def _guarded(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            raise ProcessorError(f"logits processor {name!r} raised {type(error).__name__}: {error}") from error


def check_scores(name: str, given: object, row: Tensor) -> Tensor:
    """What a processor returned, if it can stand in for `row`; ProcessorError otherwise."""
    if not isinstance(given, Tensor) or given.shape != row.shape or not given.is_floating_point():
        what = f"{tuple(given.shape)} {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
        raise ProcessorError(f"logits processor {name!r} returned {what}, not {tuple(row.shape)} {row.dtype}.")
    scores = given.to(row)
    if bool(scores.isnan().any()):
        raise ProcessorError(f"logits processor {name!r} returned NaN.")
    return scores


def close_all(named: Iterable[Named]) -> None:
    """Close processors; one that raises does not keep the others open."""
    for name, processor in named:
        try:
            processor.close()
        except Exception:
            logger.exception("logits processor %r could not be closed", name)


class ProcessorTable:
    """The processors of all sequences of one worker, by request id."""

    def __init__(self, make: Callable[[Sequence[Mapping[str, Any]], SequenceInfo], list[Named]]) -> None:
        """make: the processors that a request asks for, for one sequence (`Registry.make`)."""
        self._make = make
        self._live: dict[str, SequenceProcessors] = {}
        self._failed: dict[str, Failure] = {}
        self._untold: dict[str, Failure] = {}

    def process(
        self,
        sequence: SequenceInfo,
        asked: Sequence[Mapping[str, Any]],
        output: Sequence[int],
        rows: Sequence[Tensor],
        drafts: Sequence[int] = (),
        first: int = 0,
    ) -> None:
        """`SequenceProcessors.process` behind `output`. A failure is noted, and the row is left as it is."""
        request_id = sequence.request_id
        if request_id in self._failed:  # told again until the request is gone, so that no token of it can pass
            self._untold[request_id] = self._failed[request_id]
            return
        try:
            if request_id not in self._live:
                self._live[request_id] = SequenceProcessors(lambda: self._make(asked, sequence))
            processors = self._live[request_id]
            processors.catch_up(output)
            failure = processors.process(rows, drafts, first)
        except ProcessorError as error:
            logger.warning("request %s fails: %s", request_id, error, exc_info=error.__cause__)
            self.forget([request_id])
            failure = self._failed[request_id] = Failure(0, str(error))
        if failure is not None:
            self._untold[request_id] = min(failure, self._untold.get(request_id, failure))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are finished, for whatever reason."""
        for request_id in request_ids:
            self._failed.pop(request_id, None)
            processors = self._live.pop(request_id, None)
            if processors is not None:
                processors.close()

    def take_failures(self) -> dict[str, Failure]:
        """Requests that failed since the last call: on which row first, and why."""
        failures, self._untold = self._untold, {}
        return failures

    def close(self) -> None:
        """The worker ends."""
        self.forget(list(self._live))
