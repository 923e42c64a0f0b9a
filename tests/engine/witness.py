"""Logits processors that record what they get, for the engine tests.

`witness` forbids tokens depending on all tokens that it got, so a wrong state changes the text. It
also keeps these tokens. If the engine runs in the test's own process, `WITNESSES` has all instances
that were made.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from cfg_core.logits_processors.base import LogitsProcessor, LogitsProcessorFactory, SequenceInfo

CONFIG = {"witness": f"{__name__}:WitnessFactory"}
STRIDE = 3
"""Every third token of the vocabulary is forbidden. Which ones depends on the text."""


def permits(seen: Sequence[int], token: int) -> bool:
    """Whether a witness that has seen these tokens permits `token`."""
    return token % STRIDE != zlib.crc32(repr(list(seen)).encode()) % STRIDE


def mask(scores: torch.Tensor, seen: Sequence[int]) -> torch.Tensor:
    """Forbid a third of the vocabulary, by the tokens so far."""
    scores[zlib.crc32(repr(list(seen)).encode()) % STRIDE :: STRIDE] = -torch.inf
    return scores


class Witness(LogitsProcessor):
    def __init__(self, sequence: SequenceInfo, tag: int, fail_at: int) -> None:
        self.sequence, self.tag, self.fail_at = sequence, tag, fail_at
        self.seen: list[int] = []
        self.closed = 0
        WITNESSES.append(self)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        if 0 <= self.fail_at <= len(self.seen):
            raise RuntimeError(f"on purpose, at {len(self.seen)}")
        return mask(scores, self.seen)

    def accept(self, token: int) -> None:
        assert not self.closed
        self.seen.append(token)

    def snapshot(self) -> int:
        return len(self.seen)

    def restore(self, state: int) -> None:
        del self.seen[state:]

    def close(self) -> None:
        self.closed += 1


WITNESSES: list[Witness] = []


class WitnessFactory(LogitsProcessorFactory):
    def make(self, sequence: SequenceInfo, *, tag: int = 0, fail_at: int = -1) -> LogitsProcessor:
        return Witness(sequence, tag, fail_at)


def asked(**arguments: Any) -> dict[str, Any]:
    """The entry of extra_args."""
    return {"logits_processors": [{"name": "witness", **arguments}]}


def reference(scores: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The same processor for the reference loop."""
    return mask(scores, output)
