"""The processors of each sequence: fed with its tokens, applied to its scores, closed at its
end."""

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


class Failure(NamedTuple):
    """row: which of the rows of its step a request's processor failed on, by the number of drafts
    before it."""

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

    def process(
        self, rows: Sequence[Tensor], drafts: Sequence[int], first: int = 0
    ) -> Failure | None:
        """Change `rows` [vocabulary] in place: row i is for the token behind the first `first + i`
        drafts.

        Returns the first row behind drafts that could not be processed: whether it matters is not
        known before the drafts are verified. Raises ProcessorError for the row behind none.
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
        """Why there is no token. A processor that leaves some where nothing else forbids any is not
        at fault."""
        alone = check_scores(name, self._guarded(name, processor, torch.zeros_like(row)), row)
        if bool((alone > -torch.inf).any()):
            return (
                f"{REQUEST_FAULT}logits processor {name!r} forbids all tokens here that its"
                " grammar, allowed_token_ids and other options allow: leave one of them out."
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
    """What a processor returned, if it can stand in for `row`; ProcessorError otherwise."""
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
    """Close processors; one that raises does not keep the others open."""
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
        """`SequenceProcessors.process` behind `output`. A failure is noted, and the row is left as
        it is."""
        request_id = sequence.request_id
        if (
            request_id in self._failed
        ):  # told again until the request is gone, so that no token of it can pass
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
