"""Stateful logits processors, one for each sequence, made by named factories.

vLLM's old processors were one object for all sequences of a request. Stateful ones mixed the
sequences up, and were wrong after a preemption (vLLM pull request #5329 proposed factories). Here a
factory has a name, and a request names it with arguments. Each sequence has its own processor, also
where a request has several sequences (n > 1):

    logits_processors: [{"name": "no_repeat_ngram", "n": 3}]   in a body, or in extra_args

A processor gets the guided scores after grammar masks, bias and penalties and before temperature.
It is fed each token that its sequence keeps, once and in order. Where vLLM takes tokens back
(rejected drafts, or output dropped by a reset), the processor is restored to an earlier state, or a
new one is made and fed again. So the tokens that it has been fed are always a prefix of the
sequence.

With tensor parallelism each rank has its own copy of each processor, so a processor must be
deterministic. Reading the tokens waits for the device, so batches with such a request lose the
overlap of async scheduling. Other batches lose nothing.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class LogitsProcessor(ABC):
    """The processor of one sequence.

    If it raises an exception, the request of this sequence fails, and no other.
    """

    @abstractmethod
    def __call__(self, scores: Tensor) -> Tensor:
        """Return the new scores of the next token.

        scores: [vocabulary] float32. It may be changed in place.

        The call must not change the processor's state, because with drafts a row may be computed
        and never used. A token whose score is -inf stays at -inf, whatever the call returns.
        """

    def accept(self, token: int) -> None:  # noqa: B027
        """Take note that the sequence goes on with `token`."""

    def snapshot(self) -> Any:
        """Return the state, for one call of `restore`.

        By default it is a deep copy of all attributes. Override `snapshot` and `restore` if that is
        slow.
        """
        return copy.deepcopy(self.__dict__)

    def restore(self, state: Any) -> None:
        """Go back to a state that `snapshot` returned."""
        self.__dict__ = state

    def close(self) -> None:  # noqa: B027
        """Release what the processor holds.

        It is called exactly once: when the sequence finishes, is aborted or fails, or when its
        processor is made anew.
        """


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a factory may know about the engine.

    tokenizer: returns the tokenizer, which is loaded in the first call.
    end_token_ids: the end-of-sequence tokens.
    """

    vocab_size: int
    tokenizer: Callable[[], Any]
    end_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """What a processor may know about its sequence."""

    request_id: str
    prompt_token_ids: tuple[int, ...]


class LogitsProcessorFactory(ABC):
    """Makes processors; each process that uses it has one instance.

    The constructor gets its options from the configuration, as keyword arguments.
    """

    def __init__(self, engine: EngineInfo) -> None:
        self.engine = engine

    def check(self, *args: Any, **arguments: Any) -> None:  # noqa: B027
        """Raise ValueError if `make` cannot use these arguments of a request.

        The message is a sentence for the user. `check` is called when the request arrives. Before
        that, the request is refused if its arguments do not match the signature of `make`. Both
        methods get the arguments as keywords, so name them in the signatures.
        """

    def forces(self, *args: Any, **arguments: Any) -> Sequence[int]:
        """Return the tokens that the processor may force, by forbidding all others.

        A request in which something else (a grammar, allowed_token_ids) may forbid these tokens is
        refused when it arrives.
        """
        return ()

    @abstractmethod
    def make(self, sequence: SequenceInfo, *args: Any, **arguments: Any) -> LogitsProcessor:
        """Return a new processor for one sequence."""


Named = tuple[str, LogitsProcessor]
