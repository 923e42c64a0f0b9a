"""Logits processors with a state, one for each sequence, made by named factories.

vLLM's old processors were one object for all sequences of a request: stateful ones mixed the
sequences up, and were wrong after a preemption (vLLM pull request #5329 proposed factories). Here a
factory has a name, a request names it with arguments, and each sequence (n > 1: each of them) has a
processor of its own:

    logits_processors: [{"name": "no_repeat_ngram", "n": 3}]   in a body, or in extra_args

A processor sees the guided scores, after grammar, bias and penalties and before temperature. It is
fed each token that its sequence keeps, once and in order. Where vLLM takes tokens back (drafts,
output dropped by a reset), it is set back, or made anew and fed again: what it has been fed is
always a prefix of the sequence.

With tensor parallelism each rank has its own copy of each, so a processor must be deterministic.
Reading the tokens waits for the device: batches with such a request lose the overlap of async
scheduling, others nothing.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class LogitsProcessor(ABC):
    """The processor of one sequence. Whatever it raises fails this sequence's request, and no
    other."""

    @abstractmethod
    def __call__(self, scores: Tensor) -> Tensor:
        """New scores of the next token, from `scores` [vocabulary] float32, which may be changed in
        place.

        Must not change the state: with drafts a row may be computed and never be used. What is -inf
        stays -inf.
        """

    def accept(self, token: int) -> None:  # noqa: B027
        """The sequence goes on with `token`."""

    def snapshot(self) -> Any:
        """The state, for one `restore`. By default a deep copy of all attributes: override where
        that is slow."""
        return copy.deepcopy(self.__dict__)

    def restore(self, state: Any) -> None:
        """Return to what `snapshot` returned."""
        self.__dict__ = state

    def close(self) -> None:  # noqa: B027
        """Called exactly once, when the sequence is finished, aborted, failed, or its processor
        made anew."""


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
    """Makes processors. One instance in each process; its options come from the configuration, as
    keywords."""

    def __init__(self, engine: EngineInfo) -> None:
        self.engine = engine

    def check(self, *args: Any, **arguments: Any) -> None:  # noqa: B027
        """Raise ValueError, with a sentence for the user, if `make` cannot use these arguments of a
        request.

        Called when the request arrives; arguments that `make` does not take, or lacks, are refused
        before. Both get the arguments as keywords, so name them in the signature.
        """

    def forces(self, *args: Any, **arguments: Any) -> Sequence[int]:
        """The tokens that `make`'s processor may forbid all others for. A request in which
        something else may forbid these (a grammar, allowed_token_ids) is refused when it arrives.
        """
        return ()

    @abstractmethod
    def make(self, sequence: SequenceInfo, *args: Any, **arguments: Any) -> LogitsProcessor:
        """The processor of one sequence."""


Named = tuple[str, LogitsProcessor]
