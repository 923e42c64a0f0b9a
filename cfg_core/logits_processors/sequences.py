"""The logits processors of each sequence.

They are fed the sequence's tokens, applied to its scores, and closed when the sequence ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cfg_core.errors import REQUEST_FAULT
from cfg_core.logits_processors.base import LogitsProcessor, Named, SequenceInfo

logger = logging.getLogger(__name__)
Make = Callable[[], list[Named]]


class ProcessorFailure(NamedTuple):
    """Why a request's processors failed in a step, and at which of its rows.

    row: the number of drafts that precede the row.
    """

    row: int
    reason: str


class ProcessorError(Exception):
    """A processor failed; the message names it."""


class SequenceProcessors:
    """The processors of one sequence, which `make` makes as (name, processor) pairs."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._named = make()
        self._fed: list[int] = []

    def catch_up(self, output: Sequence[int]) -> None:
        """Bring the processors to the state after `output`, the sequence's tokens so far.

        If vLLM has taken tokens back, the processors are made anew and fed all of `output`.
        """
        if list(output[: len(self._fed)]) != self._fed:
            self.close()
            self._named, self._fed = self._make(), []
        self._feed(output[len(self._fed) :])
        self._fed = list(output)

    def process(
        self, rows: Sequence[Tensor], drafts: Sequence[int], first: int = 0
    ) -> ProcessorFailure | None:
        """Change `rows` [vocabulary] in place.

        Row i is for the token that follows the first `first + i` drafts.

        Returns the failure at the first row after a draft that could not be processed. It matters
        only if these drafts are accepted, which is not known yet. Raises ProcessorError if the row
        that follows no draft fails, or if a processor cannot save or restore its state.
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
            failure = ProcessorFailure(behind, str(error))
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
        """Return the reason why no token is left.

        The processor is not at fault if it leaves some token where nothing else forbids any.
        """
        alone = check_scores(name, self._guarded(name, processor, torch.zeros_like(row)), row)
        if bool((alone > -torch.inf).any()):
            return (
                f"{REQUEST_FAULT}logits processor {name!r} forbids every token that the"
                " request's grammar, allowed_token_ids and other options allow here: leave one of"
                " them out."
            )
        return f"logits processor {name!r} left no token to sample."

    def _guarded(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            raise ProcessorError(
                f"logits processor {name!r} raised {type(error).__name__}: {error}"
            ) from error


def check_scores(name: str, given: object, row: Tensor) -> Tensor:
    """Return `given`, which a processor returned, in the dtype and on the device of `row`.

    Raises ProcessorError if it cannot replace `row`.
    """
    if not isinstance(given, Tensor) or given.shape != row.shape or not given.is_floating_point():
        what = (
            f"{tuple(given.shape)} {given.dtype}"
            if isinstance(given, Tensor)
            else type(given).__name__
        )
        raise ProcessorError(
            f"logits processor {name!r} returned {what}, not {tuple(row.shape)} {row.dtype}."
        )
    scores = given.to(row)
    if bool(scores.isnan().any()):
        raise ProcessorError(f"logits processor {name!r} returned NaN.")
    return scores


def close_all(named: Iterable[Named]) -> None:
    """Close all processors, even if one of them raises."""
    for name, processor in named:
        try:
            processor.close()
        except Exception:
            logger.exception("logits processor %r could not be closed", name)


class ProcessorTable:
    """The processors of all sequences of one worker, by request id."""

    def __init__(
        self, make: Callable[[Sequence[Mapping[str, Any]], SequenceInfo], list[Named]]
    ) -> None:
        """make: makes the processors that a request names, for one sequence (`Registry.make`)."""
        self._make = make
        self._live: dict[str, SequenceProcessors] = {}
        self._failed: dict[str, ProcessorFailure] = {}
        self._untold: dict[str, ProcessorFailure] = {}

    def process(
        self,
        sequence: SequenceInfo,
        asked: Sequence[Mapping[str, Any]],
        output: Sequence[int],
        rows: Sequence[Tensor],
        drafts: Sequence[int] = (),
        first: int = 0,
    ) -> None:
        """Bring the sequence's processors to the state after `output`, and change `rows` in place.

        The first call for a sequence makes its processors.
        asked: the entries of the request's `logits_processors`.
        rows, drafts, first: as in `SequenceProcessors.process`.
        A failure is recorded for `take_failures`, and the failed row is left as it is.
        """
        request_id = sequence.request_id
        # Report the failure again until the request is gone, so that none of its tokens can pass.
        if request_id in self._failed:
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
            failure = self._failed[request_id] = ProcessorFailure(0, str(error))
        if failure is not None:
            self._untold[request_id] = min(failure, self._untold.get(request_id, failure))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Close the processors of requests that have ended, for whatever reason."""
        for request_id in request_ids:
            self._failed.pop(request_id, None)
            processors = self._live.pop(request_id, None)
            if processors is not None:
                processors.close()

    def take_failures(self) -> dict[str, ProcessorFailure]:
        """Return the first failure of each request that failed since the last call."""
        failures, self._untold = self._untold, {}
        return failures

    def close(self) -> None:
        """Close all processors, because the worker ends."""
        self.forget(list(self._live))
