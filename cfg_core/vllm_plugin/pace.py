"""The engine does not run ahead of its frontend.

vLLM's engine process sends outputs as fast as it makes them. The frontend turns them into text in
one event loop. If that loop is slower than the engine (for example with 20 logprobs for each of 64
streams), outputs pile up between the two without a bound, and the first token of a new request
waits behind all of them. Therefore the frontend reports its progress, and the scheduler schedules
nothing while the oldest outputs that the frontend has not processed are older than BEHIND_S.

The progress is eight bytes of a file that both processes map: the timestamp of the newest outputs
that were processed. It is a value of time.monotonic, which is the same clock for all processes of a
machine. Without a file, the scheduler never holds back.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cfg_core.vllm_plugin.config import ours

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FILE = "pace_file"
"""Key of the file's path in our options."""

BEHIND_S = 0.25
"""Seconds that the frontend may be behind before steps are held."""
WAIT_S = 0.01
"""Seconds that a held step waits. The engine process reads its input between steps."""

_STAMP = struct.Struct("d")


def new_file(path: Path) -> None:
    """Make the file. It may be deleted as soon as both processes have opened it."""
    path.write_bytes(_STAMP.pack(0.0))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _STAMP.size)


class FrontendPace:
    """The frontend's side: reports which outputs have been processed."""

    def __init__(self, path: Path) -> None:
        self._shared = _mapped(path)
        self._newest = 0.0

    def processed(self, timestamp: float) -> None:
        """Report that the outputs of this timestamp, and all before them, have been processed.

        Outputs of several engine processes may come out of order. What was reported is never taken
        back: an engine whose newest outputs seemed to be missing again would wait for ever.
        """
        self._newest = max(self._newest, timestamp)
        _STAMP.pack_into(self._shared, 0, self._newest)


class Pace:
    """The scheduler's side: decides whether to hold a step.

    path: the file; None if the frontend does not report its progress. Then no step is held.
    """

    def __init__(self, path: Path | None) -> None:
        self._shared = None if path is None else _mapped(path)
        self._sent: deque[float] = deque()  # timestamps of outputs that may not be processed yet
        self.held_s = 0.0
        """Seconds that steps were held, since the start."""

    @classmethod
    def of(cls, config: VllmConfig) -> Pace:
        path = ours(config).get(FILE)
        return cls(None if path is None else Path(path))

    def sent(self, outputs: Mapping[int, Any]) -> None:
        """Note the outputs that now go to the frontend: EngineCoreOutputs by client."""
        if self._shared is not None:
            self._sent.extend(
                per_client.timestamp for per_client in outputs.values() if per_client.outputs
            )

    def holds(self) -> bool:
        """Whether nothing should be scheduled now.

        If the frontend is behind, this waits for WAIT_S and then looks again.
        """
        if not self._is_behind():
            return False
        began = time.monotonic()
        time.sleep(WAIT_S)
        self.held_s += time.monotonic() - began
        return self._is_behind()

    def _is_behind(self) -> bool:
        if self._shared is None or not self._sent:
            return False
        (processed,) = _STAMP.unpack_from(self._shared, 0)
        while self._sent and self._sent[0] <= processed:
            self._sent.popleft()
        return bool(self._sent) and time.monotonic() - self._sent[0] > BEHIND_S
